"""Feed an actor's recorded inbox to a fresh machine, step by step, and compare what it does with what was recorded.

A machine sees nothing but messages and the time, so equal inboxes give equal effects. Where they differ, the code is
not the code that was recorded, or a machine reads something that is not in its inbox. Only what leaves the machine as
a message is recorded: timers and jobs are seen by what they send back to the actor, which is part of the inbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from actors.runtime.machine import Effect, Fail, Machine, Note, Run, Send, StartTimer, StopTimer
from actors.runtime.trace_file import FAULT, HANDLED, SENT, Record, Trace, TraceError, TraceFile
from messages.base import actor_of, node_of
from messages.lifecycle import StatusRequest
from scripts.trace_machines import make_machine
from scripts.trace_story import summarize

_encode = msgspec.msgpack.Encoder().encode
Status = dict[str, str]


@dataclass(frozen=True)
class Sent:
    """A recorded send. ``payload`` is empty when it was not recorded."""

    to: str
    type: str
    payload: bytes

    def is_same(self, effect: Send) -> bool:
        """Whether the machine sent just this."""
        message = effect.message
        if (self.to, self.type) != (effect.to, type(message).__name__):
            return False
        return not self.payload or self.payload == _encode(message)


@dataclass(frozen=True)
class Difference:
    """The first effect that is not what was recorded."""

    step: int
    text: str


class Replay:
    """One life of one actor. ``difference`` is set as soon as an effect differs from the record."""

    def __init__(self, trace_dir: Path, address: str, incarnation: int = 0) -> None:
        """Raises ``TraceError`` when there is nothing to replay."""
        self.address = address
        self.file: TraceFile = Trace(trace_dir).file_of(node_of(address), incarnation)
        if not self.file.config.options.trace_payloads:
            raise TraceError(f"{address} cannot be replayed: its trace has no payloads (option trace_payloads)")
        try:
            self.machine: Machine = make_machine(self.file.config, actor_of(address))
        except LookupError as error:
            raise TraceError(str(error)) from error
        self.difference: Difference | None = None
        self.step_count = 0
        self._again: Counter[str] = Counter()  # handlings still to come, per message (a duplicate is handled twice)
        self._sent = self._recorded_sends()

    def _recorded_sends(self) -> dict[str, list[Sent]]:
        """By the message whose handling caused them. What a fault swallowed was sent as well."""
        by_parent: dict[str, list[Sent]] = {}
        seen: set[str] = set()
        for record in self.file.records():
            if record.kind == HANDLED and record.to == self.address:
                self._again[record.message_id] += 1
            if record.sender != self.address or record.to == self.address or not record.message_id:
                continue
            if record.kind == HANDLED or record.message_id in seen:
                continue
            seen.add(record.message_id)
            payload = b"" if record.kind == FAULT else record.payload
            by_parent.setdefault(record.parent_id, []).append(Sent(record.to, record.type, payload))
        return by_parent

    def lines(self, until: int = 0) -> Iterator[str]:
        """Every step as text, up to step ``until`` (0: all), or to the first difference."""
        first = next((record for record in self.file.records() if self.address in (record.sender, record.to)), None)
        if first is None:
            raise TraceError(f"{self.address} neither sent nor handled anything in {self.file.path}")
        begin_ns = first.now_ns
        before = self._status(begin_ns)
        effects = self.machine.start(begin_ns)
        yield f"start of {self.address}, incarnation {self.file.config.incarnation}"
        yield from self._show(effects, before, begin_ns)
        yield from self._compare(effects, "", 0)
        for record in self.file.records():
            if record.kind != HANDLED or record.to != self.address or self.difference is not None:
                continue
            if until and self.step_count == until:
                return
            yield from self._step(record, begin_ns)
        if self.difference is None:
            yield f"{self.step_count} steps replayed; every message sent is as recorded"

    def run(self) -> Difference | None:
        """Replay everything; the first difference, or None."""
        for _ in self.lines():
            pass
        return self.difference

    def _step(self, record: Record, begin_ns: int) -> Iterator[str]:
        message = record.message
        assert message is not None
        self.step_count += 1
        sender = "itself" if record.sender == record.to else record.sender
        epoch = f" epoch {record.epoch}" if record.epoch else ""
        yield (
            f"#{self.step_count} {(record.now_ns - begin_ns) / 1e6:.3f} ms  {record.type} from {sender}"
            f"  {record.trace_id}{epoch}  {summarize(message)}".rstrip()
        )
        if isinstance(message, StatusRequest):
            yield "    (answered by the shell)"
            return
        before = self._status(record.now_ns)
        try:
            effects = self.machine.handle(record.now_ns, record.sender, message)
        except Exception as error:
            text = f"the machine raised {type(error).__name__}: {error}"
            self.difference = Difference(self.step_count, text)
            yield f"    ✗ {text}"
            return
        yield from self._show(effects, before, record.now_ns)
        yield from self._compare(effects, record.message_id, self.step_count)

    def _status(self, now_ns: int) -> Status:
        values, requests = self.machine.status(now_ns)
        status = {name: str(value) for name, value in values}
        for request_id, epoch, state, waits_for, _ in requests:
            status[f"{request_id}#{epoch}"] = f"{state}, waits for {waits_for}" if waits_for else state
        return status

    def _show(self, effects: list[Effect], before: Status, now_ns: int) -> Iterator[str]:
        after = self._status(now_ns)
        for name in {**before, **after}:
            old, new = before.get(name, "-"), after.get(name, "-")
            if old != new:
                yield f"    {name}: {old} ⇒ {new}"
        for effect in effects:
            yield f"    {_describe(effect)}"

    def _compare(self, effects: list[Effect], parent_id: str, step: int) -> Iterator[str]:
        """Sends must be the recorded ones, in order; a job may have sent more in between."""
        recorded = self._sent.get(parent_id, [])
        sends = [effect for effect in effects if isinstance(effect, Send) and effect.to != self.address]
        has_job = any(isinstance(effect, Run) for effect in effects)
        failed = any(isinstance(effect, Fail) for effect in effects)
        text = ""
        place = 0
        for send in sends:
            found = next((i for i in range(place, len(recorded)) if recorded[i].is_same(send)), None)
            if found is None or (found > place and not has_job and parent_id):
                text = _mismatch(send, recorded[place] if place < len(recorded) else None)
                break
            place = found + 1
        else:
            self._again[parent_id] -= 1
            rest = self._sent[parent_id] = recorded[place:]
            if parent_id and rest and not has_job and not failed and self._again[parent_id] < 1:
                extra = rest[0]
                text = f"recorded, but not sent now: {extra.type} to {extra.to}"
        if text:
            self.difference = Difference(step, text)
            yield f"    ✗ first difference: {text}"


def _mismatch(send: Send, recorded: Sent | None) -> str:
    now = f"{type(send.message).__name__} to {send.to}  {summarize(send.message, 200)}"
    if recorded is None:
        return f"sent now, but not recorded: {now}"
    then = f"{recorded.type} to {recorded.to}"
    if recorded.payload:
        message = Record(SENT, 0, 0, "", "", "", 0, recorded.type, "", "", 0, 0, recorded.payload).message
        then += f"  {summarize(message, 200)}"
    return f"sent now: {now}\n        recorded: {then}"


def _describe(effect: Effect) -> str:
    match effect:
        case Send(to, message):
            return f"→ {to}  {type(message).__name__}  {summarize(message)}".rstrip()
        case StartTimer(key, delay_ms, message):
            return f"timer {'/'.join(map(str, key))} in {delay_ms:.0f} ms: {type(message).__name__}"
        case StopTimer(key):
            return f"no timer {'/'.join(map(str, key))}"
        case Run(job):
            return f"job {type(job).__name__}"
        case Note(level, event, fields):
            return f"note ({level}) {event} {' '.join(f'{name}={value}' for name, value in fields)}".rstrip()
        case Fail(reason, fatal):
            return f"FAIL{' for good' if fatal else ''}: {reason}"


def replay_text(trace_dir: Path, address: str, *, until: int = 0, incarnation: int = 0) -> Iterator[str]:
    """Lines of a replay of ``NODE/ACTOR`` (its last life, or ``incarnation``)."""
    yield from Replay(trace_dir, address, incarnation).lines(until)


__all__ = ["SENT", "Difference", "Replay", "replay_text"]
