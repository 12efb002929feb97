"""``kvferry plan``: the transfer plan between two tensor-parallel sizes, for people and as JSON. Reads no weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from actors.runtime.config import ConfigError, Options
from actors.transfer.plan import plan
from actors.transfer.routes import PlanRefused, Route, TransferPlan
from actors.worker.layout import build_layout
from actors.worker.model.config import load_config, resolve_dtype
from messages.layout import Manifest, ModelGeometry
from scripts.geometries import GEOMETRIES
from scripts.models import resolve_model


def describe(
    *,
    model: str,
    source: str,
    target: str,
    prompt_tokens: int = 2048,
    block_size: int = 16,
    num_speculative_tokens: int = 0,
    enable_mtp_draft_body_tp1: bool = False,
) -> dict[str, Any]:
    """Who sends which slice of which cache to whom, from TP size ``source`` to ``target`` ("TP2", "TP1").

    ``model`` is a checkpoint directory, "demo", or the name of a geometry in ``scripts/geometries.py``. Returns plain
    data (see ``render``). Raises ``ConfigError`` with the reason when no such plan exists.
    """
    if prompt_tokens < 1:
        raise ConfigError(f"prompt_tokens {prompt_tokens}: a prompt has at least 1 token")
    geometry = find_geometry(model)
    if num_speculative_tokens and not geometry.draft_layers:
        raise ConfigError(f"num_speculative_tokens {num_speculative_tokens}: {model} has no draft layer; allowed: 0")
    sizes = tensor_parallel_size(source), tensor_parallel_size(target)
    sides = [
        manifests(
            geometry,
            name,
            size,
            block_size=block_size,
            prompt_tokens=prompt_tokens,
            speculative_tokens=num_speculative_tokens,
            draft_replicated=enable_mtp_draft_body_tp1,
        )
        for name, size in zip(("P", "D"), sizes, strict=True)
    ]
    try:
        plans = [plan(sides[0], manifest) for manifest in sides[1]]
    except PlanRefused as refusal:
        raise ConfigError(f"no plan from {source} to {target}: {refusal}") from refusal
    return {
        "model": model,
        "from": f"TP{sizes[0]}",
        "to": f"TP{sizes[1]}",
        "prompt_tokens": prompt_tokens,
        "block_size": block_size,
        "num_speculative_tokens": num_speculative_tokens,
        "bytes_per_token": sum(found.token_bytes for found in plans),
        "bytes_per_request": sum(found.request_bytes(prompt_tokens) for found in plans),
        "staging_windows": _windows(plans),
        "routes": [row for found in plans for row in _rows(found, prompt_tokens)],
    }


def find_geometry(model: str) -> ModelGeometry:
    """The cache geometry of a known model or of a checkpoint, in the dtype that ``--dtype auto`` means here."""
    if model in GEOMETRIES:
        return GEOMETRIES[model]
    config = load_config(resolve_model(model))
    return config.geometry(dtype=resolve_dtype("auto", config, "cpu"))


def tensor_parallel_size(text: str) -> int:
    """``TP2`` → 2."""
    match = re.fullmatch(r"(?:TP|tp)?([1-9]\d*)", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a tensor-parallel size; write it as TP1, TP2, TP4 …")
    return int(match[1])


def manifests(
    geometry: ModelGeometry,
    name: str,
    tp_size: int,
    *,
    block_size: int,
    prompt_tokens: int,
    speculative_tokens: int = 0,
    draft_replicated: bool = False,
) -> list[Manifest]:
    """What the ranks of an instance would publish. Raises ``ConfigError`` when heads do not shard."""
    block_count = -(-prompt_tokens // block_size)
    found = []
    for rank in range(tp_size):
        tensors, _ = build_layout(
            geometry,
            tp_size,
            rank,
            block_size=block_size,
            block_count=block_count,
            slot_count=1,
            speculative_tokens=speculative_tokens,
            draft_replicated=draft_replicated,
            region_id=f"{name}{rank}",
        )
        found.append(
            Manifest(
                instance=name,
                incarnation=1,
                rank=rank,
                tp_size=tp_size,
                model_fingerprint=geometry.model_fingerprint,
                block_size=block_size,
                block_count=block_count,
                slot_count=1,
                speculative_tokens=speculative_tokens,
                regions=(),
                tensors=tensors,
                max_tokens_per_chunk=Options().max_tokens_per_chunk_for_prefill,
            )
        )
    return found


def _windows(plans: Iterable[TransferPlan]) -> list[dict[str, int]]:
    return [
        {"target_rank": found.target_rank, "source_rank": rank, "bytes": window.size_bytes}
        for found in plans
        for rank, window in found.windows.items()
    ]


def _rows(found: TransferPlan, prompt_tokens: int) -> list[dict[str, Any]]:
    """One row per kind of route into a target rank: equal routes of different layers are one row."""
    groups: dict[tuple[Any, ...], list[Route]] = {}
    for route in found.routes:
        key = (route.source_rank, route.namespace, route.target.role, route.segments, route.in_place)
        groups.setdefault(key, []).append(route)
    rows = []
    for routes in groups.values():
        first = routes[0]
        row_bytes = sum(route.row_bytes for route in routes)
        rows.append(
            {
                "target_rank": found.target_rank,
                "source_rank": first.source_rank,
                "namespace": first.namespace,
                "role": first.target.role,
                "layers": [route.layer for route in routes],
                "slices": [
                    {
                        "axis": segment.axis,
                        "start": segment.start,
                        "length": segment.length,
                        "source_offset": segment.source_offset,
                        "target_offset": segment.target_offset,
                    }
                    for segment in first.segments
                ],
                "in_place": first.in_place,
                "bytes_per_token": row_bytes if first.by_block else 0,
                "bytes_per_request": row_bytes * (prompt_tokens if first.by_block else first.target.live_rows),
            }
        )
    return rows


# -- for people ---------------------------------------------------------------------------------------------------


def render(description: dict[str, Any]) -> str:
    """The plan as a table. A slice ``kv_heads[1:2]→1`` is units 1 to 2 of that axis, at unit 1 of the target's row."""
    head = ("target", "source", "cache", "layers", "slice → place in the target's row", "B/token", "per request", "how")
    table = [head]
    for row in description["routes"]:
        table.append(
            (
                f"D{row['target_rank']}",
                f"← P{row['source_rank']}",
                f"{row['namespace']} {row['role']}",
                f"{len(row['layers'])}",
                ", ".join(_slice(part) for part in row["slices"]),
                f"{row['bytes_per_token']:,}" if row["bytes_per_token"] else "·",
                size_text(row["bytes_per_request"]),
                "in place" if row["in_place"] else "staged",
            )
        )
    lines = [
        f"{description['model']}: {description['from']} → {description['to']}, a prompt of "
        f"{description['prompt_tokens']:,} tokens in blocks of {description['block_size']}",
        "",
        *_aligned(table, right=(3, 5, 6)),
        "",
        f"in all {description['bytes_per_token']:,} bytes per token, {size_text(description['bytes_per_request'])} per "
        "request",
    ]
    if description["staging_windows"]:
        sizes = {window["bytes"] for window in description["staging_windows"]}
        text = size_text(min(sizes)) if len(sizes) == 1 else f"{size_text(min(sizes))} to {size_text(max(sizes))}"
        lines.append(f"staged routes pass through windows of {text} per source rank")
    else:
        lines.append("every route is written in place: no staging")
    return "\n".join(lines)


def _slice(part: dict[str, Any]) -> str:
    return f"{part['axis']}[{part['start']}:{part['start'] + part['length']}]→{part['target_offset']}"


def size_text(size_bytes: int) -> str:
    """Bytes for people: ``228.5 MB``."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _aligned(table: Sequence[Sequence[str]], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("─" * width for width in widths))
    return lines
