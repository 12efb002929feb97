"""One request attempt on the target side: its states as a table, and what it knows. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.runtime.machine import TableKey
from actors.transfer.attempts import Attempt, Table
from actors.transfer.jobs import PullJob
from actors.transfer.links import PeerLink
from actors.transfer.restore import Pulls
from actors.transfer.routes import TransferPlan
from messages.handoff import RankLease
from messages.layout import Namespace
from messages.transfer import OpenReceive, PullKVCache

JobKey = tuple[str, int, int]
"""(kind, piece index, source rank) of a read; ``VERIFY_JOB`` for the comparison."""

VERIFY_JOB: JobKey = ("verify", 0, -1)


class ReceiveState(TableKey):
    """Where an attempt stands on this rank."""

    OPENING = "opening"
    OPEN = "open"
    RESTORING = "restoring"
    VERIFYING = "verifying"
    RESTORED = "restored"
    FAILED = "failed"
    DRAINING = "draining"
    FREEING = "freeing"


class ReceiveEvent(TableKey):
    """What can happen to an attempt."""

    LEASED = "leased"
    PULL_ASKED = "pull asked"
    VERIFY_BEGINS = "verify begins"
    COMPLETED = "completed"
    BROKE = "broke"
    RELEASE_ASKED = "release asked"
    DRAINED = "drained"


_S, _E = ReceiveState, ReceiveEvent
TRANSITIONS = Table(
    {
        (_S.OPENING, _E.LEASED): _S.OPEN,
        (_S.OPENING, _E.RELEASE_ASKED): _S.DRAINING,
        (_S.OPEN, _E.PULL_ASKED): _S.RESTORING,
        (_S.OPEN, _E.BROKE): _S.FAILED,
        (_S.OPEN, _E.RELEASE_ASKED): _S.DRAINING,
        (_S.RESTORING, _E.VERIFY_BEGINS): _S.VERIFYING,
        (_S.RESTORING, _E.COMPLETED): _S.RESTORED,
        (_S.RESTORING, _E.BROKE): _S.FAILED,
        (_S.RESTORING, _E.RELEASE_ASKED): _S.DRAINING,
        (_S.VERIFYING, _E.COMPLETED): _S.RESTORED,
        (_S.VERIFYING, _E.BROKE): _S.FAILED,
        (_S.VERIFYING, _E.RELEASE_ASKED): _S.DRAINING,
        (_S.RESTORED, _E.RELEASE_ASKED): _S.FREEING,
        (_S.FAILED, _E.RELEASE_ASKED): _S.DRAINING,
        (_S.DRAINING, _E.DRAINED): _S.FREEING,
    }
)
"""The life of an attempt on one target rank; forgotten from ``restored`` or ``freeing`` once its lease is free."""

RECEIVING = (ReceiveState.OPEN, ReceiveState.RESTORING)
"""States in which arriving shards count."""


Layer = tuple[Namespace, int]


@dataclass
class ArrivingChunk:
    """One pushed chunk, as its sources report it, and how far its merge has come."""

    token_start: int
    token_count: int
    arrived: dict[int, bool] = field(default_factory=dict)  # source rank → whether it lies in a window
    early: dict[Layer, set[int]] = field(default_factory=dict)  # layer → sources whose part lies in a window already
    asked: set[Layer] = field(default_factory=set)  # layers whose merge was asked for
    merging: set[int] = field(default_factory=set)  # merges (by part) that have not ended
    parts: int = 0
    with_draft: bool = True
    push_ms: float = 0.0
    done: bool = False

    def next_part(self, layers: Iterable[Layer]) -> int:
        """Take note that the merge of ``layers`` is asked for; returns its number."""
        self.asked.update(layers)
        part, self.parts = self.parts, self.parts + 1
        self.merging.add(part)
        return part


@dataclass
class Receive:
    """What one target rank knows of one request attempt."""

    opened: OpenReceive
    engine: str
    opened_ns: int
    link: PeerLink
    plan: TransferPlan
    state: ReceiveState = ReceiveState.OPENING
    awaits_grant: bool = False
    lease: RankLease | None = None
    chunks: dict[int, ArrivingChunk] = field(default_factory=dict)
    pull: PullKVCache | None = None
    pulls: Pulls | None = None
    pull_queue: deque[PullJob] = field(default_factory=deque)
    jobs: set[JobKey] = field(default_factory=set)  # reads and verifications under way
    draft_planned: bool = False
    undrained: set[int] = field(default_factory=set)  # source ranks that may still write
    released_to: str = ""  # who waits for ReceiveReleased
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    verified_bytes: int = 0
    pull_began_ns: int = 0
    pull_ended_ns: int = 0
    merge_ms: float = 0.0
    sync_ms: float = 0.0

    @property
    def attempt(self) -> Attempt:
        """(request id, epoch)."""
        return self.opened.request_id, self.opened.epoch

    @property
    def generation(self) -> int:
        """The lease's generation, 0 without one."""
        return self.lease.generation if self.lease else 0

    @property
    def covered(self) -> bool:
        """Whether every computed token arrived in a chunk that is in its final place (PUSH mode)."""
        if self.opened.mode == "PULL" or not self.plan.push_ranks:
            return True
        if self.pull is None:
            return False
        return sum(chunk.token_count for chunk in self.chunks.values() if chunk.done) >= self.pull.computed_tokens

    @property
    def waits_for(self) -> str:
        """What has to happen next, for people."""
        if self.awaits_grant:
            return "staging lease"
        if self.undrained:
            return f"PushDrained of ranks {sorted(self.undrained)}"
        if self.jobs:
            return "reads" if VERIFY_JOB not in self.jobs else "verification"
        waits = {
            ReceiveState.OPEN: "chunks, PullKVCache",
            ReceiveState.RESTORING: "merges" if self.covered else "chunks",
            ReceiveState.FAILED: "ReleaseReceive",
        }
        return waits.get(self.state, "LeaseFreed")

    def window_offset(self, source_rank: int, window_index: int) -> int:
        """Byte of a source's window in the staging region, -1 when it has none."""
        for source in self.lease.sources if self.lease else ():
            if source.source_rank == source_rank:
                return source.windows[window_index].offset_bytes
        return -1

    def advance(self, event: ReceiveEvent) -> None:
        """Move on along the table; raises ``IllegalTransition`` and changes nothing when there is no such pair."""
        self.state = TRANSITIONS.after(self.state, event, f"receive of {self.opened.request_id}")

    def allows(self, event: ReceiveEvent) -> bool:
        """Whether ``event`` is legal now."""
        return TRANSITIONS.allows(self.state, event)
