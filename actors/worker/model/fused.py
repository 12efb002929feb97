"""Decode steps through the compiled kernels, half by half of each layer (norm, mixer; norm, MLP).

Legend: N tokens = rows · width of a decode part. The structures mirror those of ``kernels.c``, field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from actors.worker.caches import DeltaCache, KVCache, RankCaches
from actors.worker.model import kernels
from actors.worker.model.config import ModelConfig
from actors.worker.model.delta import L2_EPS
from actors.worker.model.kernels import FLOAT, INT, POINTER, Matrix
from actors.worker.model.plan import DecodePart, StepPlan
from actors.worker.model.projection import Projection
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
        ("norm", POINTER),
        *((name, Matrix) for name in ("gate_up", "down")),
        ("eps", FLOAT),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("hidden", "query_heads", "kv_heads", "head_dim", "rotary_dim")),
        *((name, POINTER) for name in ("norm", "head_norm")),
        *((name, Matrix) for name in ("projection", "output")),
        *((name, POINTER) for name in ("key", "value")),
        ("eps", FLOAT),
    ]


class _Delta(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("hidden", "key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, INT) for name in ("taps", "columns", "checkpoints")),
        *((name, POINTER) for name in ("norm", "kernel", "decay", "dt_bias", "gated_norm")),
        *((name, Matrix) for name in ("projection", "output")),
        *((name, POINTER) for name in ("conv", "ssm")),
        *((name, FLOAT) for name in ("eps", "unit_eps", "output_eps")),
    ]


class _Half(ctypes.Structure):
    _fields_ = [("kind", INT), ("half", POINTER)]


_KINDS: Final = {_Attention: 0, _Delta: 1, _Mlp: 2}

AllReduce = Callable[[torch.Tensor], torch.Tensor]


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


class FusedLayers:
    """Layers whose decode steps run in the kernels. ``keep``: whatever owns the memory that the halves point to."""

    def __init__(
        self, library: ctypes.CDLL, hidden_size: int, halves: Sequence[ctypes.Structure], scratch: Scratch, keep: Any
    ) -> None:
        self._run, self._floats = library.kvferry_halves, library.kvferry_scratch
        self._hidden = hidden_size
        self._halves = (_Half * len(halves))(*(_Half(_KINDS[type(half)], ctypes.addressof(half)) for half in halves))
        self._addresses = [ctypes.addressof(half) for half in self._halves]
        self._scratch = scratch
        self._keep = (halves, keep)

    def __call__(self, x: torch.Tensor, step: FusedStep, all_reduce: AllReduce | None) -> torch.Tensor:
        """``x`` [N, hidden] behind all layers, in place. ``all_reduce`` sums the ranks' parts of a half's output; None:
        they are whole, and all halves run in one call."""
        output = torch.empty_like(x)
        address, count = ctypes.addressof(step.c), len(self._halves)
        step.c.scratch = self._scratch.pointer(self._floats(self._addresses[0], count, address))
        if all_reduce is None:
            self._run(self._addresses[0], count, address, self._hidden, x.data_ptr(), output.data_ptr())
            return x.add_(output)
        for half in self._addresses:
            self._run(half, 1, address, self._hidden, x.data_ptr(), output.data_ptr())
            x.add_(all_reduce(output))
        return x


def _halves(
    config: ModelConfig, layer: LayerWeights, cache: KVCache | DeltaCache, caches: RankCaches
) -> tuple[ctypes.Structure, ctypes.Structure]:
    """A layer's mixer and its MLP, each with the norm before it: this rank's part."""
    matrices = (_matrix(layer.gate_up), _matrix(layer.down))
    sizes = (layer.gate_up.in_features, layer.down.in_features)
    mlp = _Mlp(*sizes, _address(layer.mlp_norm), *matrices, config.norm_eps)
    if isinstance(layer.mixer, AttentionWeights):
        assert isinstance(cache, KVCache)
        return _attention(config, layer, layer.mixer, cache), mlp
    assert isinstance(cache, DeltaCache)
    return _delta(config, layer, layer.mixer, cache, caches), mlp


def _attention(config: ModelConfig, layer: LayerWeights, mixer: AttentionWeights, cache: KVCache) -> _Attention:
    norms = map(_address, (layer.input_norm, mixer.head_norm))
    matrices = (_matrix(mixer.projection), _matrix(mixer.output))
    sizes = (config.hidden_size, mixer.query_heads, mixer.kv_heads, config.head_dim, config.rotary_dim)
    return _Attention(*sizes, *norms, *matrices, *map(_address, (cache.key, cache.value)), config.norm_eps)


def _delta(
    config: ModelConfig, layer: LayerWeights, mixer: DeltaWeights, cache: DeltaCache, caches: RankCaches
) -> _Delta:
    key_dim, value_dim, eps = config.linear_key_dim, config.linear_value_dim, config.norm_eps
    sizes = (config.hidden_size, mixer.key_heads, mixer.value_heads, key_dim, value_dim)
    rows = (mixer.conv.shape[0], caches.conv_columns, caches.speculative_tokens + 1)
    vectors = map(_address, (layer.input_norm, mixer.conv, mixer.decay, mixer.dt_bias, mixer.norm))
    matrices = (_matrix(mixer.projection), _matrix(mixer.output))
    states = map(_address, (cache.conv, cache.ssm))
    return _Delta(*sizes, *rows, *vectors, *matrices, *states, eps, L2_EPS, eps * key_dim)  # see delta.DeltaShape


def fuse(
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    layer_caches: Sequence[KVCache | DeltaCache],
    caches: RankCaches,
    scratch: Scratch,
) -> FusedLayers | None:
    """The fused form of these layers; None when there are none, or this machine or the weights' type is not one for the
    kernels."""
    library = kernels.library()
    if library is None or not layers or not all(layer.gate_up.is_compiled for layer in layers):
        return None
    pairs = zip(layers, layer_caches, strict=True)
    halves = [half for layer, cache in pairs for half in _halves(config, layer, cache, caches)]
    return FusedLayers(library, config.hidden_size, halves, scratch, (layers, layer_caches))


def fused_step(plan: StepPlan, rotations: torch.Tensor) -> FusedStep | None:
    """The step for ``FusedLayers``; None when it has prompt chunks or more tokens than the kernels are good for."""
    if plan.decode is None or plan.prefills or plan.token_count > kernels.TOKENS_MAX:
        return None
    return FusedStep(plan.decode, rotations)


def _integers(values: Sequence[int]) -> Any:
    return (INT * len(values))(*values)


def _matrix(projection: Projection) -> Matrix:
    assert projection.plain is not None
    return Matrix.of(projection.plain)


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    address: int = tensor.data_ptr()
    return address
