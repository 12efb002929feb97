"""A trace as Chrome/Perfetto JSON: one process per node, one track per actor, arrows from cause to effect.

A message's handling is a slice from the time it began to the last thing that it sent; what an actor's jobs do (forward
passes, copies) is on a second track per actor, from the message that asked for the job to the job's result.
Open the file at https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from actors.runtime.trace_file import FAULT, HANDLED, SENT, Record, Trace
from messages.base import actor_of, node_of

SLICE_US_MIN: Final = 0.5
ASKED_MAX: Final = 100_000
"""Messages whose jobs may still end: so many are remembered, the newest."""
_encode = msgspec.json.Encoder().encode


class _Tracks:
    """Numbers for nodes and actors, and the metadata events that name them."""

    def __init__(self) -> None:
        self._nodes: dict[str, int] = {}
        self._actors: dict[tuple[str, str], int] = {}
        self.named: list[dict[str, Any]] = []

    def of(self, address: str, suffix: str = "") -> tuple[int, int]:
        """(process, thread) of an actor's track."""
        key = (address, suffix)
        thread = self._actors.get(key)
        node = node_of(address)
        process = self._nodes.get(node)
        if process is None:
            process = self._nodes[node] = len(self._nodes) + 1
            self._name("process_name", process, 0, node)
        if thread is None:
            thread = self._actors[key] = len(self._actors) + 1
            self._name("thread_name", process, thread, actor_of(address) + suffix)
        return process, thread

    def _name(self, kind: str, process: int, thread: int, name: str) -> None:
        self.named.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})


class _Open:
    """The message that an actor is handling."""

    __slots__ = ("begin_us", "end_us", "record")

    def __init__(self, record: Record, begin_us: float) -> None:
        self.record = record
        self.begin_us = begin_us
        self.end_us = begin_us + SLICE_US_MIN


def events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Trace events in about the order of time."""
    tracks = _Tracks()
    flows: dict[str, int] = {}
    asked: dict[str, float] = {}
    handling: dict[str, _Open] = {}
    flow_count = 0
    for record in trace.records():
        now_us = record.now_ns / 1e3
        if record.kind == SENT:
            current = handling.get(record.sender)
            if current is not None and current.record.message_id == record.parent_id:
                current.end_us = max(current.end_us, now_us + SLICE_US_MIN / 2)
            process, thread = tracks.of(record.sender)
            if record.sender != record.to:
                flow_count += 1
                flows[record.message_id] = flow_count
                yield _flow("s", flow_count, record, process, thread, now_us)
        elif record.kind == HANDLED:
            previous = handling.pop(record.to, None)
            if previous is not None:
                yield _slice(tracks, previous, asked)
            asked[record.message_id] = now_us
            if len(asked) > ASKED_MAX:
                for old in list(islice(asked, ASKED_MAX // 2)):
                    del asked[old]
            handling[record.to] = _Open(record, now_us)
            number = flows.pop(record.message_id, 0)
            if number:
                process, thread = tracks.of(record.to)
                yield _flow("f", number, record, process, thread, now_us)
            if record.sender == record.to and record.parent_id in asked:
                yield _job(tracks, record, asked[record.parent_id], now_us)
        elif record.kind == FAULT:
            process, thread = tracks.of(record.sender or f"{trace.files[0].config.node}/faults")
            yield {
                "ph": "i",
                "s": "g",
                "name": record.text,
                "cat": "fault",
                "pid": process,
                "tid": thread,
                "ts": now_us,
            }
    for left in handling.values():
        yield _slice(tracks, left, asked)
    yield from tracks.named


def _slice(tracks: _Tracks, open_: _Open, asked: dict[str, float]) -> dict[str, Any]:
    record = open_.record
    process, thread = tracks.of(record.to)
    return {
        "ph": "X",
        "name": record.type,
        "cat": "message",
        "pid": process,
        "tid": thread,
        "ts": open_.begin_us,
        "dur": open_.end_us - open_.begin_us,
        "args": {
            "from": record.sender,
            "request": record.trace_id,
            "epoch": record.epoch,
            "id": record.message_id,
            "waited_us": (record.now_ns - record.sent_ns) / 1e3,
        },
    }


def _job(tracks: _Tracks, record: Record, begin_us: float, end_us: float) -> dict[str, Any]:
    process, thread = tracks.of(record.to, " jobs")
    return {
        "ph": "X",
        "name": record.type,
        "cat": "job",
        "pid": process,
        "tid": thread,
        "ts": begin_us,
        "dur": max(SLICE_US_MIN, end_us - begin_us),
        "args": {"request": record.trace_id, "epoch": record.epoch},
    }


def _flow(phase: str, number: int, record: Record, process: int, thread: int, ts: float) -> dict[str, Any]:
    event = {
        "ph": phase,
        "id": number,
        "name": record.type,
        "cat": "cause",
        "pid": process,
        "tid": thread,
        "ts": ts,
    }
    if phase == "f":
        event["bp"] = "e"
    return event


def write_perfetto(trace_dir: Path, target: BinaryIO) -> int:
    """Write the JSON to ``target``, streaming; returns how many events it holds."""
    count = 0
    target.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    pieces: list[bytes] = []
    for event in events(Trace(trace_dir)):
        pieces.append(_encode(event))
        count += 1
        if len(pieces) == 4096:
            target.write(b",\n".join(pieces) + b",\n")
            pieces.clear()
    pieces.append(_encode({"ph": "M", "name": "trace_name", "pid": 0, "tid": 0, "args": {"name": str(trace_dir)}}))
    target.write(b",\n".join(pieces) + b"\n]}\n")
    return count
