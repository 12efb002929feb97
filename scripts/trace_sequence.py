"""A request's message sequence as text for a terminal, and as a Mermaid diagram for documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from actors.runtime.trace_file import Record
from scripts.trace_story import Hop, Story, load_story, summarize

MERMAID_HOPS_MAX = 400
STEP_TYPES = frozenset({"ExecuteBatch", "BatchResult", "Generation"})
STEPS_SHOWN = 6
"""Of a long run of uneventful steps, so many messages are shown at its beginning and at its end."""


def sequence_text(trace_dir: Path, request_id: str, *, internal: bool = False, steps: bool = False) -> str:
    """One line per message: when, from whom to whom, what, how long it took, what to notice.

    ``internal`` also shows timers and job results, which an actor sends to itself; ``steps`` every step of a long
    uneventful decode, of which otherwise only the first and last messages appear.
    """
    story = load_story(trace_dir, request_id)
    hops = [hop for hop in story.hops if internal or not hop.is_internal]
    actors = story.actors()
    lost = sum(hop.is_lost for hop in hops)
    header = (
        f"request {story.request_id}: {len(hops)} messages between {len(actors)} actors"
        f" in {(story.end_ns - story.begin_ns) / 1e6:.1f} ms"
    )
    if lost:
        header += f", {lost} never handled"
    from_width = max(len(hop.sender) for hop in story.hops)
    to_width = max(len(hop.to) for hop in story.hops)
    type_width = max(len(hop.type) for hop in story.hops)
    lines = [header, ""]
    lines.append(f"{'ms':>10}  {'from':<{from_width}}   {'to':<{to_width}}  {'message':<{type_width}}  {'took':>8}")
    faults = [(record.now_ns, f"!! {record.text}{_place(record)}") for record in story.node_faults]
    for hop, hidden in [(hop, 0) for hop in hops] if steps else _without_long_runs(hops):
        if hidden:
            lines.append(f"{'…':>10}  {hidden} messages of decode steps (--steps shows them)")
            continue
        while faults and faults[0][0] <= hop.sent_ns:
            lines.append(f"{(faults[0][0] - story.begin_ns) / 1e6:>10.3f}  {faults.pop(0)[1]}")
        lines.append(_line(story, hop, from_width, to_width, type_width))
    lines += [f"{(when - story.begin_ns) / 1e6:>10.3f}  {text}" for when, text in faults]
    lines += [f"(trace damaged: {damage})" for damage in story.damage]
    return "\n".join(lines)


def _place(record: Record) -> str:
    return f" at {record.type} {record.sender} → {record.to}" if record.message_id else ""


def _without_long_runs(hops: Sequence[Hop]) -> list[tuple[Hop, int]]:
    """(hop, 0) for every hop to show; (hop, count) where ``count`` uneventful step messages are left out."""
    shown: list[tuple[Hop, int]] = []
    for uneventful, group in groupby(hops, key=lambda hop: hop.type in STEP_TYPES and not hop.notes()):
        run = list(group)
        hidden = len(run) - 2 * STEPS_SHOWN
        if not uneventful or hidden <= 1:
            shown += [(hop, 0) for hop in run]
            continue
        shown += [(hop, 0) for hop in run[:STEPS_SHOWN]]
        shown.append((run[STEPS_SHOWN], hidden))
        shown += [(hop, 0) for hop in run[-STEPS_SHOWN:]]
    return shown


def _line(story: Story, hop: Hop, from_width: int, to_width: int, type_width: int) -> str:
    when = (hop.sent_ns - story.begin_ns) / 1e6
    took = f"{hop.took_ms:8.3f}" if hop.handled_ns else "    lost"
    arrow = "↺" if hop.is_internal else "→"
    line = f"{when:>10.3f}  {hop.sender:<{from_width}} {arrow} {hop.to:<{to_width}}  {hop.type:<{type_width}}  {took}"
    notes = hop.notes()
    about = summarize(hop.message)
    if about:
        line += f"  {about}"
    if notes:
        line += f"  [{'; '.join(notes)}]"
    return line.rstrip()


def sequence_mermaid(trace_dir: Path, request_id: str) -> str:
    """A Mermaid ``sequenceDiagram`` of the request, without timers and job results."""
    story = load_story(trace_dir, request_id)
    hops = [hop for hop in story.hops if not hop.is_internal]
    names = {actor: f"a{number}" for number, actor in enumerate(story.actors())}
    shown = {name for hop in hops for name in (hop.sender, hop.to)}
    lines = ["sequenceDiagram"]
    lines += [f"    participant {names[actor]} as {actor}" for actor in story.actors() if actor in shown]
    for hop in hops[:MERMAID_HOPS_MAX]:
        arrow = "--x" if hop.is_lost else "->>"
        when = (hop.sent_ns - story.begin_ns) / 1e6
        lines.append(f"    {names[hop.sender]}{arrow}{names[hop.to]}: {hop.type} ({when:.2f} ms)")
        notes = hop.notes()
        if notes:
            lines.append(f"    Note over {names[hop.to]}: {'; '.join(notes).replace(':', ' -')}")
    if len(hops) > MERMAID_HOPS_MAX:
        lines.append(f"    Note over {names[hops[0].sender]}: {len(hops) - MERMAID_HOPS_MAX} more messages")
    return "\n".join(lines)
