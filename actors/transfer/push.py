"""One request attempt on the source side: its states as a table, and what it knows. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.runtime.machine import TableKey
from actors.transfer.attempts import Attempt, Table
from actors.transfer.links import PeerLink
from actors.transfer.routes import Route, TransferPlan
from messages.layout import Namespace
from messages.transfer import OpenPush

Layer = tuple[Namespace, int]


class PushState(TableKey):
    """Where a push stands."""

    OPEN = "open"
    STOPPED = "stopped"
    CLOSING = "closing"


class PushEvent(TableKey):
    """What can happen to a push."""

    WRITE_FAILED = "write failed"
    ABORTED = "aborted"
    CLOSED = "closed"
    PEER_LOST = "peer lost"


TRANSITIONS = Table(
    {
        (PushState.OPEN, PushEvent.WRITE_FAILED): PushState.STOPPED,
        (PushState.OPEN, PushEvent.ABORTED): PushState.STOPPED,
        (PushState.OPEN, PushEvent.CLOSED): PushState.CLOSING,
        (PushState.OPEN, PushEvent.PEER_LOST): PushState.CLOSING,
        (PushState.STOPPED, PushEvent.WRITE_FAILED): PushState.STOPPED,
        (PushState.STOPPED, PushEvent.ABORTED): PushState.STOPPED,
        (PushState.STOPPED, PushEvent.CLOSED): PushState.CLOSING,
        (PushState.STOPPED, PushEvent.PEER_LOST): PushState.CLOSING,
        (PushState.CLOSING, PushEvent.WRITE_FAILED): PushState.CLOSING,
        (PushState.CLOSING, PushEvent.ABORTED): PushState.CLOSING,
        (PushState.CLOSING, PushEvent.CLOSED): PushState.CLOSING,
        (PushState.CLOSING, PushEvent.PEER_LOST): PushState.CLOSING,
    }
)
"""The life of a push; one that is closing is forgotten with its last write."""


@dataclass
class Chunk:
    """One chunk on one lane."""

    token_start: int
    token_count: int
    ready: list[Layer] = field(default_factory=list)  # computed, not yet being written
    seen: set[Layer] = field(default_factory=set)
    parts: int = 0  # write jobs begun
    in_flight: dict[int, tuple[Layer, ...]] = field(default_factory=dict)  # part → layers being written
    closed: bool = False  # the worker's last layer of this chunk was seen
    with_draft: bool = False  # … and it was a draft layer
    arrived: bool = False
    bytes_written: int = 0
    write_ms: float = 0.0


@dataclass
class Lane:
    """What one push sends to one target rank."""

    target_rank: int
    plan: TransferPlan
    generation: int
    windows: tuple[int, ...]  # offsets in the target's staging region; empty when every route is in place
    routes: tuple[Route, ...]  # of KEY and VALUE from this rank
    layers: frozenset[Layer]  # that these routes belong to
    chunks: dict[int, Chunk] = field(default_factory=dict)  # numbered 0, 1, 2 … on each lane, as windows are used
    numbers: dict[int, int] = field(default_factory=dict)  # the worker's chunk index → ours
    merged: set[int] = field(default_factory=set)
    in_flight: int = 0
    abort_asked_by: str = ""

    @property
    def token_bytes(self) -> int:
        """Bytes per token from this rank to that target."""
        return sum(route.row_bytes for route in self.routes)

    def may_write(self, chunk_index: int) -> bool:
        """Whether the chunk's window is free."""
        count = len(self.windows)
        return not count or chunk_index < count or chunk_index - count in self.merged

    def window_index(self, chunk_index: int) -> int:
        """The window that a chunk uses, -1 in place."""
        return chunk_index % len(self.windows) if self.windows else -1


@dataclass
class Push:
    """One request attempt toward one decode instance."""

    opened: OpenPush
    engine: str
    opened_ns: int
    link: PeerLink
    lanes: dict[int, Lane]
    state: PushState = PushState.OPEN

    @property
    def attempt(self) -> Attempt:
        """(request id, epoch)."""
        return self.opened.request_id, self.opened.epoch

    @property
    def in_flight(self) -> int:
        """Write jobs that have not ended."""
        return sum(lane.in_flight for lane in self.lanes.values())

    def advance(self, event: PushEvent) -> None:
        """Move on along the table."""
        self.state = TRANSITIONS.after(self.state, event, f"push of {self.opened.request_id}")
