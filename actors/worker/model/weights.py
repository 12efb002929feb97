"""One rank's weights, in the form the forward pass wants them.

Projections that read the same input are fused into one matrix, so that a decode step makes few calls:

* attention: rows ``[Q heads, K heads, gates, V heads]``; the rotary dims of Q and K are reordered so that each rotated
  pair lies side by side, which turns rotation into one complex product (their dot product does not change);
* delta-net: rows ``[Q, K, V channels, z, b, a]``; MLP: rows ``[gate, up]``.

In float32 the weights of the norms are folded into the matrices behind them (``W·diag(1 + w)``), which saves a pass
over the activations; in narrower types that would change the rounding. So it is not done either for a bfloat16
checkpoint that the kernels decode: its matrices stay bfloat16 in memory (see ``projection.py``).

Sharding is by contiguous heads, by columns for the row-parallel outputs, by vocabulary for embedding and lm_head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from actors.worker.layout import kv_head_span
from actors.worker.model import kernels
from actors.worker.model.checkpoint import Checkpoint, Range
from actors.worker.model.config import ModelConfig
from actors.worker.model.projection import Projection

TWO_LAYOUTS_BYTES_MAX = 1 << 30
"""A rank whose weights take more keeps one layout of each only (see ``projection.py``)."""

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in loaded layers."""


@dataclass(frozen=True)
class AttentionWeights:
    """``projection`` [(2·Hq + 2·Hkv)·hd, hidden], ``output`` [hidden, Hq·hd], ``head_norm`` [Hq+Hkv, hd]: 1 + w."""

    projection: Projection
    head_norm: torch.Tensor
    output: Projection
    query_heads: int
    kv_heads: int


@dataclass(frozen=True)
class DeltaWeights:
    """``projection`` [C + V + 2·hv, hidden], ``conv`` [K, C], ``decay`` = -exp(A_log) and ``dt_bias`` [hv] float32,
    ``norm`` [dv] (None: folded), ``output`` [hidden, V]."""

    projection: Projection
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor | None
    output: Projection
    key_heads: int
    value_heads: int


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: a mixer and an MLP, each behind its norm (1 + weight, float32; None: folded)."""

    input_norm: torch.Tensor | None
    mixer: AttentionWeights | DeltaWeights
    mlp_norm: torch.Tensor | None
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class DraftWeights:
    """The MTP body. ``fusion`` [hidden, columns]: this rank's columns of ``mtp.fc``; all of them if replicated."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    fusion: Projection
    fusion_columns: Range
    layer: LayerWeights
    norm: torch.Tensor
    replicated: bool


@dataclass(frozen=True)
class ModelWeights:
    """Everything one rank computes with. Its vocabulary is ``[vocab_start, vocab_start + embedding.shape[0])``.

    ``dtype`` is what it computes in; ``embedding`` may be kept in a narrower type.
    """

    embedding: torch.Tensor
    lm_head: Projection
    vocab_start: int
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    draft: DraftWeights | None
    dtype: torch.dtype


def vocab_range(vocab_size: int, tp_size: int, rank: int) -> Range:
    """The vocabulary rows of ``rank``: equal shares rounded up, the last rank's may be shorter."""
    share = -(-vocab_size // tp_size)
    return min(vocab_size, rank * share), min(vocab_size, (rank + 1) * share)


def load_weights(
    config: ModelConfig,
    *,
    tp_size: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    with_draft: bool,
    draft_replicated: bool,
    progress: Progress | None = None,
) -> ModelWeights:
    """Load ``rank``'s slices. Raises ``ConfigError`` for a broken checkpoint, naming tensor and file."""
    total = len(config.layer_kinds) + 1 + int(with_draft)
    report = progress or (lambda done, whole: None)
    with Checkpoint(config.model_dir) as checkpoint:
        loader = _Loader(config, checkpoint, tp_size, rank, dtype, device)
        layers = []
        for index, kind in enumerate(config.layer_kinds):
            layers.append(loader.layer(f"layers.{index}", kind == "attention"))
            report(index + 1, total)
        draft = None
        if with_draft:
            body = _Loader(config, checkpoint, 1, 0, dtype, device) if draft_replicated else loader
            draft = body.draft(draft_replicated)
            report(total - 1, total)
        weights = loader.whole(tuple(layers), draft)
        report(total, total)
    return weights


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        tp_size: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._tp_size, self._rank = tp_size, rank
        self._dtype, self._device = dtype, device
        stays_narrow = config.checkpoint_dtype == "bfloat16" and device.type == "cpu" and kernels.library() is not None
        self._folds = dtype == torch.float32 and not stays_narrow
        self._two_layouts = checkpoint.element_count * dtype.itemsize // tp_size <= TWO_LAYOUTS_BYTES_MAX

    def _project(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> Projection:
        """A projection of inputs that ``scale`` [in] still has to multiply."""
        return Projection(weight if scale is None else weight * scale, two_layouts=self._two_layouts)

    def whole(self, layers: tuple[LayerWeights, ...], draft: DraftWeights | None) -> ModelWeights:
        config = self._config
        rows = vocab_range(config.vocab_size, self._tp_size, self._rank)
        shape = (config.vocab_size, config.hidden_size)
        embedding = self._read("embed_tokens.weight", shape, rows=[rows])
        head = embedding if config.tied_embeddings else self._read("lm_head.weight", shape, rows=[rows])
        norm = self._norm("norm.weight")
        lm_head = self._project(head)
        if config.tied_embeddings and lm_head.plain is not None:
            embedding = lm_head.plain  # one copy of it, wherever the projection keeps its own
        return ModelWeights(embedding, lm_head, rows[0], layers, norm, draft, self._dtype)

    def layer(self, prefix: str, attention: bool) -> LayerWeights:
        config = self._config
        inner = self._share(config.intermediate_size)
        wide = (config.intermediate_size, config.hidden_size)
        gate = self._read(f"{prefix}.mlp.gate_proj.weight", wide, rows=[inner])
        up = self._read(f"{prefix}.mlp.up_proj.weight", wide, rows=[inner])
        input_norm = self._norm(f"{prefix}.input_layernorm.weight")
        mlp_norm = self._norm(f"{prefix}.post_attention_layernorm.weight")
        scale = input_norm if self._folds else None
        return LayerWeights(
            input_norm=None if self._folds else input_norm,
            mixer=(
                self._attention(f"{prefix}.self_attn", scale)
                if attention
                else self._delta(f"{prefix}.linear_attn", scale)
            ),
            mlp_norm=None if self._folds else mlp_norm,
            gate_up=self._project(torch.cat((gate, up)), mlp_norm if self._folds else None),
            down=self._project(self._read(f"{prefix}.mlp.down_proj.weight", wide[::-1], columns=inner)),
        )

    def draft(self, replicated: bool) -> DraftWeights:
        hidden = self._config.hidden_size
        columns = self._share(2 * hidden)
        return DraftWeights(
            embedding_norm=self._norm("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=self._norm("mtp.pre_fc_norm_hidden.weight"),
            fusion=self._project(self._read("mtp.fc.weight", (hidden, 2 * hidden), columns=columns)),
            fusion_columns=columns,
            layer=self.layer("mtp.layers.0", attention=True),
            norm=self._norm("mtp.norm.weight"),
            replicated=replicated,
        )

    def _attention(self, prefix: str, scale: torch.Tensor | None) -> AttentionWeights:
        config, dim = self._config, self._config.head_dim
        first, last = self._share(config.attention_heads)
        kv_first, kv_count = kv_head_span(config.kv_heads, self._tp_size, self._rank)
        heads = range(first, last)
        kv_rows = [(kv_first * dim, (kv_first + kv_count) * dim)]
        query_shape = (config.attention_heads * dim * 2, config.hidden_size)
        kv_shape = (config.kv_heads * dim, config.hidden_size)
        order = self._rotary_order()
        queries = self._read(
            f"{prefix}.q_proj.weight", query_shape, rows=[(h * 2 * dim, h * 2 * dim + dim) for h in heads]
        )
        gates = self._read(
            f"{prefix}.q_proj.weight", query_shape, rows=[(h * 2 * dim + dim, (h + 1) * 2 * dim) for h in heads]
        )
        keys = self._read(f"{prefix}.k_proj.weight", kv_shape, rows=kv_rows)
        values = self._read(f"{prefix}.v_proj.weight", kv_shape, rows=kv_rows)
        rotated = torch.cat((queries, keys)).view(-1, dim, config.hidden_size)[:, order].flatten(0, 1)
        query_norm = self._norm(f"{prefix}.q_norm.weight", dim)[order]
        key_norm = self._norm(f"{prefix}.k_norm.weight", dim)[order]
        output_shape = (config.hidden_size, config.attention_heads * dim)
        return AttentionWeights(
            projection=self._project(torch.cat((rotated, gates, values)), scale),
            head_norm=torch.cat((query_norm.expand(len(heads), dim), key_norm.expand(kv_count, dim))).contiguous(),
            output=self._project(
                self._read(f"{prefix}.o_proj.weight", output_shape, columns=(first * dim, last * dim))
            ),
            query_heads=len(heads),
            kv_heads=kv_count,
        )

    def _delta(self, prefix: str, scale: torch.Tensor | None) -> DeltaWeights:
        config, hidden = self._config, self._config.hidden_size
        key_first, key_last = self._share(config.linear_key_heads)
        first, last = self._share(config.linear_value_heads)
        key_width = config.linear_key_heads * config.linear_key_dim
        value_width = config.linear_value_heads * config.linear_value_dim
        keys = (key_first * config.linear_key_dim, key_last * config.linear_key_dim)
        values = (first * config.linear_value_dim, last * config.linear_value_dim)
        segments = [keys, _shift(keys, key_width), _shift(values, 2 * key_width)]
        channels = 2 * key_width + value_width
        heads = (first, last)
        conv_shape = (channels, 1, config.conv_kernel)
        head_shape = (config.linear_value_heads, hidden)
        count = (config.linear_value_heads,)
        a_log = self._read(f"{prefix}.A_log", count, rows=[heads], dtype=torch.float32)
        norm = self._read(f"{prefix}.norm.weight", (config.linear_value_dim,), dtype=torch.float32)
        inputs = torch.cat(
            (
                self._read(f"{prefix}.in_proj_qkv.weight", (channels, hidden), rows=segments),
                self._read(f"{prefix}.in_proj_z.weight", (value_width, hidden), rows=[values]),
                self._read(f"{prefix}.in_proj_b.weight", head_shape, rows=[heads]),
                self._read(f"{prefix}.in_proj_a.weight", head_shape, rows=[heads]),
            )
        )
        output = self._read(f"{prefix}.out_proj.weight", (hidden, value_width), columns=values)
        return DeltaWeights(
            projection=self._project(inputs, scale),
            conv=self._read(f"{prefix}.conv1d.weight", conv_shape, rows=segments).squeeze(1).t().contiguous(),
            decay=-a_log.exp(),
            dt_bias=self._read(f"{prefix}.dt_bias", count, rows=[heads], dtype=torch.float32),
            norm=None if self._folds else norm,
            output=self._project(output, norm.repeat(last - first) if self._folds else None),
            key_heads=key_last - key_first,
            value_heads=last - first,
        )

    def _rotary_order(self) -> torch.Tensor:
        """Head dims in the order (0, h, 1, h+1, …, rest) with h half the rotated dims."""
        config = self._config
        half = config.rotary_dim // 2
        pairs = torch.arange(config.rotary_dim).view(2, half).t().flatten()
        return torch.cat((pairs, torch.arange(config.rotary_dim, config.head_dim))).to(self._device)

    def _norm(self, name: str, width: int = 0) -> torch.Tensor:
        return 1.0 + self._read(name, (width or self._config.hidden_size,), dtype=torch.float32)

    def _share(self, count: int) -> Range:
        return count * self._rank // self._tp_size, count * (self._rank + 1) // self._tp_size

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: list[Range] | None = None,
        columns: Range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        tensor = self._checkpoint.read(name, shape, dtype or self._dtype, rows=rows, columns=columns)
        return tensor.to(self._device)


def _shift(part: Range, by: int) -> Range:
    return part[0] + by, part[1] + by
