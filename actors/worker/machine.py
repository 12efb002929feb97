"""The worker's machine: one rank's place in its instance's command stream.

Theory of operation
===================

    LOADING   from the start until the weights are loaded and the caches registered
    READY     executes steps, strictly in the order of their numbers
    FAILED    a step broke or the load was refused; nothing more is executed

| state   | message        | what happens                                                                        |
|---------|----------------|-------------------------------------------------------------------------------------|
| LOADING | ModelLoaded    | READY; ``WorkerReady`` to the transfer actor of this node, which hands it on        |
| LOADING | LoadFailed     | FAILED; the node fails (fatally for a configuration error)                          |
| READY   | ExecuteBatch   | runs it if it is the next step; a gap: ``StepFailed``; a repetition: dropped         |
| READY   | BatchResult    | (own job) forwarded to the engine                                                   |
| READY   | StepFailed     | (own job) FAILED; forwarded to the engine, and the node fails                       |

The engine sends every rank the same stream. Steps are numbered from 1 without gaps; a missing number means a lost
command, after which this rank could only disagree with the others. So it says so at once and the instance restarts,
instead of waiting in a collective until a timeout. Ranks that did get the command find out by comparing step numbers
before a step's first collective (see ``collectives.py``).

Invariants: at most the steps received are executed, each once, in order; commands of another incarnation change
nothing; after FAILED no result is sent.
"""

from __future__ import annotations

from enum import Enum

from actors.runtime.machine import Effect, Fail, Handlers, Note, Run, Send
from actors.worker.jobs import ExecuteStep, LoadModel
from messages.base import Message, control_address, rank_address
from messages.batch import BatchResult, ExecuteBatch, StepFailed
from messages.lifecycle import LoadFailed, ModelLoaded, WorkerReady


class WorkerState(Enum):
    """Where the worker stands."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class WorkerMachine:
    """Decides for one rank of ``instance`` in its life ``incarnation``."""

    def __init__(self, instance: str, rank: int, incarnation: int) -> None:
        self.state = WorkerState.LOADING
        self._rank = rank
        self._incarnation = incarnation
        self._engine = control_address(instance, "engine")
        self._transfer = rank_address(instance, rank, "transfer")
        self._received_step = 0
        self._finished_step = 0
        self._late_count = 0
        self._row_count = 0
        self._token_count = 0
        self._error_count = 0
        self._handlers: Handlers[list[Effect]] = Handlers()
        on = self._handlers.on
        on(ModelLoaded, self._on_model_loaded)
        on(LoadFailed, self._on_load_failed)
        on(ExecuteBatch, self._on_execute_batch)
        on(BatchResult, self._on_batch_result)
        on(StepFailed, self._on_step_failed)

    def start(self, now_ns: int) -> list[Effect]:
        """Begin loading."""
        return [Run(LoadModel())]

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """React to one message; what does not fit the state changes nothing."""
        handler = self._handlers.get(type(message))
        return handler(now_ns, sender, message) if handler is not None else []

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        """Counters of this rank; requests are known to the scheduler."""
        values: tuple[tuple[str, float | int | str], ...] = (
            ("state", self.state.value),
            ("step_received", self._received_step),
            ("step_finished", self._finished_step),
            ("rows", self._row_count),
            ("tokens", self._token_count),
            ("row_errors", self._error_count),
            ("late_messages", self._late_count),
        )
        return values, ()

    def _on_model_loaded(self, now_ns: int, sender: str, message: ModelLoaded) -> list[Effect]:
        if self.state is not WorkerState.LOADING:
            return self._late()
        self.state = WorkerState.READY
        manifest = message.manifest
        fields = (
            ("blocks", manifest.block_count),
            ("slots", manifest.slot_count),
            ("dtype", next((tensor.dtype for tensor in manifest.tensors if tensor.addressed_by == "block"), "")),
            ("cache_mib", sum(region.size_bytes for region in manifest.regions) >> 20),
        )
        ready = WorkerReady(rank=self._rank, incarnation=self._incarnation, manifest=manifest)
        return [Note("info", "model loaded", fields), Send(self._transfer, ready)]

    def _on_load_failed(self, now_ns: int, sender: str, message: LoadFailed) -> list[Effect]:
        if self.state is not WorkerState.LOADING:
            return self._late()
        self.state = WorkerState.FAILED
        return [Fail(message.reason, message.fatal)]

    def _on_execute_batch(self, now_ns: int, sender: str, message: ExecuteBatch) -> list[Effect]:
        if message.incarnation != self._incarnation or message.step <= self._received_step:
            return self._late()
        if self.state is not WorkerState.READY:
            return self._late()
        if message.step != self._received_step + 1:
            missing = self._received_step + 1
            return self._fail(message.step, f"step {missing} was lost: step {message.step} came after {missing - 1}")
        self._received_step = message.step
        return [Run(ExecuteStep(batch=message))]

    def _on_batch_result(self, now_ns: int, sender: str, message: BatchResult) -> list[Effect]:
        if self.state is not WorkerState.READY or message.incarnation != self._incarnation:
            return self._late()
        self._finished_step = message.step
        self._row_count += len(message.rows)
        self._token_count += sum(len(row.token_ids) for row in message.rows)
        failed = [row for row in message.rows if row.error]
        self._error_count += len(failed)
        notes: list[Effect] = [
            Note("warning", "row failed", (("request", row.request_id), ("step", message.step), ("reason", row.error)))
            for row in failed
        ]
        return [*notes, Send(self._engine, message)]

    def _on_step_failed(self, now_ns: int, sender: str, message: StepFailed) -> list[Effect]:
        if self.state is not WorkerState.READY or message.incarnation != self._incarnation:
            return self._late()
        return self._fail(message.step, message.reason)

    def _fail(self, step: int, reason: str) -> list[Effect]:
        self.state = WorkerState.FAILED
        failed = StepFailed(step=step, incarnation=self._incarnation, rank=self._rank, reason=reason)
        return [Send(self._engine, failed), Fail(f"step {step} failed on rank {self._rank}: {reason}")]

    def _late(self) -> list[Effect]:
        self._late_count += 1
        return []
