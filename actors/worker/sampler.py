"""Chooses tokens from logits and reports their log-probabilities. Same input, same output, on every rank.

A draw inverts the cumulative distribution at one uniform number of the request's own stream, so a row's token depends
on nothing but its own logits, parameters, seed and token index.

Log-probabilities are those of the model itself: log-softmax of the raw logits, before any mask, bias, penalty or
temperature (as vLLM's default reports them).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.worker.random_streams import Stream, uniform
from actors.worker.sampling_rules import Draw, is_greedy, probabilities
from messages.requests import TokenLogprobs

NOTHING_TO_DRAW = "no token is left to draw: the request's rules exclude every one, or make its logits no numbers"

LOGPROB_ROWS_MAX = 64
"""Rows of logits that are in float64 at once while prompt log-probabilities are computed."""


def choose(adjusted: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row of ``adjusted`` logits [M, V] float32 (see ``sampling_rules.adjust``)."""
    tokens: list[int] = adjusted.argmax(-1).tolist()
    sampled = [index for index, draw in enumerate(draws) if not is_greedy(draw.sampling)]
    if sampled:
        rows = adjusted[torch.tensor(sampled, device=adjusted.device)]
        probs = probabilities(rows, [draws[index].sampling for index in sampled])
        points = [uniform(draws[index].sampling.seed, draws[index].token_index, Stream.TARGET) for index in sampled]
        for index, token in zip(sampled, invert(probs, points), strict=True):
            tokens[index] = token
    return tokens


def invert(weights: torch.Tensor, points: Sequence[float]) -> list[int]:
    """Per row of ``weights`` [M, V] ≥ 0 (not necessarily normalised), the token in which its point in [0, 1) falls.

    Raises ``ValueError`` for a row without any weight, or with one that is no number.
    """
    cumulative = weights.cumsum(-1)
    whole = cumulative[:, -1:]
    if not bool(((whole > 0.0) & torch.isfinite(whole)).all()):
        raise ValueError(NOTHING_TO_DRAW)
    targets = torch.tensor(points, dtype=weights.dtype, device=weights.device).unsqueeze(-1) * whole
    # Rounding may put the target onto the whole sum; the last token with any weight then is the answer.
    targets = torch.minimum(targets, torch.nextafter(whole, torch.zeros_like(whole)))
    tokens: list[int] = torch.searchsorted(cumulative, targets, right=True).squeeze(-1).tolist()
    return tokens


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top_counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of raw ``logits`` [M, V]: its token's log-probability, rank, and the ``top_counts[i]`` best."""
    entries: list[TokenLogprobs] = []
    for begin in range(0, len(tokens), LOGPROB_ROWS_MAX):
        end = min(begin + LOGPROB_ROWS_MAX, len(tokens))
        entries += _token_logprobs(logits[begin:end], tokens[begin:end], top_counts[begin:end])
    return entries


def _token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top_counts: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(-1))
    ranks = (logprobs > chosen).sum(-1) + 1
    most = max(top_counts)
    best, order = logprobs.topk(min(most, logprobs.shape[1]), -1) if most > 0 else (logprobs[:, :0],) * 2
    rows = zip(tokens, chosen.squeeze(-1).tolist(), ranks.tolist(), best.tolist(), order.tolist(), strict=True)
    return [
        TokenLogprobs(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=tuple((int(token_id), value) for token_id, value in zip(ids[:count], values[:count], strict=True)),
        )
        for (token, logprob, rank, values, ids), count in zip(rows, top_counts, strict=True)
    ]
