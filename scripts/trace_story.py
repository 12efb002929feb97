"""One request's messages, put together from the traces of all nodes: what every view of a request starts from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from actors.runtime.fault_plan import POINT_ACTIONS
from actors.runtime.trace_file import FAULT, HANDLED, SENT, Record, Trace, TraceError
from messages.base import Message, actor_of, node_of
from messages.envelope import MESSAGE_TYPES

CARRIERS = frozenset({"ExecuteBatch", "BatchResult", "ClientSubmit", "StepFailed"})
"""Messages that are about several requests: they belong to a request when they carry its id inside."""

NAMES_REQUEST = frozenset(kind.__name__ for kind in MESSAGE_TYPES if "request_id" in kind.__struct_fields__)
"""Messages that are about the request they name. Others inherit a request from what caused them, and are not."""

_ROLE_ORDER = ("http", "gateway", "registry", "scheduler", "engine", "worker", "transfer", "staging", "supervisor")


@dataclass(slots=True)
class Hop:
    """One message from one actor to another. Times are ns on the host's monotonic clock, 0 when unknown."""

    message_id: str
    type: str
    sender: str
    to: str
    sent_ns: int
    parent_id: str
    epoch: int
    incarnation: int
    size_bytes: int = 0
    payload: bytes = b""
    handled_ns: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    mark: str = ""  # "again", "new attempt", "offered again"

    @property
    def is_internal(self) -> bool:
        """From an actor to itself: a timer that was due, or the result of a job."""
        return self.sender == self.to

    @property
    def is_lost(self) -> bool:
        """Nobody handled it (as far as the trace goes)."""
        return not self.handled_ns

    @property
    def took_ms(self) -> float:
        """From sent to handled, mailbox included; 0 when it was lost."""
        return (self.handled_ns[0] - self.sent_ns) / 1e6 if self.handled_ns else 0.0

    @property
    def message(self) -> Message | None:
        """The message itself, None when payloads were not recorded."""
        return Record(SENT, 0, 0, "", "", "", 0, self.type, "", "", 0, 0, self.payload).message

    def notes(self) -> list[str]:
        """What a person should notice: faults, loss, repetition."""
        notes = list(self.faults)
        if self.mark:
            notes.append(self.mark)
        if self.is_lost:
            notes.append("never handled")
        elif len(self.handled_ns) > 1:
            notes.append(f"handled {len(self.handled_ns)} times")
        return notes


@dataclass
class Story:
    """A request's hops in the order in which they were sent, and the node faults that happened meanwhile."""

    request_id: str
    hops: list[Hop]
    node_faults: list[Record] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @property
    def begin_ns(self) -> int:
        """When its first message was sent."""
        return self.hops[0].sent_ns

    @property
    def end_ns(self) -> int:
        """When the last thing was sent or handled."""
        return max(max(hop.handled_ns, default=hop.sent_ns) for hop in self.hops)

    def of(self, *types: str) -> Iterator[Hop]:
        """Its hops of these message types, in order."""
        return (hop for hop in self.hops if hop.type in types)

    def actors(self) -> list[str]:
        """Every actor that takes part, in the order in which a request meets them."""
        names = dict.fromkeys(name for hop in self.hops for name in (hop.sender, hop.to))
        firsts = {name: index for index, name in enumerate(names)}
        instances = dict.fromkeys(node_of(name).partition(".")[0] for name in names)
        order = {instance: index for index, instance in enumerate(instances)}

        def key(name: str) -> tuple[int, str, int, int]:
            node, role = node_of(name), actor_of(name)
            position = _ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER)
            return order[node.partition(".")[0]], node, position, firsts[name]

        return sorted(names, key=key)


def load_story(directory: Path, request_id: str) -> Story:
    """Everything about ``request_id`` (or the one id that begins so) in the traces of ``directory``.

    Raises ``TraceError`` when there is no such request, naming some that there are.
    """
    trace = Trace(directory)
    story = _collect(trace, request_id)
    if not story.hops:
        full = _resolve(trace, request_id)
        story = _collect(trace, full)
    return story


def request_ids(trace: Trace) -> dict[str, int]:
    """Every request in a trace, with the time of its first record."""
    found: dict[str, int] = {}
    for record in trace.records(lambda record: record.trace_id != "" and record.type in NAMES_REQUEST):
        if record.trace_id not in found:
            found[record.trace_id] = record.now_ns
    return found


def _resolve(trace: Trace, prefix: str) -> str:
    known = request_ids(trace)
    fitting = [name for name in known if name.startswith(prefix)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise TraceError(f"{prefix!r} begins {len(fitting)} requests: {', '.join(fitting[:8])}; name one of them")
    shown = ", ".join(list(known)[:8]) or "none at all"
    raise TraceError(f"no request {prefix!r} in {trace.directory}; there are {len(known)}, for example: {shown}")


def _collect(trace: Trace, request_id: str) -> Story:
    needle = request_id.encode()

    def keep(record: Record) -> bool:
        if record.trace_id == request_id and record.type in NAMES_REQUEST:
            return True  # a fault at one of its messages, too
        if record.kind == FAULT:
            return is_node_fault(record)
        is_carrier = record.type in CARRIERS or record.type == "SubmitRequest"
        return is_carrier and needle in record.payload and _carries(record, request_id)

    hops: dict[str, Hop] = {}
    node_faults: list[Record] = []
    for record in trace.records(keep):
        if record.kind == FAULT and is_node_fault(record):
            node_faults.append(record)
            continue
        hop = hops.get(record.message_id)
        if hop is None:
            hop = hops[record.message_id] = Hop(
                message_id=record.message_id,
                type=record.type,
                sender=record.sender,
                to=record.to,
                sent_ns=record.sent_ns,
                parent_id=record.parent_id,
                epoch=record.epoch,
                incarnation=record.incarnation,
            )
        if record.kind == SENT:
            hop.size_bytes = max(hop.size_bytes, record.size_bytes)
            hop.payload = record.payload or hop.payload
        elif record.kind == HANDLED:
            hop.handled_ns.append(record.now_ns)
            hop.payload = record.payload or hop.payload
        else:
            hop.faults.append(record.text)
    ordered = sorted(hops.values(), key=lambda hop: hop.sent_ns)
    _mark_repetitions(ordered)
    story = Story(request_id, ordered, [], trace.damage())
    if ordered:
        begin, end = story.begin_ns, story.end_ns
        story.node_faults = [record for record in node_faults if begin <= record.now_ns <= end]
    return story


def is_node_fault(record: Record) -> bool:
    """Whether a fault struck a whole node (and not the message at which it did)."""
    if record.kind != FAULT:
        return False
    return not record.message_id or record.text.partition(": ")[2].partition(" ")[0] in POINT_ACTIONS


def _carries(record: Record, request_id: str) -> bool:
    """Whether a message about several requests is about this one (its bytes may only look so: ``r1`` in ``r12``)."""
    message = record.message
    if message is None:
        return False
    for name in ("rows", "opened", "samples", "siblings"):
        if any(part.request_id == request_id for part in getattr(message, name, ())):
            return True
    return request_id in getattr(message, "closed", ())


def _mark_repetitions(hops: list[Hop]) -> None:
    seen: dict[tuple[str, str, str, int], bytes] = {}
    attempts: dict[str, int] = {}
    for hop in hops:
        if hop.is_internal or hop.type in CARRIERS:
            continue
        if hop.type in ("SubmitRequest", "AddNewRequest"):
            before = attempts.get(hop.type, -1)
            if before >= 0 and hop.epoch > before:
                hop.mark = "new attempt" if hop.type == "SubmitRequest" else "offered again"
            attempts[hop.type] = max(before, hop.epoch)
        key = (hop.type, hop.sender, hop.to, hop.epoch)
        if hop.payload and seen.get(key) == hop.payload:
            hop.mark = "again"
        seen[key] = hop.payload


def summarize(message: Message | None, width: int = 64) -> str:
    """The telling fields of a message in a few words."""
    if message is None:
        return ""
    parts: list[str] = []
    for name in message.__struct_fields__:
        if name in ("request_id", "epoch", "reply_to", "sampling"):
            continue
        text = _short(name, getattr(message, name))
        if text:
            parts.append(text)
    line = " ".join(parts)
    return line if len(line) <= width else line[: width - 1] + "…"


def _short(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else ""
    if isinstance(value, float):
        return f"{name}={value:.4g}" if value else ""
    if isinstance(value, int):
        return f"{name}={value}"
    if isinstance(value, str):
        return f"{name}={value}" if value and len(value) < 80 else ""
    if isinstance(value, bytes):
        return f"{name}[{len(value)} B]" if value else ""
    if isinstance(value, tuple):
        if not value:
            return ""
        simple = all(isinstance(item, int) for item in value)
        return f"{name}={','.join(map(str, value))}" if simple and len(value) <= 4 else f"{name}[{len(value)}]"
    return ""


def details(message: Message | None) -> object:
    """A message as plain data for display: long byte strings and lists shortened."""
    return None if message is None else _plain(msgspec.to_builtins(message))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        shown = [_plain(item) for item in value[:24]]
        return [*shown, f"… {len(value) - 24} more"] if len(value) > 24 else shown
    if isinstance(value, str) and len(value) > 200:
        return f"{value[:60]}… ({len(value)} characters)"
    return value
