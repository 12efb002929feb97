"""Drives one scheduler machine by hand: messages in, effects out, invariants checked after every message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from actors.runtime.machine import Effect, Fail, Note, Send, StartTimer, StopTimer
from actors.scheduler.machine import SchedulerMachine
from actors.scheduler.settings import SchedulerSettings
from messages.base import GATEWAY, Message, control_address
from messages.batch import BatchResult, BatchRow, ExecuteBatch, RowResult
from messages.cluster import ClusterView, InstanceInfo, PeerLinked
from messages.layout import Manifest
from messages.lifecycle import EngineReady
from messages.requests import SamplingParams, SubmitRequest
from messages.transfer import ClosePush, PushClosed
from tests.scheduler.invariants import check_scheduler

M = TypeVar("M", bound=Message)

EOS = 2


def manifest(instance: str, **changes: Any) -> Manifest:
    """A small rank's manifest without tensors."""
    values: dict[str, Any] = dict(
        instance=instance,
        incarnation=1,
        rank=0,
        tp_size=1,
        model_fingerprint="m",
        block_size=4,
        block_count=16,
        slot_count=4,
        speculative_tokens=0,
        regions=(),
        tensors=(),
        max_model_len=48,
    )
    return Manifest(**{**values, **changes})


def info(instance: str, role: str, incarnation: int = 1) -> InstanceInfo:
    """What the registry's view says of a small instance."""
    return InstanceInfo(
        instance=instance,
        incarnation=incarnation,
        role=role,  # type: ignore[arg-type]
        tp_size=1,
        max_model_len=48,
        block_count=16,
        slot_count=4,
    )


def submit(request_id: str = "a", prompt: int | Iterable[int] = 5, **changes: Any) -> SubmitRequest:
    """A request with ``prompt`` tokens; sampling parameters may be given by name."""
    sampling = {name: changes.pop(name) for name in list(changes) if name in SamplingParams.__struct_fields__}
    tokens = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else tuple(prompt)
    values: dict[str, Any] = dict(request_id=request_id, epoch=0, prompt_token_ids=tokens, reply_to=GATEWAY)
    sampling = {"max_tokens": 4, "eos_token_ids": (EOS,), **sampling}
    return SubmitRequest(**{**values, **changes}, sampling=SamplingParams(**sampling))


def next_token(row: BatchRow) -> int:
    """The fake model: the next token is decided by how many came before it."""
    return 1000 + row.start + row.token_count


class Harness:
    """One scheduler and everything it has said. ``sent`` keeps what no test has looked at yet."""

    def __init__(self, role: str = "MIX", instance: str = "m0", **changes: Any) -> None:
        capacity = {name: changes.pop(name) for name in list(changes) if name in Manifest.__struct_fields__}
        defaults: dict[str, Any] = dict(
            max_tokens_per_batch=16,
            max_seqs_per_batch=4,
            max_tokens_per_chunk_for_prefill=8,
            enable_async_scheduling=False,  # one step at a time; test_ahead.py is about the second one
        )
        settings = SchedulerSettings(instance=instance, incarnation=1, role="MIX")
        self.settings = replace(settings, **{**defaults, "role": role, **changes})
        self.machine = SchedulerMachine(self.settings)
        self.instance = instance
        self.now_ns = 1_000_000_000
        self.sent: list[Send] = []
        self.closes_pushes = True
        self.notes: list[Note] = []
        self.failures: list[Fail] = []
        self.timers: dict[tuple[str | int, ...], tuple[int, Message]] = {}
        self.tell(EngineReady(incarnation=1, manifests=(manifest(instance, **capacity),)))

    # -- messages ------------------------------------------------------------------------------------------------

    def tell(self, message: Message, sender: str = GATEWAY) -> None:
        """Hand ``message`` to the machine and file its effects."""
        self.now_ns += 1000
        before = len(self.sent)
        self._file(self.machine.handle(self.now_ns, sender, message))
        check_scheduler(self.machine)
        for send in self.sent[before:]:
            if isinstance(send.message, ClosePush) and self.closes_pushes:
                self.push_closed(send.message)

    def push_closed(self, close: ClosePush) -> None:
        """The engine says that no rank has a write of this push in flight."""
        closed = PushClosed(request_id=close.request_id, epoch=close.epoch, rank=-1)
        self.tell(closed, control_address(self.instance, "engine"))

    def _file(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.sent.append(effect)
                case StartTimer():
                    self.timers[effect.key] = (self.now_ns + int(effect.delay_ms * 1e6), effect.message)
                case StopTimer():
                    self.timers.pop(effect.key, None)
                case Note():
                    self.notes.append(effect)
                case Fail():
                    self.failures.append(effect)
                case _:
                    raise AssertionError(f"a scheduler has no jobs: {effect}")

    def fire(self, purpose: str) -> None:
        """Let the next timer of this purpose be due."""
        due = min((due, key) for key, (due, _) in self.timers.items() if key[0] == purpose)
        self.now_ns = max(self.now_ns, due[0])
        self.tell(self.timers.pop(due[1])[1], control_address(self.instance, "scheduler"))

    def has_timer(self, purpose: str) -> bool:
        """Whether a timer of this purpose runs."""
        return any(key[0] == purpose for key in self.timers)

    # -- what it said --------------------------------------------------------------------------------------------

    def take(self, kind: type[M]) -> list[M]:
        """Every message of ``kind`` sent since the last look, oldest first."""
        taken = [send.message for send in self.sent if isinstance(send.message, kind)]
        self.sent = [send for send in self.sent if not isinstance(send.message, kind)]
        return taken

    def one(self, kind: type[M]) -> M:
        """The only message of ``kind`` sent since the last look."""
        taken = self.take(kind)
        assert len(taken) == 1, f"{len(taken)} {kind.__name__}: {taken}; also sent: {self.sent}"
        return taken[0]

    def none(self, kind: type[Message]) -> None:
        """No message of ``kind`` was sent since the last look."""
        assert not [send for send in self.sent if isinstance(send.message, kind)], self.sent

    # -- the ranks -----------------------------------------------------------------------------------------------

    def step(self, tokens: dict[str, tuple[int, ...]] | None = None, **fields: Any) -> ExecuteBatch:
        """The engine answers the step in flight; sampled tokens by request id, else the fake model's."""
        batch = self.one(ExecuteBatch)
        self.answer(batch, tokens, **fields)
        return batch

    def answer(self, batch: ExecuteBatch, tokens: dict[str, tuple[int, ...]] | None = None, **fields: Any) -> None:
        """The engine's answer to ``batch``."""
        rows = []
        for row in batch.rows:
            sampled = (tokens or {}).get(row.request_id, (next_token(row),)) if row.samples else ()
            rows.append(RowResult(request_id=row.request_id, epoch=row.epoch, token_ids=sampled, **fields))
        result = BatchResult(step=batch.step, incarnation=1, rank=0, rows=tuple(rows))
        self.tell(result, control_address(self.instance, "engine"))

    def run(self, steps_max: int = 200) -> list[ExecuteBatch]:
        """Answer steps until there is none."""
        batches: list[ExecuteBatch] = []
        for answered in range(steps_max):
            batches += self.take(ExecuteBatch)
            if answered == len(batches):
                return batches
            self.answer(batches[answered])
        raise AssertionError(f"no end after {steps_max} steps: {self.machine.status(self.now_ns)}")

    # -- the cluster ---------------------------------------------------------------------------------------------

    def link(self, *peers: InstanceInfo, version: int = 1) -> None:
        """The registry names these peers (and this instance), and the engine links them."""
        own = info(self.instance, self.settings.role)
        self.tell(ClusterView(version=version, registry_incarnation=1, instances=(own, *peers)))
        for peer in peers:
            self.tell(PeerLinked(instance=peer.instance, incarnation=peer.incarnation, rank=-1))
