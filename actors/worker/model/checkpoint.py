"""Reads one rank's slices of a Hugging Face checkpoint directory.

Only the requested rows or columns are read (safetensors slicing), so that a rank never holds the whole model. Both
weight prefixes are understood (``model.`` of text checkpoints, ``model.language_model.`` of multimodal ones); vision
weights are ignored. Every problem is a ``ConfigError`` that names the tensor and the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from actors.runtime.config import ConfigError
from actors.worker.model.config import read_headers

Range = tuple[int, int]
INDEX_FILE = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F32", "BF16", "F16")
_IGNORED_PREFIXES = ("model.visual.", "visual.")


def canonical_name(name: str) -> str:
    """``model.language_model.layers.0.x`` and ``model.layers.0.x`` → ``layers.0.x``; others stay."""
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name.removeprefix("language_model.")


class Checkpoint:
    """The tensors of one directory by canonical name. Not thread-safe; close it (or use ``with``) after loading."""

    def __init__(self, model_dir: str | Path) -> None:
        self._directory = Path(model_dir)
        self._headers = read_headers(self._directory)
        self._places = self._index()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the open files."""
        self._open.clear()

    @property
    def element_count(self) -> int:
        """Numbers in all tensors together."""
        return sum(math.prod(self._headers[file][name]["shape"]) for file, name in self._places.values())

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        rows: Sequence[Range] | None = None,
        columns: Range | None = None,
    ) -> torch.Tensor:
        """Tensor ``name``, which must have the full ``shape``, in ``dtype``; only ``rows`` (axis 0, concatenated in the
        given order) and ``columns`` (axis 1) when given."""
        file, stored = self._place(name)
        entry = self._headers[file][stored]
        if entry.get("dtype") not in _FLOAT_DTYPES:
            raise ConfigError(
                f"{self._directory / file}: tensor {stored} has dtype {entry.get('dtype')}; "
                f"allowed: {', '.join(_FLOAT_DTYPES)}"
            )
        if list(entry.get("shape", [])) != list(shape):
            raise ConfigError(
                f"{self._directory / file}: tensor {stored} has shape {entry.get('shape')}, "
                f"config.json says {list(shape)}"
            )
        try:
            source = self._file(file).get_slice(stored)
            wanted = list(rows) if rows is not None else [(0, shape[0])]
            parts = [source[a:b] if columns is None else source[a:b, columns[0] : columns[1]] for a, b in wanted]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ConfigError(f"{self._directory / file}: tensor {stored} cannot be read: {error}") from error
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tensor.to(dtype).contiguous()

    def _place(self, name: str) -> tuple[str, str]:
        place = self._places.get(name)
        if place is None:
            raise ConfigError(f"{self._directory}: the weight files hold no tensor {name} (nor with a model. prefix)")
        return place

    def _file(self, file: str) -> Any:
        handle = self._open.get(file)
        if handle is None:
            try:
                handle = safe_open(str(self._directory / file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{self._directory / file} is broken or cut short: {error}") from error
            self._open[file] = handle
        return handle

    def _index(self) -> dict[str, tuple[str, str]]:
        """Canonical name → (file, stored name)."""
        if not self._headers:
            raise ConfigError(f"{self._directory} holds no *.safetensors file; option model must name a checkpoint")
        index_file = self._directory / INDEX_FILE
        if index_file.exists():
            pairs = self._indexed(index_file)
        else:
            pairs = [(name, file) for file, header in self._headers.items() for name in header]
        places: dict[str, tuple[str, str]] = {}
        for name, file in pairs:
            if name.startswith(_IGNORED_PREFIXES):
                continue
            key = canonical_name(name)
            if key in places:
                raise ConfigError(
                    f"{self._directory}: tensor {key} is stored twice, in {places[key][0]} and in {file}; "
                    f"an index file {INDEX_FILE} must say which one counts"
                )
            places[key] = (file, name)
        return places

    def _indexed(self, index_file: Path) -> list[tuple[str, str]]:
        try:
            weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
            pairs = [(str(name), str(file)) for name, file in weight_map.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index_file} is not a weight index: {error!r}") from error
        for name, file in pairs:
            if file not in self._headers:
                raise ConfigError(f"{index_file} places tensor {name} in {file}, which is missing")
            if name not in self._headers[file]:
                raise ConfigError(f"{index_file} places tensor {name} in {file}, which does not hold it")
        return pairs
