"""Decode steps through the compiled kernels: one call per half of a layer (norm, mixer; norm, MLP).

Legend: N tokens = rows · width of a decode part. The structures mirror those of ``kernels.c``, field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from actors.worker.caches import DeltaCache, KVCache, RankCaches
from actors.worker.model import kernels
from actors.worker.model.config import ModelConfig
from actors.worker.model.delta import L2_EPS
from actors.worker.model.kernels import FLOAT, INT, POINTER
from actors.worker.model.plan import DecodePart, StepPlan
from actors.worker.model.weights import AttentionWeights, DeltaWeights, LayerWeights


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("threads", "rows", "width")),
        *((name, POINTER) for name in ("slots", "lives", "starts", "counts", "blocks")),
        *((name, INT) for name in ("block_stride", "block_size")),
        *((name, POINTER) for name in ("rotations", "scratch")),
    ]


class _Mlp(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("hidden", "inner")),
        *((name, POINTER) for name in ("norm", "gate_up", "down")),
        ("eps", FLOAT),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("hidden", "query_heads", "kv_heads", "head_dim", "rotary_dim")),
        *((name, POINTER) for name in ("norm", "projection", "head_norm", "output", "key", "value")),
        ("eps", FLOAT),
    ]


class _Delta(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("hidden", "key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, INT) for name in ("taps", "columns", "checkpoints")),
        *((name, POINTER) for name in ("norm", "projection", "kernel", "decay", "dt_bias", "gated_norm", "output")),
        *((name, POINTER) for name in ("conv", "ssm")),
        *((name, FLOAT) for name in ("eps", "unit_eps", "output_eps")),
    ]


class FusedStep:
    """The decode part of one step. Everything it points to lives as long as it does."""

    def __init__(self, part: DecodePart, rotations: torch.Tensor) -> None:
        """``rotations`` [N, 1, rotary_dim / 2] complex."""
        specs = part.specs
        stride = max(-(-(spec.start + spec.width) // part.block_size) for spec in specs)
        blocks: list[int] = []
        for spec in specs:
            used = spec.blocks[:stride]
            blocks += used
            blocks += [0] * (stride - len(used))  # behind this row's context, never read
        arrays = [
            _integers([spec.slot for spec in specs]),
            _integers([spec.live for spec in specs]),
            _integers([spec.start for spec in specs]),
            _integers([spec.width for spec in specs]),
            _integers(blocks),
        ]
        self._keep = (arrays, rotations)
        pointers = [ctypes.addressof(array) for array in arrays]
        sizes = (torch.get_num_threads(), part.rows, part.width)
        self.c = _Step(*sizes, *pointers, stride, part.block_size, rotations.data_ptr(), None)


class Scratch:
    """Working memory that all calls of one thread share; it grows with the largest step."""

    def __init__(self) -> None:
        self._floats = torch.empty(0)

    def pointer(self, count: int) -> int:
        """To at least ``count`` floats, until the next call."""
        if self._floats.numel() < count:
            self._floats = torch.empty(count)
        address: int = self._floats.data_ptr()
        return address


class _Half:
    """One half of a layer: its structure and the function that runs it."""

    def __init__(self, library: ctypes.CDLL, name: str, c: ctypes.Structure, scratch: Scratch, keep: Any) -> None:
        """``keep``: whatever owns the memory that ``c`` points to."""
        self._run = getattr(library, f"kvferry_{name}")
        self._floats = getattr(library, f"kvferry_{name}_scratch")
        self._scratch = scratch
        self._keep = (c, keep)
        self._address = ctypes.addressof(c)

    def __call__(self, x: torch.Tensor, step: FusedStep) -> torch.Tensor:
        address = ctypes.addressof(step.c)
        step.c.scratch = self._scratch.pointer(self._floats(self._address, address))
        output = torch.empty_like(x)
        self._run(self._address, address, x.data_ptr(), output.data_ptr())
        return output


class FusedLayer:
    """One layer's halves: this rank's part of the outputs [N, hidden] for ``x`` [N, hidden] before its norm."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        layer: LayerWeights,
        cache: KVCache | DeltaCache,
        caches: RankCaches,
        scratch: Scratch,
    ) -> None:
        mixer = layer.mixer
        if isinstance(mixer, AttentionWeights):
            assert isinstance(cache, KVCache)
            attention = _attention(config, layer, mixer, cache)
            self.mix = _Half(library, "attention", attention, scratch, (layer, cache))
        else:
            assert isinstance(cache, DeltaCache)
            self.mix = _Half(library, "delta", _delta(config, layer, mixer, cache, caches), scratch, (layer, cache))
        gate_up, down = layer.gate_up.plain, layer.down.plain
        sizes = (layer.gate_up.in_features, layer.down.in_features)
        mlp = _Mlp(*sizes, *map(_address, (layer.mlp_norm, gate_up, down)), config.norm_eps)
        self.mlp = _Half(library, "mlp", mlp, scratch, layer)


def _attention(config: ModelConfig, layer: LayerWeights, mixer: AttentionWeights, cache: KVCache) -> _Attention:
    projection, output = mixer.projection.plain, mixer.output.plain
    tensors = (layer.input_norm, projection, mixer.head_norm, output, cache.key, cache.value)
    sizes = (config.hidden_size, mixer.query_heads, mixer.kv_heads, config.head_dim, config.rotary_dim)
    return _Attention(*sizes, *map(_address, tensors), config.norm_eps)


def _delta(
    config: ModelConfig, layer: LayerWeights, mixer: DeltaWeights, cache: DeltaCache, caches: RankCaches
) -> _Delta:
    key_dim, value_dim, eps = config.linear_key_dim, config.linear_value_dim, config.norm_eps
    sizes = (config.hidden_size, mixer.key_heads, mixer.value_heads, key_dim, value_dim)
    rows = (mixer.conv.shape[0], caches.conv_columns, caches.speculative_tokens + 1)
    weights = (layer.input_norm, mixer.projection.plain, mixer.conv, mixer.decay, mixer.dt_bias, mixer.norm)
    tensors = (*weights, mixer.output.plain, cache.conv, cache.ssm)
    return _Delta(*sizes, *rows, *map(_address, tensors), eps, L2_EPS, eps * key_dim)  # see delta.DeltaShape


def fuse(
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    layer_caches: Sequence[KVCache | DeltaCache],
    caches: RankCaches,
    scratch: Scratch,
) -> tuple[FusedLayer, ...]:
    """The fused form of every layer; nothing when this machine or the weights' type is not one for the kernels."""
    library = kernels.library()
    if library is None or not all(_suits(layer.gate_up.plain) for layer in layers):
        return ()
    pairs = zip(layers, layer_caches, strict=True)
    return tuple(FusedLayer(library, config, layer, cache, caches, scratch) for layer, cache in pairs)


def _suits(weight: torch.Tensor | None) -> bool:
    return weight is not None and weight.dtype == torch.float32 and weight.device.type == "cpu"


def fused_step(plan: StepPlan, rotations: torch.Tensor) -> FusedStep | None:
    """The step for ``FusedLayer``; None when it has prompt chunks or more tokens than the kernels are good for."""
    if plan.decode is None or plan.prefills or plan.token_count > kernels.TOKENS_MAX:
        return None
    return FusedStep(plan.decode, rotations)


def _integers(values: Sequence[int]) -> Any:
    return (INT * len(values))(*values)


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    address: int = tensor.data_ptr()
    return address
