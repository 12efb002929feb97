"""Requests that did not finish: where each stands, what it waits for, since when, and who should answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from actors.runtime.trace_file import FAULT, HANDLED, SENT, Record, Trace
from messages.base import instance_of, node_of
from scripts.trace_story import CARRIERS, NAMES_REQUEST, is_node_fault

ANSWERS: Final[dict[str, frozenset[str]]] = {
    "SubmitRequest": frozenset({"Generation", "Finished", "Failed"}),
    "AddNewRequest": frozenset({"RequestAccepted", "RequestRefused", "RequestReleased"}),
    "ReserveLeases": frozenset({"LeasesReserved", "LeasesRefused", "ReceiveReleased"}),
    "OpenReceive": frozenset({"ReceiveOpened", "ReceiveRefused", "ReceiveReleased"}),
    "GrantLease": frozenset({"LeaseGranted", "LeaseRefused"}),
    "ExecuteBatch": frozenset({"BatchResult", "StepFailed"}),
    "FirstGeneration": frozenset({"HandoffComplete", "HandoffFailed", "RequestReleased"}),
    "PullKVCache": frozenset({"AllRestored", "Restored", "RestoreFailed", "ReceiveReleased"}),
    "Restore": frozenset({"Merged", "MergeFailed"}),
    "ReleaseRequest": frozenset({"RequestReleased"}),
    "ReleaseReceive": frozenset({"ReceiveReleased"}),
    "AbortPush": frozenset({"PushDrained"}),
    "CancelRequest": frozenset({"Finished", "Failed"}),
}
"""Questions and what answers them: the answer comes from the asked actor back to the asker, for the same request."""

_WORDS: Final = {
    "SubmitRequest": "was submitted; no token yet",
    "AddNewRequest": "is offered to a decode instance",
    "ReserveLeases": "needs staging leases",
    "OpenReceive": "needs its receiving side opened",
    "GrantLease": "needs a staging lease",
    "ExecuteBatch": "is in a step",
    "FirstGeneration": "is handed over",
    "PullKVCache": "is being restored",
    "Restore": "is being merged",
    "ReleaseRequest": "is being released",
    "ReleaseReceive": "drains its writers",
    "AbortPush": "waits for a push to drain",
    "CancelRequest": "is being cancelled",
}
_LAST_KINDS: Final = frozenset({"Finished", "Failed"})


@dataclass
class Question:
    """A message that nobody has answered yet."""

    record: Record
    handled: bool = False
    faults: list[str] = field(default_factory=list)


@dataclass
class Progress:
    """What one request did so far."""

    request_id: str
    first_ns: int
    last: Record
    questions: dict[tuple[str, str, str, int], Question] = field(default_factory=dict)  # (type, asker, asked, step)
    end: str = ""

    def waiting(self) -> list[Question]:
        """Unanswered questions, the most recent (the innermost wait) last."""
        return sorted(self.questions.values(), key=lambda question: question.record.now_ns)


@dataclass(frozen=True)
class Standing:
    """The state of all requests at the end of a trace."""

    open: list[Progress]
    finished_count: int
    end_ns: int
    node_ends: dict[str, int]  # when each node was last heard of
    deaths: dict[str, str]  # node → why we think that it died


def stand(trace: Trace) -> Standing:
    """Read a trace once and say where every request stands."""
    requests: dict[str, Progress] = {}
    ends: dict[str, int] = {}
    faults: list[Record] = []
    end_ns = 0
    for record in trace.records():
        end_ns = max(end_ns, record.now_ns)
        kind = record.kind
        ends[node_of(record.to if kind == HANDLED else record.sender)] = record.now_ns
        if kind == FAULT and not record.message_id:
            faults.append(record)
        if record.trace_id and record.type in NAMES_REQUEST:
            _follow(requests, record, record.trace_id)
            if record.type == "SubmitRequest":
                for request_id in _siblings(record):
                    _follow(requests, record, request_id)
        elif record.type in CARRIERS and kind != FAULT:
            for request_id in _carried(record):
                if request_id in requests:
                    _follow(requests, record, request_id)
    open_ = [progress for progress in requests.values() if not progress.end]
    deaths = _deaths(trace)
    return Standing(open_, len(requests) - len(open_), end_ns, ends, deaths)


def _carried(record: Record) -> list[str]:
    message = record.message
    return [row.request_id for row in getattr(message, "rows", ())]


def _siblings(record: Record) -> list[str]:
    """Other samples that are submitted along with the request that a submission names."""
    return [sibling.request_id for sibling in getattr(record.message, "siblings", ())]


def _follow(requests: dict[str, Progress], record: Record, request_id: str) -> None:
    progress = requests.get(request_id)
    if progress is None:
        progress = requests[request_id] = Progress(request_id, record.now_ns, record)
    kind, name = record.kind, record.type
    if kind == FAULT:
        if name in ANSWERS and not is_node_fault(record):  # it may be all that is known of a dropped message
            key = (name, record.sender, record.to, _step_of(record))
            asked = progress.questions.setdefault(key, Question(record))
            asked.faults.append(record.text)
        return
    progress.last = record
    if kind == SENT and name in ANSWERS:
        key = (name, record.sender, record.to, _step_of(record))
        before = progress.questions.get(key)
        progress.questions[key] = Question(record, faults=before.faults if before is not None else [])
        if name == "SubmitRequest":
            progress.end = ""
    elif kind == HANDLED:
        question = progress.questions.get((name, record.sender, record.to, _step_of(record)))
        if question is not None:
            question.handled = True
        _answer(progress, record)


def _answer(progress: Progress, record: Record) -> None:
    name, sender, to = record.type, record.sender, record.to
    if name in _LAST_KINDS and instance_of(to) == "front":
        progress.end = name
        progress.questions.clear()
        return
    for key in list(progress.questions):
        kind, asker, asked, step = key
        is_about_it = name != "BatchResult" or step == _step_of(record)  # two steps may be in flight
        if name in ANSWERS[kind] and asker == to and (asked == sender or kind == "SubmitRequest") and is_about_it:
            del progress.questions[key]


def _step_of(record: Record) -> int:
    """The step that a message about steps names; 0 for others, and where payloads were not recorded."""
    return getattr(record.message, "step", 0) if record.type in ("ExecuteBatch", "BatchResult") else 0


def _deaths(trace: Trace) -> dict[str, str]:
    """Nodes with a later life: the earlier one died."""
    lives: dict[str, list[int]] = {}
    for file in trace.files:
        lives.setdefault(file.config.node, []).append(file.config.incarnation)
    return {
        node: f"restarted: incarnations {', '.join(map(str, sorted(found)))}"
        for node, found in lives.items()
        if len(found) > 1
    }


def stuck_text(trace_dir: Path) -> str:
    """One paragraph per request that did not finish, oldest first."""
    trace = Trace(trace_dir)
    standing = stand(trace)
    total = len(standing.open) + standing.finished_count
    if not standing.open:
        return f"all {total} requests finished or failed; nothing is stuck"
    lines = [f"{len(standing.open)} of {total} requests did not finish:"]
    for progress in sorted(standing.open, key=lambda progress: progress.first_ns):
        lines += ["", *_describe(progress, standing)]
    lines += [f"(trace damaged: {damage})" for damage in trace.damage()]
    return "\n".join(lines)


def _describe(progress: Progress, standing: Standing) -> list[str]:
    since = (standing.end_ns - progress.last.now_ns) / 1e6
    lines = [
        f"{progress.request_id}: {since:.1f} ms without a message (the last: {progress.last.type} at"
        f" {progress.last.actor})"
    ]
    waiting = progress.waiting()
    if not waiting:
        lines.append("  waits for nobody: everything it asked for was answered; look at the last actor's own queue")
    for question in waiting:
        record = question.record
        age = (standing.end_ns - record.now_ns) / 1e6
        lines.append(
            f"  {_WORDS[record.type]}: {record.sender} sent {record.type} {age:.1f} ms ago;"
            f" {record.to} should answer {' or '.join(sorted(ANSWERS[record.type]))}"
        )
        lines += [f"    fault: {fault}" for fault in question.faults]
        if not question.handled:
            lines.append(f"    {record.to} never handled it" + _about_node(node_of(record.to), standing))
        else:
            lines.append(f"    {record.to} handled it and has not answered" + _about_node(node_of(record.to), standing))
    return lines


def _about_node(node: str, standing: Standing) -> str:
    if node in standing.deaths:
        return f" ({node} was {standing.deaths[node]})"
    if node not in standing.node_ends:
        return f" ({node} wrote no trace)"
    silent = (standing.end_ns - standing.node_ends[node]) / 1e6
    return f" ({node} silent for {silent:.1f} ms)" if silent > 0 else ""
