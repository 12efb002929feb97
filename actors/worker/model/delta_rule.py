"""The gated delta rule: chunked for prompts, recurrent for decoding. Float32 throughout.

State ``S`` [heads, dk, dv] after token t:  ``S_t = exp(g_t) S_{t-1} + k_t ⊗ beta_t (v_t - exp(g_t) k_t S_{t-1})``, and
the output is ``q_t S_t``. Within a chunk of C tokens the corrections ``beta_t (v_t - …)`` depend on each other through
a unit-lower-triangular system, which is solved for all heads at once (the WY form of Yang et al., "Parallelizing Linear
Transformers with the Delta Rule", 2024, with the decay of "Gated Delta Networks", 2024).

Chunks run one after another, each with the state before it: the system then has one right side per value column, and
a chunk's intermediates stay in cache. All chunks' systems at once, as accelerators like it, measured 1.8 times slower
on a CPU at 512 tokens (8 value heads of 64 dims); 32 tokens per chunk were best.
"""

from __future__ import annotations

import torch

CHUNK_TOKENS = 32


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """``T`` tokens of one sequence: writes ``output`` [T, hv, dv] and moves ``state`` [hv, dk, dv] on, in place.

    ``query`` and ``key`` [T, hk, dk] are unit vectors, ``value`` [T, hv, dv], ``decay`` (log, ≤ 0) and ``beta``
    [T, hv]. Each key head serves ``hv / hk`` consecutive value heads.
    """
    tokens, key_heads, key_dim = key.shape
    value_heads, value_dim = value.shape[1:]
    groups = value_heads // key_heads
    heads = torch.stack((query, key)).permute(2, 0, 1, 3)  # [hk, 2, T, dk]
    for begin in range(0, tokens, CHUNK_TOKENS):
        end = min(tokens, begin + CHUNK_TOKENS)
        size = end - begin
        both = heads[:, :, begin:end].reshape(key_heads, 2 * size, key_dim)
        total = decay[begin:end].t().cumsum(-1)  # [hv, C]
        # What token j's decay leaves at token i; above the diagonal, where the difference is positive, nothing.
        pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp_().tril_()
        products = torch.bmm(both, both[:, size:].transpose(1, 2)).view(key_heads, 1, 2, size, size)
        products = (products * pairwise.view(key_heads, groups, 1, size, size)).view(value_heads, 2, size, size)
        scores, system = products.unbind(1)
        if groups > 1:
            both = both.unsqueeze(1).expand(-1, groups, -1, -1).reshape(value_heads, 2 * size, key_dim)
        read = torch.bmm(both, state).view(value_heads, 2, size, value_dim)
        read.mul_(total.exp().view(value_heads, 1, size, 1))
        rate = beta[begin:end].t().unsqueeze(-1)
        right = (value[begin:end].transpose(0, 1) - read[:, 1]).mul_(rate)
        fresh = torch.linalg.solve_triangular(system.mul_(rate), right, upper=False, unitriangular=True)
        output[begin:end] = torch.baddbmm(read[:, 0], scores, fresh).transpose(0, 1)
        left = (total[:, -1:] - total).exp_().unsqueeze(-1)
        state.mul_(total[:, -1].exp().view(value_heads, 1, 1))
        state.baddbmm_(both[:, size:].transpose(1, 2), fresh * left)


def recurrent_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    factor: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token of many sequences: moves ``state`` [B, hv, dk, dv] on, in place, and returns outputs [B, hv, dv].

    ``query``, ``key`` [B, hv, dk] (already repeated per value head), ``value`` [B, hv, dv], ``factor`` = exp(decay) and
    ``beta`` [B, hv, 1].
    """
    flat = state.flatten(0, 1)
    old = torch.bmm(key.flatten(0, 1).unsqueeze(1), flat).view_as(value)
    fresh = torch.addcmul(value, old, factor, value=-1.0).mul_(beta)
    state.mul_(factor.unsqueeze(-1)).addcmul_(key.unsqueeze(-1), fresh.unsqueeze(-2))
    return torch.bmm(query.flatten(0, 1).unsqueeze(1), flat).view_as(value)
