"""The critical path of a request: which waits made up the time to its first and to its last token.

The time from arrival to the last token is cut at the moments at which the request passed from one wait to the next, as
its messages tell; so the parts always add up to the whole. The names are those of the ``[PD-PERF]`` line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from actors.runtime.trace_file import TraceError
from messages.base import attempt_of, control_address, instance_of
from messages.transfer import Merged
from scripts.trace_story import Hop, Story, load_story


@dataclass(frozen=True)
class Segment:
    """One wait: the request spent ``[begin_ns, end_ns]`` in ``phase``."""

    phase: str
    begin_ns: int
    end_ns: int
    about: str

    @property
    def ms(self) -> float:
        """How long it took."""
        return (self.end_ns - self.begin_ns) / 1e6


@dataclass(frozen=True)
class CriticalPath:
    """The waits up to the first token's delivery, and up to the last word's."""

    to_first_token: tuple[Segment, ...]
    to_last_token: tuple[Segment, ...]


class _Cutter:
    """Collects segments; a moment that is unknown or earlier than the last one makes none."""

    def __init__(self, begin_ns: int) -> None:
        self.now_ns = begin_ns
        self.segments: list[Segment] = []

    def until(self, when_ns: int | None, phase: str, about: str) -> None:
        """The request was in ``phase`` from the last moment until ``when_ns``."""
        if when_ns is not None and when_ns > self.now_ns:
            self.segments.append(Segment(phase, self.now_ns, when_ns, about))
            self.now_ns = when_ns

    def fork(self) -> _Cutter:
        """Another path that begins with the same segments."""
        other = _Cutter(self.now_ns)
        other.segments = list(self.segments)
        return other


def _sent(hop: Hop | None) -> int | None:
    return hop.sent_ns if hop is not None else None


def _handled(hop: Hop | None) -> int | None:
    return hop.handled_ns[0] if hop is not None and hop.handled_ns else None


def critical_path(story: Story) -> CriticalPath:
    """The waits of the attempt that ended well (or the last one). Raises ``TraceError`` when nothing was submitted."""
    submits = list(story.of("SubmitRequest"))
    if not submits:
        raise TraceError(f"request {story.request_id} was never submitted to an instance (as far as the trace goes)")
    ends = [hop for hop in story.of("Finished", "Failed") if hop.handled_ns]
    attempt = attempt_of(ends[-1].epoch) if ends else attempt_of(submits[-1].epoch)
    submit = next((hop for hop in submits if attempt_of(hop.epoch) == attempt), submits[-1])
    hops = [hop for hop in story.hops if hop.sent_ns >= submit.sent_ns]

    def first(test: Callable[[Hop], bool]) -> Hop | None:
        return next((hop for hop in hops if test(hop)), None)

    def last(test: Callable[[Hop], bool]) -> Hop | None:
        return next((hop for hop in reversed(hops) if test(hop)), None)

    source = instance_of(submit.to)
    taken = last(lambda hop: hop.type == "RequestAccepted" and hop.handled_ns != [])
    target = instance_of(taken.sender) if taken is not None else source
    token = first(lambda hop: hop.type == "Generation" and instance_of(hop.sender) == source and hop.handled_ns != [])
    sampled = _sent(token)
    accepted = last(
        lambda hop: (
            hop.type == "RequestAccepted" and hop.handled_ns != [] and (sampled is None or hop.handled_ns[0] <= sampled)
        )
    )

    cut = _Cutter(_arrival(story))
    if submit is not submits[0]:
        cut.until(submit.sent_ns, "earlier attempts", f"{attempt_of(submit.epoch)} attempts before this one")
    cut.until(submit.sent_ns, "gateway", "front/gateway chose an instance")
    cut.until(_handled(submit), "submit", f"to {submit.to}")
    offer = first(lambda hop: hop.type == "AddNewRequest")
    cut.until(_sent(offer), "queue", f"{source}: until it was offered")
    if accepted is not None:
        cut.until(_handled(accepted), "allocation", f"blocks, slot and leases on {instance_of(accepted.sender)}")
    step = first(lambda hop: hop.type == "ExecuteBatch" and instance_of(hop.to) == source)
    cut.until(_sent(step), "queue", f"{source}: until its first step")
    result = last(
        lambda hop: (
            hop.type == "BatchResult"
            and hop.to == submit.to
            and (sampled is None or (hop.handled_ns != [] and hop.handled_ns[0] <= sampled))
        )
    )
    cut.until(_handled(result), "prefill", f"{source}: steps of its prompt")
    to_first = cut.fork()
    to_first.until(_handled(token), "response", "first token to the gateway")
    if taken is not accepted:
        cut.until(_handled(taken), "offered again", f"the hand-off failed; {target} took it over")
    final = last(lambda hop: hop.type in ("Finished", "Generation") and hop.handled_ns != [])
    # A step that was sent ahead may have run the request once more, in vain.
    ended_ns = final.sent_ns if final is not None else story.end_ns
    decoded = last(
        lambda hop: (
            hop.type == "BatchResult"
            and hop.to == control_address(target, "scheduler")
            and hop.handled_ns != []
            and hop.handled_ns[0] <= ended_ns
        )
    )
    if target != source:
        _cut_handoff(cut, first, last, target)
    if target != source or result is not None:
        cut.until(_handled(decoded), "decode", f"{target}: decode steps")
    cut.until(_handled(final), "response", "last word to the gateway")
    return CriticalPath(tuple(to_first.segments), tuple(cut.segments))


def _arrival(story: Story) -> int:
    client = next(story.of("ClientSubmit"), None)
    return client.sent_ns if client is not None else story.begin_ns


Finder = Callable[[Callable[[Hop], bool]], "Hop | None"]


def _cut_handoff(cut: _Cutter, first: Finder, last: Finder, target: str) -> None:
    """From the sampled first token to the first decode step on ``target``."""
    generation = last(lambda hop: hop.type == "FirstGeneration")
    cut.until(_handled(generation), "FirstGeneration", f"to {target}")
    begin = _handled(generation) or cut.now_ns
    chunk = last(lambda hop: hop.type == "ChunkArrived" and instance_of(hop.to) == target)
    cut.until(_handled(chunk), "push", "the last chunk, after the prefill had ended")
    pulled = last(lambda hop: hop.type == "PullDone" and instance_of(hop.to) == target)
    cut.until(_handled(pulled), "pull", "recurrent state and draft cache")
    merged = last(lambda hop: hop.type == "Merged" and hop.handled_ns != [] and instance_of(hop.to) == target)
    if merged is not None and (merged.handled_ns[0] > begin):
        message = merged.message
        sync_ns = int(message.sync_ms * 1e6) if isinstance(message, Merged) else 0
        cut.until(merged.handled_ns[0] - sync_ns, "merge", "the last pieces into their final places")
        cut.until(merged.handled_ns[0], "sync", "device synchronised")
    restored = last(lambda hop: hop.type == "AllRestored" and instance_of(hop.to) == target)
    cut.until(_handled(restored), "restored", "all ranks reported")
    step = first(lambda hop: hop.type == "ExecuteBatch" and instance_of(hop.to) == target)
    cut.until(_sent(step), "enqueue", f"{target}: until its first decode step")


def path_text(trace_dir: Path, request_id: str) -> str:
    """The critical path as a table with ms, percent and a bar."""
    story = load_story(trace_dir, request_id)
    path = critical_path(story)
    lines = [f"request {story.request_id}"]
    for title, segments in (("first token", path.to_first_token), ("last token", path.to_last_token)):
        total = sum(segment.ms for segment in segments)
        lines += ["", f"arrival → {title}: {total:.3f} ms"]
        for segment in segments:
            share = segment.ms / total if total else 0.0
            bar = "█" * round(share * 30)
            lines.append(f"  {segment.phase:<16} {segment.ms:>10.3f} ms {share:>6.1%}  {bar:<30}  {segment.about}")
    return "\n".join(line.rstrip() for line in lines)
