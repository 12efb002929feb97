"""One step being planned: which rows, in which order, and what gives way. The theory is in ``batching.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.scheduler.blocks import Holding
from actors.scheduler.sequence import Priority, Sequence
from messages.batch import BatchRow, SequenceStart

if TYPE_CHECKING:
    from actors.scheduler.batching import Batcher, Step
    from actors.scheduler.blocks import CachePool


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """What one step may be. ``max_tokens_per_chunk`` 0: prompts are computed whole."""

    max_tokens_per_batch: int
    max_seqs_per_batch: int
    max_tokens_per_chunk: int
    speculative_tokens: int = 0
    async_scheduling: bool = True

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be sent while another runs."""
        return self.async_scheduling and not self.speculative_tokens


def is_preemptible(sequence: Sequence) -> bool:
    """Whether its memory may be taken: what a hand-off moves may not."""
    return not sequence.prefill_only and sequence.holding is not None


def rows_ahead(pool: CachePool, step: Step, running: list[Sequence]) -> list[tuple[Sequence, BatchRow]]:
    """Rows for the step after ``step``, which still runs; none when they cannot be known by now."""
    rows: list[tuple[Sequence, BatchRow]] = []
    for sequence in running:
        in_flight = step.rows.get(sequence.owner)
        if in_flight is None or in_flight[1] is not sequence.holding or in_flight[2].is_prefill:
            return []
        if sequence.total + 1 >= sequence.final_tokens:
            continue  # what it is given now is its last
        if not pool.grow(in_flight[1], pool.blocks_for(sequence.total + 1)):
            return []
        row = BatchRow(
            request_id=sequence.request_id,
            epoch=sequence.epoch,
            token_ids=(),
            start=sequence.total,
            block_ids=tuple(in_flight[1].blocks),
            samples=True,
        )
        rows.append((sequence, row))
    return rows


class Planner:
    """One step being planned: rows so far and what is left of the budgets."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._pool = batcher.pool
        self._limits = batcher.limits
        self._tokens_left = batcher.limits.max_tokens_per_batch
        self.rows: list[tuple[Sequence, BatchRow]] = []
        self.opened: list[SequenceStart] = []
        self.started: list[Sequence] = []
        if self._plan_class("online"):
            self._plan_class("offline")

    def _plan_class(self, priority: Priority) -> bool:
        """Rows for one class; whether each of its sequences got what it can use."""
        batcher = self._batcher
        satisfied = True
        members = [sequence for sequence in batcher.running if sequence.priority == priority]
        for sequence in members:
            if sequence.is_decoding and sequence.holding is not None:
                satisfied &= self._add_decode(sequence)
        for sequence in members:
            if not sequence.is_decoding and sequence.holding is not None:
                satisfied &= self._add_prefill(sequence)
        for sequence in [waiting for waiting in batcher.waiting if waiting.priority == priority]:
            if not self._take_on(sequence):
                return False
        return satisfied

    def _has_row_left(self) -> bool:
        return len(self.rows) < self._limits.max_seqs_per_batch and self._tokens_left > 0

    def _add_decode(self, sequence: Sequence) -> bool:
        if not self._has_row_left():
            return False
        drafts = max(0, min(self._limits.speculative_tokens, sequence.final_tokens - sequence.total - 1))
        if self._tokens_left < 1 + drafts or not self._make_room(sequence, sequence.total + drafts):
            return False
        assert sequence.holding is not None
        self._open(sequence)
        start = sequence.total - 1
        self._add(
            sequence,
            BatchRow(
                request_id=sequence.request_id,
                epoch=sequence.epoch,
                token_ids=sequence.tokens(start, 1),
                start=start,
                block_ids=tuple(sequence.holding.blocks),
                samples=True,
                speculative_tokens=drafts,
            ),
            1 + drafts,
        )
        return True

    def _make_room(self, sequence: Sequence, position_count: int) -> bool:
        """Grow its table to ``position_count`` positions, preempting as needed; False when that took it itself."""
        assert sequence.holding is not None
        while not self._pool.grow(sequence.holding, self._pool.blocks_for(position_count)):
            victim = self._youngest(sequence)
            self._batcher.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _youngest(self, sequence: Sequence) -> Sequence:
        """Whom ``sequence`` preempts: nobody older than itself in its class, and nobody who has a row already."""
        has_row = {id(other) for other, _ in self.rows}
        for other in reversed(self._batcher.running):
            if other is sequence or (is_preemptible(other) and id(other) not in has_row):
                return other
        return sequence

    def _add_prefill(self, sequence: Sequence) -> bool:
        if not self._has_row_left():
            return False
        remaining = sequence.prefill_end - sequence.computed
        chunk = self._limits.max_tokens_per_chunk
        count = min(remaining, chunk, self._tokens_left) if chunk else remaining
        if count > self._tokens_left:
            return False
        assert sequence.holding is not None
        if sequence.computed == 0:
            self.started.append(sequence)
        self._open(sequence)
        push_chunk = -1
        if sequence.push:
            push_chunk = sequence.chunk_count
            sequence.chunk_count += 1
        self._add(
            sequence,
            BatchRow(
                request_id=sequence.request_id,
                epoch=sequence.epoch,
                token_ids=sequence.tokens(sequence.computed, count),
                start=sequence.computed,
                block_ids=tuple(sequence.holding.blocks),
                samples=count == remaining and not sequence.output,
                is_prefill=True,
                resumes=count == remaining and bool(sequence.output),
                push_chunk=push_chunk,
            ),
            count,
        )
        if count == remaining:
            self._take_along(sequence)
        return True

    def _take_along(self, leader: Sequence) -> None:
        """Rows for the samples that wait for this prompt, while there are rows and memory (see ``siblings.py``)."""
        for follower in list(leader.followers):
            if len(self.rows) >= self._limits.max_seqs_per_batch:
                return
            holding = self._memory_beside(leader, follower)
            if holding is None:
                return
            leader.followers.remove(follower)
            follower.leader = None
            follower.holding = holding
            follower.cached_tokens = leader.total
            self.started.append(follower)
            self._batcher.resume(follower)
            self._open(follower)
            row = BatchRow(
                request_id=follower.request_id,
                epoch=follower.epoch,
                token_ids=(),
                start=leader.total,
                block_ids=tuple(holding.blocks),
                samples=True,
                is_prefill=True,
                fork_of=leader.request_id,
            )
            self._add(follower, row, 0)

    def _memory_beside(self, leader: Sequence, follower: Sequence) -> Holding | None:
        """What a follower has once its leader's prompt is complete. The prompt's last position is never in a shared
        block: what the draft's cache has there depends on the token that follows."""
        assert leader.holding is not None
        pool = self._pool
        if follower.prefill_only:
            return pool.join(leader.holding, follower.owner)
        shared_count = (leader.total - 1) // pool.block_size
        return pool.fork(leader.holding, follower.owner, shared_count, pool.blocks_for(self._lookahead(follower)))

    def _lookahead(self, sequence: Sequence) -> int:
        """Tokens for which a sequence that begins gets blocks: enough for its first decode step."""
        return min(sequence.total + 1 + self._limits.speculative_tokens, sequence.final_tokens)

    def _take_on(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its memory and a first chunk; False when it must go on waiting."""
        batcher = self._batcher
        if not self._has_row_left():
            return False
        needed = self._pool.blocks_for(self._lookahead(sequence))
        if not self._limits.max_tokens_per_chunk and sequence.prefill_end > self._tokens_left:
            return False
        reserve = self._pool.blocks.count // 100 if self.rows else 0  # so that what runs is not preempted at once
        if not self._pool.fits(needed + reserve) and not (
            sequence.priority == "online" and batcher.preempt_offline(needed + reserve)
        ):
            return False
        sequence.holding = self._pool.hold(sequence.owner, needed)
        if sequence.holding is None:
            return False
        batcher.waiting.remove(sequence)
        batcher.resume(sequence)
        return self._add_prefill(sequence)

    def _open(self, sequence: Sequence) -> None:
        if not sequence.is_open:
            sequence.is_open = True
            self.opened.append(sequence.start_message())

    def _add(self, sequence: Sequence, row: BatchRow, token_count: int) -> None:
        self._tokens_left -= token_count
        self.rows.append((sequence, row))
