"""The gated delta-net layer: fused projection, causal convolution, delta rule, gated norm; state in the slot caches.

Legend: N tokens, C channels of this rank's packed ``[Q, K, V]``, K the convolution's kernel, hk/hv key/value heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from actors.worker.caches import DeltaCache
from actors.worker.model import delta_rule
from actors.worker.model.ops import inverse_root, linear
from actors.worker.model.plan import DecodePart, PrefillPart, StepPlan
from actors.worker.model.weights import DeltaWeights

L2_EPS = 1e-6


def delta_net(
    x: torch.Tensor,
    weights: DeltaWeights,
    cache: DeltaCache,
    plan: StepPlan,
    *,
    key_dim: int,
    value_dim: int,
    eps: float,
) -> torch.Tensor:
    """This rank's part of the layer's output [N, hidden] (to be summed over ranks); advances the slots' states."""
    tokens = x.shape[0]
    key_heads, value_heads = weights.key_heads, weights.value_heads
    channels = weights.conv.shape[1]
    projected = linear(x, weights.projection)
    packed = projected[:, :channels]
    gate_end = channels + value_heads * value_dim
    convolved = _convolve(packed, weights.conv, cache, plan)
    beta = torch.sigmoid(projected[:, gate_end : gate_end + value_heads].float())
    decay = F.softplus(projected[:, gate_end + value_heads :].float() + weights.dt_bias).mul_(weights.decay)
    key_width = key_heads * key_dim
    pairs = _normalise(convolved[:, : 2 * key_width].float().view(tokens, 2 * key_heads, key_dim), key_heads)
    values = convolved[:, 2 * key_width :].float().view(tokens, value_heads, value_dim)
    mixed = torch.empty(tokens, value_heads, value_dim, dtype=torch.float32, device=x.device)
    if plan.decode is not None:
        _decode(pairs, values, decay, beta, cache, plan.decode, mixed, value_heads // key_heads)
    for part in plan.prefills:
        _prefill(pairs, values, decay, beta, cache, part, mixed)
    gate = projected[:, channels:gate_end].reshape(tokens, value_heads, value_dim)
    scale = inverse_root(torch.linalg.vector_norm(mixed, 2, -1, True), 1.0 / value_dim, eps)
    gated = mixed.mul_(scale).mul_(weights.norm).mul_(F.silu(gate.float()))
    return linear(gated.flatten(1).to(x.dtype), weights.output)


def _normalise(pairs: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Unit queries (scaled by dk^-0.5) and unit keys, in [N, 2·hk, dk]."""
    scale = inverse_root(torch.linalg.vector_norm(pairs, 2, -1, True), 1.0, L2_EPS)
    scale[:, :key_heads].mul_(pairs.shape[-1] ** -0.5)
    return pairs * scale


def _convolve(packed: torch.Tensor, kernel: torch.Tensor, cache: DeltaCache, plan: StepPlan) -> torch.Tensor:
    """silu of the causal depthwise convolution [N, C]; each sequence continues from its window and leaves its own."""
    output = torch.empty_like(packed, memory_format=torch.contiguous_format)
    taps, channels = kernel.shape
    if plan.decode is not None:
        part = plan.decode
        count = part.rows * part.width
        window = cache.conv.index_select(0, part.conv_read).view(part.rows, taps - 1, channels)
        window = torch.cat((window, packed[:count].view(part.rows, part.width, channels)), 1)
        target = output[:count].view(part.rows, part.width, channels)
        torch.mul(window[:, : part.width], kernel[0], out=target)
        for tap in range(1, taps):
            target.addcmul_(window[:, tap : tap + part.width], kernel[tap])
        cache.conv.index_copy_(0, part.conv_write, window[:, 1:].reshape(-1, channels))
    for prefill in plan.prefills:
        rows = packed[prefill.begin : prefill.end]
        if prefill.fresh:
            window = F.pad(rows, (0, 0, taps - 1, 0))
        else:
            window = torch.cat((cache.conv[prefill.conv_read : prefill.conv_read + taps - 1], rows))
        count = prefill.end - prefill.begin
        target = output[prefill.begin : prefill.end]
        torch.mul(window[:count], kernel[0], out=target)
        for tap in range(1, taps):
            target.addcmul_(window[tap : tap + count], kernel[tap])
        cache.conv[prefill.conv_row : prefill.conv_row + taps - 1] = window[count:]
    return F.silu(output, inplace=True)


def _decode(
    pairs: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cache: DeltaCache,
    part: DecodePart,
    mixed: torch.Tensor,
    groups: int,
) -> None:
    rows, width = part.rows, part.width
    count = rows * width
    key_heads = pairs.shape[1] // 2
    heads = pairs[:count].view(rows, width, 2, key_heads, -1)
    if groups > 1:
        heads = heads.repeat_interleave(groups, 3)
    values, mixed = (x[:count].view(rows, width, *x.shape[1:]) for x in (values, mixed))
    factor = decay[:count].exp().view(rows, width, -1, 1)
    beta = beta[:count].view(rows, width, -1, 1)
    if part.ssm_slice is not None:
        state = cache.ssm[part.ssm_slice[0] : part.ssm_slice[1]]
    else:
        state = cache.ssm.index_select(0, part.ssm_read)
    for index in range(width):
        mixed[:, index] = delta_rule.recurrent_step(
            heads[:, index, 0], heads[:, index, 1], values[:, index], factor[:, index], beta[:, index], state
        )
        if part.ssm_slice is None:
            cache.ssm.index_copy_(0, part.ssm_write[index], state)


def _prefill(
    pairs: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cache: DeltaCache,
    part: PrefillPart,
    mixed: torch.Tensor,
) -> None:
    span = slice(part.begin, part.end)
    key_heads = pairs.shape[1] // 2
    state = torch.zeros_like(cache.ssm[0]) if part.fresh else cache.ssm[part.ssm_read]
    output, state = delta_rule.chunked(
        pairs[span, :key_heads], pairs[span, key_heads:], values[span], decay[span], beta[span], state
    )
    mixed[span] = output
    cache.ssm[part.ssm_row] = state
