"""Find messages in a trace by type, actor, request, time or words inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from actors.runtime.trace_file import FAULT, SENT, Record, Trace
from scripts.trace_story import summarize

_KINDS = {SENT: "sent", FAULT: "fault"}


def grep(
    trace_dir: Path,
    *,
    types: tuple[str, ...] = (),
    actor: str = "",
    request: str = "",
    after_ms: float | None = None,
    before_ms: float | None = None,
    text: str = "",
    limit: int = 0,
) -> Iterator[str]:
    """Lines of matching records, streaming, merged by time. ``types``, ``actor`` and ``request`` are patterns; times
    are ms from the trace's first record; ``text`` must occur in the encoded message. ``limit`` 0: all."""
    trace = Trace(trace_dir)
    first = next(trace.records(), None)
    if first is None:
        return
    begin_ns = first.now_ns
    keep = _filter(types, actor, request, text)
    from_ns = begin_ns + int((after_ms or 0.0) * 1e6)
    until_ns = begin_ns + int(before_ms * 1e6) if before_ms is not None else 1 << 62
    count = 0
    for record in trace.records(keep):
        if record.now_ns < from_ns:
            continue
        if record.now_ns > until_ns:
            break
        yield _line(record, begin_ns)
        count += 1
        if count == limit:
            yield f"… stopped at {limit} lines (--limit)"
            return
    yield from (f"(trace damaged: {damage})" for damage in trace.damage())


def _pattern(pattern: str) -> Callable[[str], bool]:
    if any(character in pattern for character in "*?["):
        return lambda name: fnmatchcase(name, pattern)
    return pattern.__eq__


def _filter(types: tuple[str, ...], actor: str, request: str, text: str) -> Callable[[Record], bool]:
    tests: list[Callable[[Record], bool]] = []
    if types:
        by_type = [_pattern(name) for name in types]
        tests.append(lambda record: any(test(record.type) for test in by_type))
    if actor:
        by_actor = _pattern(actor)
        tests.append(lambda record: by_actor(record.sender) or by_actor(record.to))
    if request:
        by_request = _pattern(request)
        tests.append(lambda record: by_request(record.trace_id))
    if text:
        needle = text.encode()
        tests.append(lambda record: needle in record.payload)
    if len(tests) == 1:
        return tests[0]
    return lambda record: all(test(record) for test in tests)


def _line(record: Record, begin_ns: int) -> str:
    when = (record.now_ns - begin_ns) / 1e6
    kind = _KINDS.get(record.kind, "handled")
    if record.kind == FAULT:
        return f"{when:>12.3f} fault    {record.text}  {record.type} {record.sender} → {record.to}".rstrip(" →")
    about = summarize(record.message)
    return (
        f"{when:>12.3f} {kind:<8} {record.sender} → {record.to}  {record.type}"
        f"  {record.trace_id or '-'}  {record.message_id}  {about}"
    ).rstrip()
