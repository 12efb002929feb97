"""Full attention over paged KEY and VALUE, with an output gate, for batches that mix prefill chunks and decode rows.

Legend: N tokens, H query heads and G KV heads of this rank, D head_dim, L context length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from actors.worker.caches import KVCache
from actors.worker.model.ops import rms_norm
from actors.worker.model.plan import AttentionGroup, DecodePart, PrefillPart, StepPlan
from actors.worker.model.weights import AttentionWeights


class AttentionShape:
    """Sizes that do not change from step to step."""

    def __init__(self, head_dim: int, rotary_dim: int, rope_theta: float, eps: float, device: torch.device) -> None:
        self.head_dim = head_dim
        self.rotary_dim = rotary_dim
        self.eps = torch.tensor(eps, dtype=torch.float32, device=device)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        self._frequencies = (1.0 / rope_theta**exponents).to(device)

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Unit complex numbers [N, 1, rotary_dim/2] that turn each pair of a head at ``positions`` [N]."""
        angles = positions.float().unsqueeze(-1) * self._frequencies
        return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def attention(
    x: torch.Tensor,
    weights: AttentionWeights,
    cache: KVCache,
    plan: StepPlan,
    rotations: torch.Tensor,
    shape: AttentionShape,
) -> torch.Tensor:
    """This rank's part of the output [N, hidden] (to be summed over ranks); writes KEY and VALUE of all tokens."""
    tokens, dim = x.shape[0], shape.head_dim
    query_heads, kv_heads = weights.query_heads, weights.kv_heads
    projected = weights.projection(x)
    rotated_width = (query_heads + kv_heads) * dim
    gate_end = rotated_width + query_heads * dim
    heads = projected[:, :rotated_width].reshape(tokens, query_heads + kv_heads, dim)
    heads = rms_norm(heads.float(), weights.head_norm, shape.eps)
    pairs = torch.view_as_complex(heads[..., : shape.rotary_dim].unflatten(-1, (-1, 2)))
    pairs.mul_(rotations)
    heads = heads.to(x.dtype)
    query, key = heads[:, :query_heads], heads[:, query_heads:]
    value = projected[:, gate_end:]
    _write(cache, plan, key.reshape(tokens, -1), value)
    output = torch.empty(tokens, query_heads, dim, dtype=x.dtype, device=x.device)
    if plan.decode is not None:
        _decode(query, cache, plan.decode, output)
    for part in plan.prefills:
        _prefill(query, key, value.view(tokens, kv_heads, dim), cache, part, output)
    gated = torch.sigmoid(projected[:, rotated_width:gate_end]).mul_(output.flatten(1))
    return weights.output(gated)


def _write(cache: KVCache, plan: StepPlan, key: torch.Tensor, value: torch.Tensor) -> None:
    if plan.kv_tokens is not None:
        key, value = key.index_select(0, plan.kv_tokens), value.index_select(0, plan.kv_tokens)
    cache.key.index_copy_(0, plan.kv_write, key)
    cache.value.index_copy_(0, plan.kv_write, value)


def _decode(query: torch.Tensor, cache: KVCache, part: DecodePart, output: torch.Tensor) -> None:
    rows, width = part.rows, part.width
    heads, dim = query.shape[1:]
    target = output[: rows * width].view(rows, width, heads, dim)
    source = query[: rows * width].reshape(rows, width, heads, dim)
    for group in part.groups:
        if group.rows is None:
            target.copy_(_attend_group(source, cache, group))
        else:
            target.index_copy_(0, group.rows, _attend_group(source.index_select(0, group.rows), cache, group))


def _attend_group(query: torch.Tensor, cache: KVCache, group: AttentionGroup) -> torch.Tensor:
    """[rows, width, H, D] → the same; the query heads of one KV head are folded before the width."""
    rows, width, heads, dim = query.shape
    key, value = cache.gather(group.blocks, rows)
    folded = query.view(rows, width, cache.heads, heads // cache.heads, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, cache.heads, -1, dim)
    key, value = key[:, :, : group.length], value[:, :, : group.length]
    mixed = F.scaled_dot_product_attention(folded, key, value, attn_mask=group.mask)
    mixed = mixed.view(rows, cache.heads, heads // cache.heads, width, dim)
    return mixed.permute(0, 3, 1, 2, 4).reshape(rows, width, heads, dim)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KVCache,
    part: PrefillPart,
    output: torch.Tensor,
) -> None:
    own = query[part.begin : part.end].transpose(0, 1).unsqueeze(0)  # [1, H, n, D]
    if part.mask is None:
        keys, values = (x[part.begin : part.end].transpose(0, 1).unsqueeze(0) for x in (key, value))
        mixed = F.scaled_dot_product_attention(own, keys, values, is_causal=True, enable_gqa=True)
    else:
        length = part.mask.shape[1]
        keys, values = (x[:, :, :length] for x in cache.gather(part.blocks, 1))
        mixed = F.scaled_dot_product_attention(own, keys, values, attn_mask=part.mask, enable_gqa=True)
    output[part.begin : part.end] = mixed[0].transpose(0, 1)
