"""What turns a model's logits into the distribution that a request asked for.

Order, as in vLLM: ``min_tokens`` masks the tokens that would end the request, ``logit_bias`` is added, then repetition
penalty (over prompt and output), frequency and presence penalties (over output only), then temperature, ``min_p``,
``top_k``, ``top_p``. Greedy rows take the best token after the penalties. A row's history includes the drafts that lie
before it in a verify pass, so that every rule holds along drafted positions too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from messages.requests import SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below are greedy: dividing by them would overflow float32."""


class History:
    """Token counts of one sequence, kept only when its penalties need them. ``device`` is the logits' device."""

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        prompt: Iterable[int],
        outputs: Sequence[int],
        device: torch.device,
    ) -> None:
        self._needed = has_penalties(sampling)
        self.output_count = len(outputs)
        if not self._needed:
            return
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(sorted(set(prompt)), dtype=torch.int64, device=device)] = True
        for token in outputs:
            self.counts[token] += 1.0

    def append(self, tokens: Sequence[int]) -> None:
        """Count more output tokens."""
        self.output_count += len(tokens)
        if self._needed:
            for token in tokens:
                self.counts[token] += 1.0

    def counts_with(self, drafts: Sequence[int]) -> torch.Tensor:
        """Output counts [V] as if ``drafts`` were accepted; do not modify the result."""
        if not drafts:
            return self.counts
        counts = self.counts.clone()
        for token in drafts:
            counts[token] += 1.0
        return counts


@dataclass(frozen=True)
class Draw:
    """One row of logits: whose it is, and the drafts that are assumed accepted before it."""

    sampling: SamplingParams
    history: History
    drafts: tuple[int, ...] = ()

    @property
    def token_index(self) -> int:
        """Index of the token drawn here among the request's outputs."""
        return self.history.output_count + len(self.drafts)


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether the request's earlier tokens change its logits."""
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0)


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the best token is taken."""
    return sampling.temperature < GREEDY_TEMPERATURE


def ending_tokens(sampling: SamplingParams) -> tuple[int, ...]:
    """Tokens that end the request."""
    return sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)


def changes_logits(draw: Draw) -> bool:
    """Whether ``adjust`` would change this row."""
    sampling = draw.sampling
    return bool(
        sampling.logit_bias
        or has_penalties(sampling)
        or (draw.token_index < sampling.min_tokens and ending_tokens(sampling))
    )


def adjust(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Logits [M, V] with masks, biases and penalties of every row; a copy if any row changes, else the same tensor."""
    changing = [index for index, draw in enumerate(draws) if changes_logits(draw)]
    if not changing:
        return logits
    logits = logits.clone()
    for index in changing:
        _adjust_row(logits[index], draws[index])
    return logits


def _adjust_row(row: torch.Tensor, draw: Draw) -> None:
    sampling = draw.sampling
    vocab_size = row.shape[0]
    if draw.token_index < sampling.min_tokens:
        masked = [token for token in ending_tokens(sampling) if 0 <= token < vocab_size]
        if masked:
            row[torch.tensor(masked, device=row.device)] = float("-inf")
    for token, bias in sampling.logit_bias:
        if 0 <= token < vocab_size:
            row[token] += bias
    if has_penalties(sampling):
        counts = draw.history.counts_with(draw.drafts)
        seen = counts > 0
        if sampling.repetition_penalty != 1.0:
            repeated = seen | draw.history.in_prompt
            factor = torch.where(row > 0, 1.0 / sampling.repetition_penalty, sampling.repetition_penalty)
            row.copy_(torch.where(repeated, row * factor, row))
        row.sub_(counts, alpha=sampling.frequency_penalty)
        row.sub_(seen.to(row.dtype), alpha=sampling.presence_penalty)


def probabilities(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Float64 probabilities [M, V] of adjusted ``logits`` after temperature, min_p, top_k and top_p.

    A greedy row becomes certain of its best token. Float64 makes the draws' cumulative sums exact enough to compare.
    """
    device = logits.device
    temperature = torch.tensor(
        [1.0 if is_greedy(s) else s.temperature for s in samplings], dtype=torch.float64, device=device
    )
    scaled = logits.double() / temperature.unsqueeze(-1)
    if any(s.min_p > 0.0 for s in samplings):
        share = torch.tensor([s.min_p for s in samplings], dtype=torch.float64, device=device).unsqueeze(-1)
        best = scaled.max(-1, keepdim=True).values
        scaled = scaled.masked_fill((scaled - best).exp() < share, float("-inf"))
    narrowed = [index for index, s in enumerate(samplings) if s.top_k > 0 or s.top_p < 1.0]
    if narrowed:
        chosen = torch.tensor(narrowed, device=device)
        scaled[chosen] = _narrow(scaled[chosen], [samplings[index] for index in narrowed])
    result = torch.softmax(scaled, -1)
    greedy = [index for index, s in enumerate(samplings) if is_greedy(s)]
    if greedy:
        chosen = torch.tensor(greedy, device=device)
        result[chosen] = 0.0
        result[chosen, logits[chosen].argmax(-1)] = 1.0
    return result


def _narrow(scaled: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """``scaled`` with everything outside top_k and then top_p at -inf; the best token always stays.

    Tokens that tie with the k-th stay too. Among equal logits the sort is stable, so every rank cuts the same ones.
    """
    vocab_size = scaled.shape[1]
    ordered, order = torch.sort(scaled, stable=True, dim=-1, descending=True)
    top_k = torch.tensor([min(s.top_k or vocab_size, vocab_size) for s in samplings], device=scaled.device)
    threshold = ordered.gather(1, (top_k - 1).unsqueeze(-1))
    ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=scaled.device).unsqueeze(-1)
    share = torch.softmax(ordered, -1)
    before = share.cumsum(-1) - share
    dropped = before >= top_p
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order, ordered)
