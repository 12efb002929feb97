"""A request's messages as one self-contained page: lanes per actor, time to scale, payloads, faults and causes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.trace_file import TraceError
from messages import batch, cluster, handoff, lifecycle, timers, transfer
from messages.base import Message, actor_of, node_of
from scripts.trace_path import Segment, critical_path
from scripts.trace_story import Hop, Story, details, load_story

_TEMPLATE = Path(__file__).with_name("trace_page.html")
_GROUPS = {
    name: group
    for module, group in (
        (handoff, "hand-off"),
        (transfer, "caches"),
        (batch, "steps"),
        (cluster, "cluster"),
        (lifecycle, "cluster"),
        (timers, "cluster"),
    )
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Message)
}


def sequence_html(trace_dir: Path, request_id: str) -> str:
    """The page. Needs no network, no server and no other file."""
    story = load_story(trace_dir, request_id)
    data = msgspec.json.encode(page_data(story)).decode()
    # Inside a script element only "</" and "<!--" could end it early; both are still the same JSON when escaped.
    return _TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", data.replace("<", "\\u003c"))


def page_data(story: Story) -> dict[str, Any]:
    """What the page shows, as plain data. Times are ms from the request's first message."""
    actors = story.actors()
    lanes = {actor: number for number, actor in enumerate(actors)}
    begin = story.begin_ns
    handled = {hop.message_id: hop.handled_ns[0] for hop in story.hops if hop.handled_ns}
    hops = [_hop(hop, lanes, begin, handled) for hop in story.hops]
    lost = sum(hop.is_lost for hop in story.hops)
    again = sum(bool(hop.mark) for hop in story.hops)
    faults = sum(len(hop.faults) for hop in story.hops) + len(story.node_faults)
    chips = [
        [f"{(story.end_ns - begin) / 1e6:.1f} ms", ""],
        [f"{len(hops)} messages", ""],
        [f"{len(actors)} actors", ""],
        *([[f"{lost} never handled", "fault"]] if lost else []),
        *([[f"{faults} injected faults", "fault"]] if faults else []),
        *([[f"{again} repeated", "again"]] if again else []),
        *([[damage, "fault"] for damage in story.damage]),
    ]
    return {
        "request": story.request_id,
        "chips": chips,
        "end": (story.end_ns - begin) / 1e6,
        "told": (_told_ns(story) - begin) / 1e6,
        "lanes": [{"name": actor, "node": node_of(actor), "actor": actor_of(actor)} for actor in actors],
        "hops": hops,
        "node_faults": [
            {
                "at": (record.now_ns - begin) / 1e6,
                "text": record.text.partition(": ")[2] or record.text,
            }
            for record in story.node_faults
        ],
        "paths": _paths(story),
    }


def _told_ns(story: Story) -> int:
    """When the client had its last word: what comes later is cleaning up."""
    words = [hop.handled_ns[0] for hop in story.of("Generation", "Finished", "Failed") if hop.handled_ns]
    return max(words, default=story.end_ns)


def _hop(hop: Hop, lanes: dict[str, int], begin: int, handled: dict[str, int]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": hop.message_id,
        "parent": hop.parent_id,
        "type": hop.type,
        "group": _GROUPS.get(hop.type, "request"),
        "from": lanes[hop.sender],
        "to": lanes[hop.to],
        "sent": (hop.sent_ns - begin) / 1e6,
        "handled": [(when - begin) / 1e6 for when in hop.handled_ns],
        "epoch": hop.epoch,
        "bytes": hop.size_bytes,
        "internal": hop.is_internal,
        "lost": hop.is_lost,
        "again": bool(hop.mark),
        "faults": hop.faults,
        "notes": hop.notes(),
        "payload": details(hop.message),
    }
    if hop.is_internal and hop.parent_id in handled:
        entry["job_start"] = (handled[hop.parent_id] - begin) / 1e6
    return entry


def _paths(story: Story) -> list[dict[str, Any]]:
    try:
        path = critical_path(story)
    except TraceError:
        return []

    def plain(segments: tuple[Segment, ...]) -> list[dict[str, Any]]:
        return [
            {
                "phase": segment.phase,
                "ms": segment.ms,
                "begin": (segment.begin_ns - story.begin_ns) / 1e6,
                "about": segment.about,
            }
            for segment in segments
        ]

    return [
        {"title": title, "segments": plain(segments)}
        for title, segments in (("first token", path.to_first_token), ("last token", path.to_last_token))
        if segments
    ]
