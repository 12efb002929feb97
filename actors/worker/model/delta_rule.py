"""The gated delta rule: chunked for prompts, recurrent for decoding. Float32 throughout.

State ``S`` [heads, dk, dv] after token t:  ``S_t = exp(g_t) S_{t-1} + k_t ⊗ beta_t (v_t - exp(g_t) k_t S_{t-1})``, and
the output is ``q_t S_t``. The chunked form is the WY representation of that product (Yang et al., "Parallelizing Linear
Transformers with the Delta Rule", 2024, and "Gated Delta Networks", 2024): within a chunk of C tokens one
unit-lower-triangular system is solved for all heads and chunks at once; only a scan over chunks remains.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK_TOKENS = 64


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, hv, dv] and the state [hv, dk, dv] after ``T`` tokens that start from ``state``.

    ``query`` and ``key`` [T, hk, dk] are unit vectors, ``value`` [T, hv, dv], ``decay`` (log, ≤ 0) and ``beta``
    [T, hv]. Each key head serves ``hv / hk`` consecutive value heads.
    """
    tokens, key_heads = key.shape[:2]
    value_heads, value_dim = value.shape[1:]
    size = CHUNK_TOKENS if tokens >= CHUNK_TOKENS else _power_of_two(tokens)
    chunks = -(-tokens // size)
    query, key, value = (_chunks(x, chunks, size) for x in (query, key, value))  # [h, n, C, d]
    decay, beta = (_chunks(x.unsqueeze(-1), chunks, size).squeeze(-1) for x in (decay, beta))  # [hv, n, C]
    groups = value_heads // key_heads
    total = decay.cumsum(-1)
    future = torch.ones(size, size, dtype=torch.bool, device=key.device).triu_(1)
    pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(future, float("-inf")).exp_()
    gram = torch.matmul(key, key.transpose(-1, -2))
    scores = torch.matmul(query, key.transpose(-1, -2))
    if groups > 1:
        gram, scores, key, query = (x.repeat_interleave(groups, 0) for x in (gram, scores, key, query))
    scores = scores.mul_(pairwise)
    system = gram.mul_(pairwise).mul_(beta.unsqueeze(-1))
    grown = total.exp().unsqueeze(-1)
    right = torch.cat((value, key * grown), -1).mul_(beta.unsqueeze(-1))
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    update, erased = solved[..., :value_dim], solved[..., value_dim:]
    reads = torch.cat((erased, query * grown), -2)  # both read the state at the chunk's start
    keys = (key * (total[..., -1:] - total).exp_().unsqueeze(-1)).transpose(-1, -2)
    carry = grown[:, :, -1:]
    output = torch.empty(value_heads, chunks, size, value_dim, dtype=state.dtype, device=state.device)
    for index in range(chunks):
        read = torch.bmm(reads[:, index], state)
        fresh = update[:, index] - read[:, :size]
        output[:, index] = torch.baddbmm(read[:, size:], scores[:, index], fresh)
        state = torch.baddbmm(state * carry[:, index], keys[:, index], fresh)
    return output.flatten(1, 2)[:, :tokens].transpose(0, 1), state


def recurrent_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    factor: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token of many sequences: updates ``state`` [B, hv, dk, dv] in place and returns outputs [B, hv, dv].

    ``query``, ``key`` [B, hv, dk] (already repeated per value head), ``value`` [B, hv, dv], ``factor`` = exp(decay) and
    ``beta`` [B, hv, 1].
    """
    flat = state.flatten(0, 1)
    old = torch.bmm(key.flatten(0, 1).unsqueeze(1), flat).view_as(value)
    fresh = torch.addcmul(value, old, factor, value=-1.0).mul_(beta)
    state.mul_(factor.unsqueeze(-1)).addcmul_(key.unsqueeze(-1), fresh.unsqueeze(-2))
    return torch.bmm(query.flatten(0, 1).unsqueeze(1), flat).view_as(value)


def _chunks(x: torch.Tensor, chunks: int, size: int) -> torch.Tensor:
    """[T, h, d] → [h, chunks, size, d], zero-padded at the end, contiguous."""
    tokens, heads, dim = x.shape
    x = x.transpose(0, 1)
    if tokens != chunks * size:
        x = F.pad(x, (0, 0, 0, chunks * size - tokens))
    return x.reshape(heads, chunks, size, dim).contiguous()


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
