"""Speculative decoding with the model's MTP head: drafting, and deciding which drafts stand.

Drafting. The draft predicts the token after next from a target hidden state and the next token. A sequence's
``Pending`` holds the positions whose hidden state the target has produced since the draft last ran (after a hand-off,
the bootstrap): one draft pass over them brings the draft's KEY and VALUE up to date and yields the first draft; each
further draft feeds the draft's own hidden state back. Row ``t`` of the draft's cache is (hidden ``t``, token ``t+1``).

Deciding. Greedy rows keep the drafts that the target would have chosen itself. Sampled rows use rejection sampling
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al., 2023): draft ``x``
drawn from ``q`` is accepted with probability ``min(1, p(x)/q(x))``, a rejected one is replaced by a draw from
``max(p - q, 0)``, so that the result follows the target's ``p`` exactly. Masks, biases, penalties and narrowing apply
to both distributions, with the drafts before a position counted as output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from actors.worker.model.model import RankModel
from actors.worker.model.plan import PlanGeometry, RowSpec, plan_step
from actors.worker.random_streams import Stream, uniform
from actors.worker.sampler import invert
from actors.worker.sampling_rules import Draw, adjust, ending_tokens, is_greedy, probabilities
from actors.worker.sequences import OpenSequence, Pending
from messages.batch import BatchRow


@dataclass
class Proposal:
    """Drafts of one row. ``weights``: for sampled rows the distribution [V] that each draft was drawn from."""

    tokens: list[int] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """Tokens of one verified row in order, and how many of them are drafts."""

    tokens: list[int]
    accepted: int


class Drafter:
    """Runs the draft body of one rank. Every rank of the group calls it alike."""

    def __init__(self, model: RankModel, geometry: PlanGeometry, speculative_tokens: int) -> None:
        self._model = model
        self._geometry = geometry
        self._limit = speculative_tokens

    def propose(self, rows: Sequence[tuple[OpenSequence, BatchRow]]) -> list[Proposal]:
        """Up to ``row.speculative_tokens`` drafts for each decode row."""
        proposals = [Proposal() for _ in rows]
        wanted = [min(self._limit, row.speculative_tokens) for _, row in rows]
        taking = [
            index
            for index, (sequence, _) in enumerate(rows)
            if sequence.pending is not None and (wanted[index] > 0 or len(sequence.pending.tokens) > self._limit)
        ]
        if not taking:
            return proposals
        hidden = self._catch_up([rows[index] for index in taking])
        for depth in range(max(wanted)):
            keep = [place for place, index in enumerate(taking) if wanted[index] > depth]
            if len(keep) < len(taking):
                hidden = hidden[torch.tensor(keep, dtype=torch.int64, device=hidden.device)]
                taking = [taking[place] for place in keep]
            if depth:
                hidden = self._deepen([rows[index] for index in taking], proposals, taking, depth, hidden)
            self._draw([rows[index][0] for index in taking], [proposals[index] for index in taking], hidden)
        return proposals

    def prefill(self, rows: Sequence[tuple[OpenSequence, BatchRow]], hidden: Sequence[torch.Tensor]) -> None:
        """Fill the draft's cache for prefill chunks and leave the last position pending.

        ``hidden[i]`` [n, hidden] is the chunk's; the sampled token, if any, is already the sequence's last output.
        A chunk's last position is skipped while the token after it is unknown.
        """
        specs, tokens, states = [], [], []
        for (sequence, row), chunk in zip(rows, hidden, strict=True):
            following = [sequence.token_at(row.start + index + 1) for index in range(len(row.token_ids))]
            known = [token for token in following if token is not None]
            if not known:
                continue
            specs.append(RowSpec(row.start, len(known), sequence.slot, 0, row.block_ids))
            tokens += known
            states.append(chunk[: len(known)])
            last = len(known) - 1
            sequence.pending = Pending(row.start + last, chunk[last : last + 1].clone(), [known[last]], seen=True)
        if specs:
            plan = plan_step(self._geometry, [], specs)
            self._model.draft_forward(plan, self._tensor(tokens), torch.cat(states))

    def _catch_up(self, rows: Sequence[tuple[OpenSequence, BatchRow]]) -> torch.Tensor:
        """Feed every row's pending positions; the draft's hidden state [rows, hidden] at each row's last one."""
        pendings = [sequence.pending for sequence, _ in rows]
        width = max(len(pending.tokens) for pending in pendings if pending is not None)
        specs, tokens, ends = [], [], []
        hidden = torch.zeros(len(rows), width, self._model.config.hidden_size, dtype=self._geometry.dtype)
        hidden = hidden.to(self._geometry.device)
        for place, ((sequence, row), pending) in enumerate(zip(rows, pendings, strict=True)):
            assert pending is not None
            count = len(pending.tokens)
            specs.append(RowSpec(pending.start, count, sequence.slot, 0, row.block_ids))
            tokens += pending.tokens + [0] * (width - count)
            hidden[place, :count] = pending.hidden
            ends.append(place * width + count - 1)
            last = count - 1
            sequence.pending = Pending(pending.start + last, pending.hidden[last:], pending.tokens[last:], seen=True)
        plan = plan_step(self._geometry, specs, [], width=width)
        output = self._model.draft_forward(plan, self._tensor(tokens), hidden.flatten(0, 1))
        return output if width == 1 else output.index_select(0, self._tensor(ends))

    def _deepen(
        self,
        rows: Sequence[tuple[OpenSequence, BatchRow]],
        proposals: Sequence[Proposal],
        taking: Sequence[int],
        depth: int,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        specs = [RowSpec(row.start - 1 + depth, 1, sequence.slot, 0, row.block_ids) for sequence, row in rows]
        tokens = [proposals[index].tokens[-1] for index in taking]
        return self._model.draft_forward(plan_step(self._geometry, specs, []), self._tensor(tokens), hidden)

    def _draw(self, sequences: Sequence[OpenSequence], proposals: Sequence[Proposal], hidden: torch.Tensor) -> None:
        draws = [
            Draw(sequence.sampling, sequence.history, tuple(proposal.tokens))
            for sequence, proposal in zip(sequences, proposals, strict=True)
        ]
        raw = self._model.logits(hidden)
        try:
            self._draw_from(raw, draws, proposals)
        except Exception:  # one row's parameters: each is tried alone, so that only its own drafts suffer
            for index, (draw, proposal) in enumerate(zip(draws, proposals, strict=True)):
                del proposal.tokens[len(draw.drafts) :], proposal.weights[len(draw.drafts) :]
                self._draw_alone(raw[index : index + 1], draw, proposal)

    def _draw_alone(self, raw: torch.Tensor, draw: Draw, proposal: Proposal) -> None:
        """One row. If its distribution cannot be had, the model's best token is drafted, with certainty.

        That is as lossless as any draft; what is wrong with the row shows, and is told, when it is verified.
        """
        try:
            self._draw_from(raw, [draw], [proposal])
        except Exception:
            token = int(raw[0].argmax())
            proposal.tokens.append(token)
            if not is_greedy(draw.sampling):
                certain = torch.zeros(raw.shape[1], dtype=torch.float64, device=raw.device)
                certain[token] = 1.0
                proposal.weights.append(certain)

    def _draw_from(self, raw: torch.Tensor, draws: Sequence[Draw], proposals: Sequence[Proposal]) -> None:
        """One more draft for each row of ``raw`` logits [M, V]."""
        logits = adjust(raw, draws)
        tokens: list[int] = logits.argmax(-1).tolist()
        sampled = [index for index, draw in enumerate(draws) if not is_greedy(draw.sampling)]
        if sampled:
            weights = probabilities(
                logits[torch.tensor(sampled, device=logits.device)], [draws[index].sampling for index in sampled]
            )
            points = [uniform(draws[i].sampling.seed, draws[i].token_index, Stream.DRAFT) for i in sampled]
            for place, (index, token) in enumerate(zip(sampled, invert(weights, points), strict=True)):
                tokens[index] = token
                proposals[index].weights.append(weights[place])
        for proposal, token in zip(proposals, tokens, strict=True):
            proposal.tokens.append(token)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._geometry.device)


def verify(logits: torch.Tensor, sequence: OpenSequence, proposal: Proposal, best: Sequence[int]) -> Verdict:
    """Decide one row. ``logits`` [s+1, V] are adjusted, ``best`` their argmax; at least one token comes out.

    Position ``j``'s logits follow the drafts before it. Tokens behind the request's end are cut.
    """
    if is_greedy(sequence.sampling):
        tokens, accepted = _verify_greedy(proposal, best)
    else:
        tokens, accepted = _verify_sampled(logits, sequence, proposal)
    kept = tokens[: _kept(sequence, tokens)]
    return Verdict(kept, min(accepted, len(kept)))


def _verify_greedy(proposal: Proposal, best: Sequence[int]) -> tuple[list[int], int]:
    accepted = 0
    while accepted < len(proposal.tokens) and proposal.tokens[accepted] == best[accepted]:
        accepted += 1
    return list(best[: accepted + 1]), accepted


def _verify_sampled(logits: torch.Tensor, sequence: OpenSequence, proposal: Proposal) -> tuple[list[int], int]:
    sampling = sequence.sampling
    target = probabilities(logits, [sampling] * logits.shape[0])
    first = sequence.history.output_count
    for index, (draft, weights) in enumerate(zip(proposal.tokens, proposal.weights, strict=True)):
        point = uniform(sampling.seed, first + index, Stream.ACCEPT)
        if point * float(weights[draft]) < float(target[index, draft]):
            continue
        residual = (target[index] - weights).clamp_(min=0.0)
        if float(residual.sum()) <= 0.0:  # equal distributions up to rounding: the target's own draw is right
            residual = target[index]
        token = invert(residual.unsqueeze(0), [uniform(sampling.seed, first + index, Stream.RESIDUAL)])
        return proposal.tokens[:index] + token, index
    count = len(proposal.tokens)
    token = invert(target[count:], [uniform(sampling.seed, first + count, Stream.TARGET)])
    return proposal.tokens + token, count


def _kept(sequence: OpenSequence, tokens: Sequence[int]) -> int:
    """How many of ``tokens`` the request takes before it ends (EOS, a stop token, ``max_tokens``)."""
    sampling, ends = sequence.sampling, ending_tokens(sequence.sampling)
    for index, token in enumerate(tokens):
        count = sequence.history.output_count + index + 1
        if count >= sampling.max_tokens or (token in ends and count > sampling.min_tokens):
            return index + 1
    return len(tokens)
