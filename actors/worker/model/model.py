"""One rank's model: embeds, runs the layers over a step's flat batch, and turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actors.worker.caches import DeltaCache, KVCache, RankCaches
from actors.worker.collectives import Collective
from actors.worker.model.attention import AttentionShape, attention
from actors.worker.model.config import ModelConfig
from actors.worker.model.delta import DeltaShape, delta_net
from actors.worker.model.fused import Scratch, fuse, fused_step
from actors.worker.model.ops import rms_norm, swiglu
from actors.worker.model.plan import StepPlan
from actors.worker.model.weights import AttentionWeights, LayerWeights, ModelWeights, vocab_range

LayerDone = Callable[[int], None]
"""Called after an attention layer wrote its KEY and VALUE, with the layer's index."""


class RankModel:
    """Target and draft of one rank over its caches. All calls on one thread, the same on every rank of the group."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        caches: RankCaches,
        collective: Collective,
        device: torch.device,
    ) -> None:
        self.config = config
        self.collective = collective
        self._weights = weights
        self._caches = caches
        self._eps = torch.tensor(config.norm_eps, dtype=torch.float32, device=device)
        self._delta_shape = DeltaShape(config.linear_key_dim, config.linear_value_dim, config.norm_eps, device)
        self._shape = AttentionShape(config.head_dim, config.rotary_dim, config.rope_theta, config.norm_eps, device)
        ranges = [vocab_range(config.vocab_size, collective.size, rank) for rank in range(collective.size)]
        scratch = Scratch()
        self._fused = fuse(config, weights.layers, caches.layers, caches, scratch)
        draft = () if weights.draft is None or not caches.draft else (weights.draft.layer,)
        self._fused_draft = fuse(config, draft, caches.draft[: len(draft)], caches, scratch)
        self._vocab_widths = [last - first for first, last in ranges]

    @property
    def has_draft(self) -> bool:
        """Whether this rank can run draft passes."""
        return self._weights.draft is not None and bool(self._caches.draft)

    @property
    def is_fused(self) -> bool:
        """Whether decode steps run in the compiled kernels."""
        return self._fused is not None

    def forward(self, plan: StepPlan, tokens: torch.Tensor, layer_done: LayerDone | None = None) -> torch.Tensor:
        """Final hidden states [N, hidden] (after the last norm) of ``tokens`` [N]; advances the caches."""
        x = self._embed(tokens)
        rotations = self._shape.rotations(plan.positions)
        step = fused_step(plan, rotations) if self._fused is not None else None
        if self._fused is not None and step is not None:  # a step of decode rows: no layer is reported
            x = self._fused(x, step, self.collective.all_reduce if self.collective.size > 1 else None)
            return rms_norm(x, self._weights.norm, self._eps)
        for index, (layer, cache) in enumerate(zip(self._weights.layers, self._caches.layers, strict=True)):
            x = self._layer(x, layer, cache, plan, rotations, reduces=True)
            if layer_done is not None and isinstance(cache, KVCache):
                layer_done(index)
        return rms_norm(x, self._weights.norm, self._eps)

    def draft_forward(self, plan: StepPlan, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The draft's normed hidden states [N, hidden] for next tokens ``tokens`` [N] after ``hidden`` [N, hidden]."""
        draft = self._weights.draft
        assert draft is not None
        eps = self._eps
        joined = torch.cat(
            (rms_norm(self._embed(tokens), draft.embedding_norm, eps), rms_norm(hidden, draft.hidden_norm, eps)), -1
        )
        first, last = draft.fusion_columns
        x = draft.fusion(joined[:, first:last])
        if not draft.replicated:
            x = self.collective.all_reduce(x)
        rotations = self._shape.rotations(plan.positions)
        reduces = not draft.replicated and self.collective.size > 1
        step = fused_step(plan, rotations) if self._fused_draft is not None else None
        if self._fused_draft is not None and step is not None:
            x = self._fused_draft(x, step, self.collective.all_reduce if reduces else None)
        else:
            x = self._layer(x, draft.layer, self._caches.draft[0], plan, rotations, reduces=reduces)
        return rms_norm(x, draft.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, vocabulary] of final hidden states [M, hidden], the same bits on every rank."""
        own = self._weights.lm_head(hidden)
        return self.collective.all_gather(own, self._vocab_widths).float()

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        weight, dtype = self._weights.embedding, self._weights.dtype
        if self.collective.size == 1:
            return weight.index_select(0, tokens).to(dtype)
        local = tokens - self._weights.vocab_start
        outside = (local < 0) | (local >= weight.shape[0])
        rows = weight.index_select(0, local.masked_fill(outside, 0)).to(dtype)
        return self.collective.all_reduce(rows.masked_fill_(outside.unsqueeze(-1), 0.0))

    def _layer(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        cache: KVCache | DeltaCache,
        plan: StepPlan,
        rotations: torch.Tensor,
        *,
        reduces: bool,
    ) -> torch.Tensor:
        normed = rms_norm(x, layer.input_norm, self._eps)
        if isinstance(layer.mixer, AttentionWeights):
            assert isinstance(cache, KVCache)
            mixed = attention(normed, layer.mixer, cache, plan, rotations, self._shape)
        else:
            assert isinstance(cache, DeltaCache)
            mixed = delta_net(normed, layer.mixer, cache, plan, self._delta_shape)
        x = x + (self.collective.all_reduce(mixed) if reduces else mixed)
        normed = rms_norm(x, layer.mlp_norm, self._eps)
        out = layer.down(swiglu(layer.gate_up(normed)))
        return x.add_(self.collective.all_reduce(out) if reduces else out)
