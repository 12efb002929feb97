"""One command from the scheduler becomes one per rank, and the ranks' answers become one answer.

Theory of operation
===================

The engine owns no resource and decides nothing about requests. It knows how many ranks there are and, for everything
it has asked of them, which have answered:

    readiness   every rank's WorkerReady                     → EngineReady, when their capacities agree
    steps       ExecuteBatch to all, BatchResult of all      → rank 0's result, when all sampled the same tokens
    links       see links.py
    receives    see receives.py (decode instances)
    pushes      see pushes.py (prefill instances)

Steps are one ordered stream; the scheduler may send one while another runs, and they end in their order. All ranks of
an instance fail together: a rank that reports a broken step, that samples a different token, or that does not answer in
time ends the node (``Fail``), because ranks that have left the common stream cannot come back to it; the supervisor
restarts the whole instance.

A row that one rank could not run (``RowResult.error``) has failed on all: the error stands in the merged result and the
instance lives on. That is too late when another step was sent already: the others will run that row there, and the
ranks disagree. Answers about an older step, another incarnation, or given twice, change nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from actors.engine.links import Links
from actors.engine.pushes import PURPOSE as CLOSE_PUSH
from actors.engine.pushes import Pushes
from actors.engine.receives import Receives
from actors.runtime.config import NodeConfig
from actors.runtime.machine import (
    Effect,
    Fail,
    Handlers,
    Note,
    Send,
    StartTimer,
    StatusRequests,
    StatusValues,
    StopTimer,
)
from messages.base import Message, control_address, rank_address
from messages.batch import BatchResult, ExecuteBatch, RowResult, StepFailed
from messages.layout import Manifest
from messages.lifecycle import EngineReady, WorkerReady
from messages.timers import InstanceTimer, RequestTimer

AGREED_FIELDS = (
    "model_fingerprint",
    "tp_size",
    "block_size",
    "block_count",
    "slot_count",
    "speculative_tokens",
    "max_tokens_per_chunk",
    "max_model_len",
)
"""What every rank's manifest must say alike."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One instance's engine."""

    instance: str
    incarnation: int
    tp_size: int = 1
    step_timeout_ms: float = 90_000.0
    link_timeout_ms: float = 15_000.0
    open_timeout_ms: float = 10_000.0
    resend_ms: float = 1000.0  # until a rank confirms a release, a closed push or a lost peer

    @classmethod
    def from_node(cls, config: NodeConfig) -> EngineSettings:
        """Of the control node ``config``."""
        options = config.options
        return cls(
            instance=config.instance,
            incarnation=config.incarnation,
            tp_size=config.tp_size,
            # a rank that waits for another gives up first, and says which
            step_timeout_ms=float(options.collective_timeout_ms + options.hang_timeout_ms),
        )


@dataclass
class StepInFlight:
    """A step that runs or waits for the one that does, and the ranks that have answered."""

    number: int
    since_ns: int
    results: dict[int, BatchResult] = field(default_factory=dict)


class EngineMachine:
    """See the module's theory. One per instance, on its control node."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._scheduler = control_address(settings.instance, "scheduler")
        self._workers = tuple(rank_address(settings.instance, rank, "worker") for rank in range(settings.tp_size))
        self._manifests: dict[int, Manifest] = {}
        self._ready = False
        self._steps: deque[StepInFlight] = deque()  # the first one is watched by the timer
        self._steps_done = 0
        self.links = Links(
            settings.instance, settings.tp_size, timeout_ms=settings.link_timeout_ms, resend_ms=settings.resend_ms
        )
        self.pushes = Pushes(settings.instance, settings.tp_size, resend_ms=settings.resend_ms)
        self.receives = Receives(
            settings.instance,
            settings.tp_size,
            open_timeout_ms=settings.open_timeout_ms,
            resend_ms=settings.resend_ms,
        )
        self._handlers: Handlers[list[Effect]] = Handlers()
        on = self._handlers.on
        on(WorkerReady, self._on_worker_ready)
        on(ExecuteBatch, self._on_execute_batch)
        on(BatchResult, self._on_batch_result)
        on(StepFailed, self._on_step_failed)
        on(InstanceTimer, self._on_instance_timer)
        on(RequestTimer, self._on_request_timer)
        for part in (self.links, self.pushes, self.receives):
            self._handlers.take(part.handlers())

    def start(self, now_ns: int) -> list[Effect]:
        """Nothing: the ranks say when they are ready."""
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """React to one message."""
        handler = self._handlers.get(type(message))
        return handler(now_ns, sender, message) if handler is not None else []

    def status(self, now_ns: int) -> tuple[StatusValues, StatusRequests]:
        """What the engine waits for."""
        values: list[tuple[str, float | int | str]] = [
            ("ready", int(self._ready)),
            ("ranks_ready", len(self._manifests)),
            ("steps_done", self._steps_done),
            ("receives", self.receives.live_count),
            ("pushes_closing", self.pushes.closing_count),
        ]
        if self._steps:
            step = self._steps[0]
            missing = [str(rank) for rank in range(len(self._workers)) if rank not in step.results]
            values.append(("step", f"{step.number}: waits for ranks {', '.join(missing)}"))
            values.append(("step_since_ns", step.since_ns))
        return (*values, *self.links.status()), self.receives.status()

    # -- timers --------------------------------------------------------------------------------------------------

    def _on_instance_timer(self, now_ns: int, sender: str, message: InstanceTimer) -> list[Effect]:
        if message.purpose.startswith("step"):
            return self._on_step_timeout(message.purpose)
        return self.links.on_timer(now_ns, sender, message)

    def _on_request_timer(self, now_ns: int, sender: str, message: RequestTimer) -> list[Effect]:
        part = self.pushes if message.purpose == CLOSE_PUSH else self.receives
        return part.on_timer(now_ns, sender, message)

    # -- readiness -----------------------------------------------------------------------------------------------

    def _on_worker_ready(self, now_ns: int, sender: str, message: WorkerReady) -> list[Effect]:
        own = self.settings
        if self._ready or message.incarnation != own.incarnation or not 0 <= message.rank < own.tp_size:
            return []
        self._manifests[message.rank] = message.manifest
        if len(self._manifests) < own.tp_size:
            return []
        manifests = tuple(self._manifests[rank] for rank in range(own.tp_size))
        for manifest in manifests[1:]:
            for name in AGREED_FIELDS:
                first, other = getattr(manifests[0], name), getattr(manifest, name)
                if first != other:
                    reason = f"ranks 0 and {manifest.rank} of {own.instance} disagree on {name}: {first} and {other}"
                    return [Fail(reason, fatal=True)]
        self._ready = True
        self.links.own_manifests = manifests
        return [Send(self._scheduler, EngineReady(incarnation=own.incarnation, manifests=manifests))]

    # -- steps ---------------------------------------------------------------------------------------------------

    def _on_execute_batch(self, now_ns: int, sender: str, message: ExecuteBatch) -> list[Effect]:
        if message.incarnation != self.settings.incarnation or message.step <= self._last_step():
            return []
        self._steps.append(StepInFlight(message.step, now_ns))
        effects: list[Effect] = [Send(worker, message) for worker in self._workers]
        return [*effects, self._watch(self._steps[0])] if len(self._steps) == 1 else effects

    def _watch(self, step: StepInFlight) -> StartTimer:
        own = self.settings
        due = InstanceTimer(instance=own.instance, incarnation=own.incarnation, purpose=f"step {step.number}")
        return StartTimer(("step",), own.step_timeout_ms, due)

    def _last_step(self) -> int:
        return self._steps[-1].number if self._steps else self._steps_done

    def _on_batch_result(self, now_ns: int, sender: str, message: BatchResult) -> list[Effect]:
        step = next((step for step in self._steps if step.number == message.step), None)
        if step is None or message.incarnation != self.settings.incarnation:
            return []
        if message.rank in step.results or not 0 <= message.rank < self.settings.tp_size:
            return []
        step.results[message.rank] = message
        effects: list[Effect] = []
        while self._steps and len(self._steps[0].results) == self.settings.tp_size:
            effects += self._end_step(now_ns, self._steps[0])
        return effects

    def _end_step(self, now_ns: int, step: StepInFlight) -> list[Effect]:
        """All ranks have answered: their results as one, if they agree."""
        self._steps.popleft()
        self._steps_done = step.number
        results = [step.results[rank] for rank in range(self.settings.tp_size)]
        rows = []
        for result in results[1:]:
            if len(result.rows) != len(results[0].rows):
                reason = f"it returned {len(result.rows)} rows, rank 0 returned {len(results[0].rows)}"
                return self._fail_step(step.number, result.rank, reason)
        for index, row in enumerate(results[0].rows):
            others = [result.rows[index] for result in results[1:]]
            for rank, other in enumerate(others, start=1):
                difference = _difference(row, other)
                if difference:
                    return self._fail_step(step.number, rank, difference)
            errors = [other.error for other in (row, *others)]
            error = next(filter(None, errors), "")
            if error and not all(errors) and self._steps:
                rank = errors.index(error)
                reason = f"only it could not run {row.request_id}, which also runs in the step behind: {error}"
                return self._fail_step(step.number, rank, reason)
            rows.append(row if error == row.error else msgspec.structs.replace(row, error=error))
        slowest_ms = max(result.forward_ms for result in results)
        merged = msgspec.structs.replace(results[0], rows=tuple(rows), forward_ms=slowest_ms)
        if not self._steps:
            return [StopTimer(("step",)), Send(self._scheduler, merged)]
        self._steps[0].since_ns = now_ns
        return [self._watch(self._steps[0]), Send(self._scheduler, merged)]

    def _on_step_failed(self, now_ns: int, sender: str, message: StepFailed) -> list[Effect]:
        if message.incarnation != self.settings.incarnation:
            return []
        return self._fail_step(message.step, message.rank, message.reason)

    def _on_step_timeout(self, purpose: str) -> list[Effect]:
        if not self._steps or purpose != f"step {self._steps[0].number}":
            return []
        step = self._steps[0]
        silent = [rank for rank in range(self.settings.tp_size) if rank not in step.results]
        reason = f"ranks {silent} did not answer within {self.settings.step_timeout_ms:.0f} ms"
        return self._fail_step(step.number, silent[0], reason)

    def _fail_step(self, step: int, rank: int, reason: str) -> list[Effect]:
        """The ranks have left the common stream: this instance is over."""
        own = self.settings
        self._steps.clear()
        failed = StepFailed(step=step, incarnation=own.incarnation, rank=rank, reason=reason)
        text = f"step {step} broke on rank {rank} of {own.instance}: {reason}"
        note = Note("error", "step broke", (("step", step), ("rank", rank), ("reason", reason)))
        return [note, Send(self._scheduler, failed), Fail(text)]


def _difference(first: RowResult, other: RowResult) -> str:
    """In what two ranks' results of one row differ that must be equal; "" when they do not."""
    if (first.request_id, first.epoch) != (other.request_id, other.epoch):
        return f"its row is {other.request_id} epoch {other.epoch}, rank 0's {first.request_id} epoch {first.epoch}"
    if first.error or other.error:
        return ""
    if first.token_ids != other.token_ids:
        return f"{first.request_id}: it sampled {other.token_ids}, rank 0 sampled {first.token_ids}"
    return ""
