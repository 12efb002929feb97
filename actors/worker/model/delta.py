"""The gated delta-net layer: fused projection, causal convolution, delta rule, gated norm; state in the slot caches.

Legend: N tokens, C channels of this rank's packed ``[Q, K, V]``, K the convolution's kernel, hk/hv key/value heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from actors.worker.caches import DeltaCache
from actors.worker.model import delta_rule
from actors.worker.model.ops import inverse_root
from actors.worker.model.plan import DecodePart, PrefillPart, StepPlan
from actors.worker.model.weights import DeltaWeights

L2_EPS = 1e-6


class DeltaShape:
    """Sizes and constants that do not change from step to step.

    Queries stay unscaled: the factor dk^-0.5 would scale the rule's output, which a norm follows, so it is the same to
    divide that norm's eps by its square.
    """

    def __init__(self, key_dim: int, value_dim: int, eps: float, device: torch.device) -> None:
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.unit_eps = torch.tensor(L2_EPS, dtype=torch.float32, device=device)
        self.output_eps = torch.tensor(eps * key_dim, dtype=torch.float32, device=device)


def delta_net(
    x: torch.Tensor, weights: DeltaWeights, cache: DeltaCache, plan: StepPlan, shape: DeltaShape
) -> torch.Tensor:
    """This rank's part of the layer's output [N, hidden] (to be summed over ranks); advances the slots' states."""
    tokens = x.shape[0]
    key_heads, value_heads = weights.key_heads, weights.value_heads
    key_dim, value_dim = shape.key_dim, shape.value_dim
    channels = weights.conv.shape[1]
    packed, gate, beta, step = weights.projection(x).split_with_sizes(
        (channels, value_heads * value_dim, value_heads, value_heads), 1
    )
    convolved = _convolve(packed, weights.conv, cache, plan)
    beta = torch.sigmoid(beta.float())
    decay = F.softplus(step.float() + weights.dt_bias).mul_(weights.decay)
    pairs, values = convolved.float().split_with_sizes((2 * key_heads * key_dim, value_heads * value_dim), 1)
    pairs = pairs.view(tokens, 2 * key_heads, key_dim)
    pairs = pairs * inverse_root(pairs, 1.0, shape.unit_eps)
    values = values.view(tokens, value_heads, value_dim)
    mixed = _mix(pairs, values, decay, beta, cache, plan)
    scale = inverse_root(mixed, 1.0 / value_dim, shape.output_eps)
    gated = mixed.mul_(scale).mul_(F.silu(gate.float()).view(tokens, value_heads, value_dim))
    if weights.norm is not None:
        gated.mul_(weights.norm)
    return weights.output(gated.view(tokens, -1).to(x.dtype))


def _convolve(packed: torch.Tensor, kernel: torch.Tensor, cache: DeltaCache, plan: StepPlan) -> torch.Tensor:
    """silu of the causal depthwise convolution [N, C]; each sequence continues from its window and leaves its own."""
    if plan.decode is not None and not plan.prefills:
        return F.silu(_convolve_decode(packed, kernel, cache, plan.decode), inplace=True)
    output = torch.empty_like(packed, memory_format=torch.contiguous_format)
    if plan.decode is not None:
        count = plan.decode.rows * plan.decode.width
        output[:count] = _convolve_decode(packed[:count], kernel, cache, plan.decode)
    taps = kernel.shape[0]
    for part in plan.prefills:
        rows = packed[part.begin : part.end]
        if part.fresh:
            window = F.pad(rows, (0, 0, taps - 1, 0))
        else:
            window = torch.cat((cache.conv[part.conv_read : part.conv_read + taps - 1], rows))
        count = part.end - part.begin
        target = torch.mul(window[:count], kernel[0], out=output[part.begin : part.end])
        for tap in range(1, taps):
            target.addcmul_(window[tap : tap + count], kernel[tap])
        cache.conv[part.conv_row : part.conv_row + taps - 1] = window[count:]
    return F.silu(output, inplace=True)


def _convolve_decode(packed: torch.Tensor, kernel: torch.Tensor, cache: DeltaCache, part: DecodePart) -> torch.Tensor:
    """[rows · width, C], before the activation."""
    taps, channels = kernel.shape
    fresh = packed.reshape(part.rows, part.width, channels)
    states = part.states
    if states.in_place is not None:
        state = cache.conv.view(-1, taps - 1, channels)[states.in_place[0] : states.in_place[1]]
        window = torch.cat((state, fresh), 1)
        state.copy_(window[:, 1:])
        return (window * kernel).sum(1)
    state = cache.conv.index_select(0, states.conv_read).view(part.rows, taps - 1, channels)
    window = torch.cat((state, fresh), 1)
    cache.conv.index_copy_(0, states.conv_write, window[:, 1:].reshape(-1, channels))
    if part.width == 1:
        return (window * kernel).sum(1)
    output = window[:, : part.width] * kernel[0]
    for tap in range(1, taps):
        output.addcmul_(window[:, tap : tap + part.width], kernel[tap])
    return output.view(-1, channels)


def _mix(
    pairs: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cache: DeltaCache,
    plan: StepPlan,
) -> torch.Tensor:
    """The delta rule's outputs [N, hv, dv] for unit queries and keys ``pairs`` [N, 2·hk, dk]; advances the states."""
    if plan.decode is not None and not plan.prefills:
        return _decode(pairs, values, decay, beta, cache, plan.decode)
    mixed = torch.empty_like(values, memory_format=torch.contiguous_format)
    if plan.decode is not None:
        count = plan.decode.rows * plan.decode.width
        mixed[:count] = _decode(pairs[:count], values[:count], decay[:count], beta[:count], cache, plan.decode)
    for part in plan.prefills:
        _prefill(pairs, values, decay, beta, cache, part, mixed)
    return mixed


def _decode(
    pairs: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cache: DeltaCache,
    part: DecodePart,
) -> torch.Tensor:
    rows, width = part.rows, part.width
    value_heads, value_dim = values.shape[1:]
    key_heads, key_dim = pairs.shape[1] // 2, pairs.shape[2]
    heads = pairs.view(rows, width, 2, key_heads, 1, key_dim)
    if value_heads != key_heads:
        heads = heads.expand(-1, -1, -1, -1, value_heads // key_heads, -1)
    heads = heads.reshape(rows, width, 2, value_heads, key_dim)
    states = part.states
    if states.in_place is not None:
        state = cache.ssm[states.in_place[0] : states.in_place[1]]
    else:
        state = cache.ssm.index_select(0, states.ssm_read)
    if width == 1:
        query, key = heads[:, 0].unbind(1)
        mixed = delta_rule.recurrent_step(query, key, values, decay.exp_().unsqueeze(-1), beta.unsqueeze(-1), state)
        if states.in_place is None:
            cache.ssm.index_copy_(0, states.ssm_write, state)
        return mixed
    slots = None
    if states.neighbours is not None:
        first, last = states.neighbours
        slots = cache.ssm.view(-1, part.checkpoints, *cache.ssm.shape[1:])[first:last]
    targets = states.ssm_write.view(rows, width).t()
    steps = zip(
        heads.unbind(1),
        values.reshape(rows, width, value_heads, value_dim).unbind(1),
        decay.exp_().view(rows, width, value_heads, 1).unbind(1),
        beta.view(rows, width, value_heads, 1).unbind(1),
        strict=True,
    )
    outputs = []
    for index, (pair, value, factor, rate) in enumerate(steps):
        query, key = pair.unbind(1)
        outputs.append(delta_rule.recurrent_step(query, key, value, factor, rate, state))
        if slots is not None:
            slots[:, index].copy_(state)
        else:
            cache.ssm.index_copy_(0, targets[index], state)
    return torch.stack(outputs, 1).flatten(0, 1)


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
    state = cache.ssm[part.ssm_row]
    if part.fresh:
        state.zero_()
    elif part.ssm_read != part.ssm_row:
        state.copy_(cache.ssm[part.ssm_read])
    query, key = pairs[span, :key_heads], pairs[span, key_heads:]
    delta_rule.chunked(query, key, values[span], decay[span], beta[span], state, mixed[span])
