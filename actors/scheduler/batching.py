"""Continuous batching: which sequences run in the next step, and what a step's result makes of them.

Theory of operation
===================

Every role uses this core: a mixed instance for everything, a prefill instance for the chunks of requests that a decode
instance accepted, a decode instance for decode rows and for the chunks of requests that it preempted. One step is in
flight at a time, or a second one behind it (see below). A sequence is

    WAITING  no memory yet, or no more: new on a mixed instance, or preempted
    RUNNING  holds blocks and a slot; prefills chunk by chunk, then decodes
    gone     finished, failed or removed; its memory is freed when no step in flight runs over it any more

``add`` queues a sequence; ``resume`` takes one that already has its memory (a reservation); ``remove`` takes one out
at any time. A step is planned in this order:

1. online decode rows, oldest first; 2. online prefill chunks, oldest first; 3. online sequences from the waiting queue,
preempted ones first; 4. the same three for offline ones, if no online sequence is left waiting. A prompt's last chunk
takes along the other samples of that prompt (see ``siblings.py``).

A decode row that needs a block when none is free preempts the *youngest* sequence, offline before online (perhaps
itself): it loses its memory, goes back to the queue and later computes prompt and output again. What it has said stays,
and what follows is the same (C29). With temperature, which streams a token is drawn from depends on where the steps
before it began and how much they drafted, so neither depends on the neighbours or on memory: a row drafts
``speculative_tokens`` (fewer only where its own end is nearer) or does not run in this step, and a prefill over output
stops before the last token, from which decoding goes on where it stood. A sequence is only ever taken on if alone it
fits the whole pool, the drafts of every step included, and nobody preempts an older one of its class. So the oldest
always gets on: two that need each other's blocks do not take turns for ever. An online sequence at the head of the
queue preempts offline ones to get in.

Online and offline (C26): an offline sequence gets rows only in a step in which every online sequence got what it can
use. There is no aging: offline lives on what is left over, and gets all of it in the same step. Online is never held
up, because offline sequences yield budget, blocks and slots. An offline one is never paused while it holds what an
online one waits for: it is preempted.

One step ahead. While a step of nothing but plain decode rows runs, the next one is sent already (``plan_ahead``), so
that ranks need not wait for us between them: its rows feed the tokens that the first one samples. That is done only
when it could not be another step: nobody waits for memory or for a step to end, every sequence that runs is in the step
in flight, and all get their blocks without preempting. Whoever comes meanwhile joins one step later than otherwise. A
sequence that turns out to have ended has run one row too many; its result is dropped like that of any sequence that is
gone. Drafts are excluded: where a step begins then depends on how many were accepted in the one before.

Invariants: two steps in flight at most, the second one planned ahead; rows never exceed ``max_tokens_per_batch`` tokens
or ``max_seqs_per_batch`` rows; a row's table covers every position it may write; the memory of a row in flight is
pinned until its result is here.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from actors.scheduler.acceptance import FinishReason, accept
from actors.scheduler.blocks import CachePool, Holding
from actors.scheduler.planning import BatchLimits, Planner, is_preemptible, rows_ahead
from actors.scheduler.sequence import Sequence
from messages.batch import BatchResult, BatchRow, ExecuteBatch, RowResult, SequenceStart
from messages.requests import TokenLogprobs


def step_pin(number: int) -> str:
    """The pin under which a step in flight keeps the memory of its rows."""
    return f"step {number}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one row of a step did to its sequence.

    ``reason`` set: it has ended and left the batching core. ``error`` set: it failed and left likewise.
    """

    sequence: Sequence
    first_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    reason: FinishReason | None = None
    stop_token_id: int = -1
    error: str = ""
    row: RowResult | None = None


@dataclass
class Step:
    """The step in flight: its number, and who runs in it."""

    number: int
    rows: dict[tuple[str, int], tuple[Sequence, Holding, BatchRow]] = field(default_factory=dict)
    started: list[Sequence] = field(default_factory=list)  # of which this is the first chunk, or that were taken along

    @property
    def left_behind(self) -> list[Sequence]:
        """Sequences whose prompt is complete with this step, but that could not take all their followers along."""
        return [sequence for sequence, _, row in self.rows.values() if row.samples and sequence.followers]


class Batcher:
    """See the module's theory of operation."""

    def __init__(self, pool: CachePool, limits: BatchLimits, incarnation: int) -> None:
        self.pool = pool
        self.limits = limits
        self.steps: deque[Step] = deque()  # in flight, oldest first
        self.preempted_count = 0
        self._incarnation = incarnation
        self.step_count = 0
        self.prefilled_tokens = 0  # fed in prefill rows, those computed again after a preemption included
        self.forked_count = 0  # sequences that began with another's prompt
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._closed: dict[str, None] = {}

    # -- taking sequences on and out -----------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences without memory, in the order in which they will be taken on."""
        return self._waiting

    @property
    def running(self) -> list[Sequence]:
        """Sequences with memory, oldest first."""
        return self._running

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no memory yet. The caller made sure that alone it fits the pool."""
        insort(self._waiting, sequence, key=_queue_key)

    def resume(self, sequence: Sequence) -> None:
        """Run a sequence that already has its memory."""
        if sequence.holding is None:
            raise ValueError(f"{sequence.owner} has no memory to run in")
        insort(self._running, sequence, key=_age_key)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it does. Its memory is the caller's to release, if it has any."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._running.remove(sequence)
        self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """Have the workers forget a sequence with the next step."""
        if sequence.is_open:
            sequence.is_open = False
            self._closed[sequence.request_id] = None

    def release(self, sequence: Sequence) -> None:
        """Give up a sequence's memory (freed when no step runs over it and nobody else pins it)."""
        if sequence.holding is not None:
            holding, sequence.holding = sequence.holding, None
            self.pool.release(holding)

    def preempt_offline(self, block_count: int) -> bool:
        """Preempt offline sequences, youngest first, until a slot and ``block_count`` blocks are free or will be when
        the step in flight ends. Preempts nobody and returns False when even that would not be enough."""
        victims = [s for s in reversed(self._running) if s.priority == "offline" and is_preemptible(s)]
        blocks, slots = self.pool.blocks.free_count, self.pool.slots.free_count
        chosen: list[Sequence] = []
        for victim in victims:
            if blocks >= block_count and slots > 0:
                break
            chosen.append(victim)
            freed = self.pool.freed_by(sequence.holding for sequence in chosen if sequence.holding is not None)
            blocks = self.pool.blocks.free_count + freed
            slots += 1
        if blocks < block_count or slots < 1:
            return False
        for victim in chosen:
            self.preempt(victim)
        return True

    # -- planning a step -----------------------------------------------------------------------------------------

    @property
    def step(self) -> Step | None:
        """The step that runs; None when none is in flight."""
        return self.steps[0] if self.steps else None

    def plan(self) -> ExecuteBatch | None:
        """The next step, now in flight; None when one is in flight already or there is nothing to run."""
        if self.steps or not (self._running or self._waiting):
            return None
        planner = Planner(self)
        return self._send(planner.rows, planner.opened, planner.started)

    @property
    def has_room_ahead(self) -> bool:
        """Whether a second step may be in flight, and nobody waits for memory."""
        return self.limits.runs_ahead and len(self.steps) == 1 and not self._waiting

    def plan_ahead(self) -> ExecuteBatch | None:
        """The step after the one in flight, if it can be known by now (see the theory); None otherwise."""
        if not self.has_room_ahead:
            return None
        return self._send(rows_ahead(self.pool, self.steps[0], self._running), [], [])

    def _send(
        self,
        rows: list[tuple[Sequence, BatchRow]],
        opened: list[SequenceStart],
        started: list[Sequence],
    ) -> ExecuteBatch | None:
        if not rows:
            return None
        self.step_count += 1
        step = Step(number=self.step_count, started=started)
        for sequence, row in rows:
            assert sequence.holding is not None
            self.pool.pin(sequence.holding, step_pin(step.number))
            step.rows[sequence.owner] = (sequence, sequence.holding, row)
            self.prefilled_tokens += row.token_count if row.is_prefill else 0
            self.forked_count += bool(row.fork_of)
        self.steps.append(step)
        closed, self._closed = tuple(self._closed), {}
        return ExecuteBatch(
            step=step.number,
            incarnation=self._incarnation,
            rows=tuple(row for _, row in rows),
            opened=tuple(opened),
            closed=closed,
        )

    def preempt(self, victim: Sequence) -> None:
        """Take its memory; it computes prompt and output again later."""
        self.preempted_count += 1
        victim.preempted_count += 1
        victim.computed = 0
        victim.is_decoding = False
        victim.restored = False
        victim.cached_tokens = 0
        victim.prompt_logprobs.clear()
        self._running.remove(victim)
        self.close(victim)
        self.release(victim)
        self.add(victim)

    # -- a step's result -----------------------------------------------------------------------------------------

    def apply(self, result: BatchResult) -> list[Outcome]:
        """What the step did to each sequence that still runs. A result that is not the step in flight's: nothing."""
        step = self.step
        if step is None or result.step != step.number or result.incarnation != self._incarnation:
            return []
        self.steps.popleft()
        by_owner = {(row.request_id, row.epoch): row for row in result.rows}
        outcomes = []
        for owner, (sequence, holding, row) in step.rows.items():
            if sequence.holding is holding:
                outcome = self._apply_row(sequence, row, by_owner.get(owner))
                if outcome is not None:
                    outcomes.append(outcome)
            self.pool.unpin(holding, step_pin(step.number))
        return outcomes

    def _apply_row(self, sequence: Sequence, row: BatchRow, result: RowResult | None) -> Outcome | None:
        index = len(sequence.output)
        error = ""
        if result is None:
            error = "the workers returned no result for this row"
        elif result.error:
            error = result.error
        elif row.samples and not result.token_ids:
            error = "the workers sampled no token"
        if error or result is None:
            self._leave(sequence)
            return Outcome(sequence=sequence, first_index=index, error=error, row=result)
        if index == 0:
            sequence.prompt_logprobs += result.prompt_logprobs
        if not row.samples:
            sequence.computed += len(row.token_ids)
            return self._resumed(sequence, result) if row.resumes else None
        kept = accept(
            sequence.sampling, index, sequence.final_tokens - len(sequence.prompt), result.token_ids, result.logprobs
        )
        self._count(sequence, row, result)
        sequence.output += kept.token_ids
        sequence.computed = sequence.total - 1
        sequence.is_decoding = True
        prompt_logprobs = tuple(sequence.prompt_logprobs) if index == 0 else ()
        if kept.reason is not None or sequence.prefill_only:
            self._leave(sequence)
        return Outcome(
            sequence=sequence,
            first_index=index,
            token_ids=kept.token_ids,
            logprobs=kept.logprobs,
            prompt_logprobs=prompt_logprobs,
            reason=kept.reason,
            stop_token_id=kept.stop_token_id,
            row=result,
        )

    def _resumed(self, sequence: Sequence, result: RowResult) -> Outcome | None:
        """All but its last token is computed: it decodes, here or, if this instance does not, elsewhere."""
        if not sequence.prefill_only:
            sequence.is_decoding = True
            return None
        self._leave(sequence)
        return Outcome(sequence=sequence, first_index=len(sequence.output), row=result)

    def _count(self, sequence: Sequence, row: BatchRow, result: RowResult) -> None:
        if row.is_prefill:
            return
        sequence.decode_steps += 1
        sequence.drafted += result.drafted
        sequence.accepted += result.accepted
        positions = sequence.accepted_by_position
        positions += [0] * (result.drafted - len(positions))
        for position in range(result.accepted):
            positions[position] += 1

    def _leave(self, sequence: Sequence) -> None:
        """Out of the core. Memory of a prefill-only sequence stays: it is what the hand-off moves."""
        self._running.remove(sequence)
        if not sequence.prefill_only:
            self.close(sequence)
            self.release(sequence)


def _queue_key(sequence: Sequence) -> tuple[bool, bool, int]:
    return (sequence.priority == "offline", not sequence.preempted_count, sequence.order)


def _age_key(sequence: Sequence) -> tuple[bool, int]:
    return (sequence.priority == "offline", sequence.order)
