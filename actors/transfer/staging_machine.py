"""The staging machine of one decode rank: the only owner of its staging rows.

Theory. Every row of the staging region belongs to this machine or, through a **lease**, to one request attempt. A
lease gives each source rank a range of its own, so writers of different leases or sources never meet and what is slow
(waiting for shards) happens outside. What this machine serialises is short: grants, merges, frees.

States of a lease, and what moves it on (``TRANSITIONS`` is the whole table):

* ``granted``: the target's transfer actor has it, nothing is complete;
* ``complete``: at least one piece (a chunk, CONV, draft KV) has arrived from all its sources and waits to be merged;
* ``merging``: one of its pieces is being merged into the final blocks. One merge at a time per rank, first come first
  served over all leases;
* ``filling``: what had arrived is merged, more is on its way;
* ``draining``: its owner gave it back while a merge ran; that merge still reads its rows and writes its blocks;
* ``free``: the rows may be granted again, under a new generation.

Who asks: only the transfer actor of the same rank. It sends ``FreeLease`` when every *writer* has stopped or is dead
(``target_machine.py``), and counts the target blocks as still written to until ``LeaseFreed`` answers, because a merge
may run. Never does a lease end because time passed.

Invariants: granted ranges are disjoint; generations only grow; at most one merge runs; a message whose request, epoch
or generation is not that of a live lease changes nothing (it is counted), except that ``FreeLease`` of a lease that is
gone is answered again, since its answer may have been lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from actors.runtime.machine import Effect, Handlers, Note, Run, Send, TableKey
from actors.transfer.attempts import Table
from actors.transfer.jobs import MergeJob
from actors.transfer.staging import StagingSpace, cut, range_bytes
from messages.base import Message
from messages.handoff import RankLease
from messages.transfer import (
    FreeLease,
    GrantLease,
    LeaseFreed,
    LeaseGranted,
    LeaseRefused,
    Merged,
    MergeDone,
    MergeFailed,
    Restore,
    StagingReady,
)


class LeaseState(TableKey):
    """Where a lease stands."""

    GRANTED = "granted"
    FILLING = "filling"
    COMPLETE = "complete"
    MERGING = "merging"
    DRAINING = "draining"
    FREE = "free"


class LeaseEvent(TableKey):
    """What can happen to a lease."""

    PIECE_ARRIVED = "piece arrived"
    MERGE_BEGINS = "merge begins"
    MERGE_ENDS = "merge ends"
    GIVEN_BACK = "given back"


TRANSITIONS = Table(
    {
        (LeaseState.GRANTED, LeaseEvent.PIECE_ARRIVED): LeaseState.COMPLETE,
        (LeaseState.GRANTED, LeaseEvent.GIVEN_BACK): LeaseState.FREE,
        (LeaseState.FILLING, LeaseEvent.PIECE_ARRIVED): LeaseState.COMPLETE,
        (LeaseState.FILLING, LeaseEvent.GIVEN_BACK): LeaseState.FREE,
        (LeaseState.COMPLETE, LeaseEvent.PIECE_ARRIVED): LeaseState.COMPLETE,
        (LeaseState.COMPLETE, LeaseEvent.MERGE_BEGINS): LeaseState.MERGING,
        (LeaseState.COMPLETE, LeaseEvent.GIVEN_BACK): LeaseState.FREE,
        (LeaseState.MERGING, LeaseEvent.PIECE_ARRIVED): LeaseState.MERGING,
        (LeaseState.MERGING, LeaseEvent.MERGE_ENDS): LeaseState.FILLING,
        (LeaseState.MERGING, LeaseEvent.GIVEN_BACK): LeaseState.DRAINING,
        (LeaseState.DRAINING, LeaseEvent.GIVEN_BACK): LeaseState.DRAINING,
        (LeaseState.DRAINING, LeaseEvent.MERGE_ENDS): LeaseState.FREE,
    }
)
"""The life of a lease; pairs that are not here are illegal."""


@dataclass
class Lease:
    """One live lease."""

    request_id: str
    epoch: int
    generation: int
    owner: str  # address of the transfer actor that asked for it
    source_instance: str
    source_incarnation: int
    offset_bytes: int
    granted: RankLease
    granted_ns: int
    state: LeaseState = LeaseState.GRANTED
    pieces: set[tuple[str, int, int]] = field(default_factory=set)  # (kind, index, part) of all ever asked for

    def allows(self, event: LeaseEvent) -> bool:
        """Whether ``event`` is legal now."""
        return TRANSITIONS.allows(self.state, event)

    def advance(self, event: LeaseEvent) -> None:
        """Move on; raises ``IllegalTransition`` and changes nothing when the table has no such pair."""
        self.state = TRANSITIONS.after(self.state, event, f"lease {self.generation} of {self.request_id}")


class StagingMachine:
    """One rank's staging actor. Understands what transfer says to it, and its own ``MergeDone``."""

    def __init__(self, target_rank: int) -> None:
        self._target_rank = target_rank
        self._space = StagingSpace(0)
        self._leases: dict[tuple[str, int], Lease] = {}
        self._generation = 0
        self._waiting: deque[tuple[Lease, Restore]] = deque()
        self._running: tuple[Lease, Restore] | None = None
        self._late_count = 0
        self._merge_count = 0
        self._merged_bytes = 0
        self._handlers: Handlers[list[Effect]] = Handlers()
        on = self._handlers.on
        on(StagingReady, self._on_staging_ready)
        on(GrantLease, self._on_grant_lease)
        on(Restore, self._on_restore)
        on(MergeDone, self._on_merge_done)
        on(FreeLease, self._on_free_lease)

    def start(self, now_ns: int) -> list[Effect]:
        """Nothing until the region exists."""
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """See ``actors/runtime/machine.py``."""
        handler = self._handlers.get(type(message))
        return handler(now_ns, sender, message) if handler is not None else []

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        """Leases by request, and how full the region is."""
        values: tuple[tuple[str, float | int | str], ...] = (
            ("leases", len(self._leases)),
            ("staging_bytes", self._space.size_bytes),
            ("staging_used_bytes", self._space.used_bytes),
            ("merges_waiting", len(self._waiting)),
            ("merges", self._merge_count),
            ("merged_bytes", self._merged_bytes),
            ("late_messages", self._late_count),
        )
        waits = {
            LeaseState.COMPLETE: "its turn to merge",
            LeaseState.MERGING: "merge",
            LeaseState.DRAINING: "merge",
        }
        return values, tuple(
            (lease.request_id, lease.epoch, lease.state.value, waits.get(lease.state, "shards"), lease.granted_ns)
            for lease in self._leases.values()
        )

    # -- messages -------------------------------------------------------------------------------------------------

    def _on_staging_ready(self, now_ns: int, sender: str, message: StagingReady) -> list[Effect]:
        if self._space.size_bytes:
            return self._late()
        self._space = StagingSpace(message.region.size_bytes)
        return []

    def _on_grant_lease(self, now_ns: int, sender: str, message: GrantLease) -> list[Effect]:
        key = (message.request_id, message.epoch)
        lease = self._leases.get(key)
        if lease is None:
            size = sum(range_bytes(window, message.window_count) for window in message.window_bytes)
            offset = self._space.take(size)
            if offset is None:
                return [self._refused(sender, message, size)]
            self._generation += 1
            sources = cut(message.source_ranks, message.window_bytes, message.window_count, offset)
            lease = self._leases[key] = Lease(
                request_id=message.request_id,
                epoch=message.epoch,
                generation=self._generation,
                owner=sender,
                source_instance=message.source_instance,
                source_incarnation=message.source_incarnation,
                offset_bytes=offset,
                granted=RankLease(target_rank=self._target_rank, generation=self._generation, sources=tuple(sources)),
                granted_ns=now_ns,
            )
        return [Send(sender, LeaseGranted(request_id=message.request_id, epoch=message.epoch, lease=lease.granted))]

    def _refused(self, sender: str, message: GrantLease, size: int) -> Effect:
        used, whole = self._space.used_bytes, self._space.size_bytes
        reason = f"staging is full: a lease of {size >> 20} MiB, {used >> 20} of {whole >> 20} MiB granted"
        return Send(sender, LeaseRefused(request_id=message.request_id, epoch=message.epoch, reason=reason))

    def _on_restore(self, now_ns: int, sender: str, message: Restore) -> list[Effect]:
        lease = self._find(message.request_id, message.epoch, message.generation)
        piece = (message.kind, message.piece_index, message.part)
        if lease is None or piece in lease.pieces or not lease.allows(LeaseEvent.PIECE_ARRIVED):
            return self._late()
        lease.advance(LeaseEvent.PIECE_ARRIVED)
        lease.pieces.add(piece)
        self._waiting.append((lease, message))
        return self._next_merge()

    def _on_merge_done(self, now_ns: int, sender: str, message: MergeDone) -> list[Effect]:
        if self._running is None:
            return self._late()
        lease, restore = self._running
        current = (lease.generation, restore.kind, restore.piece_index, restore.part)
        if current != (message.generation, message.kind, message.piece_index, message.part):
            return self._late()
        self._running = None
        self._merge_count += 1
        self._merged_bytes += message.bytes_merged
        lease.advance(LeaseEvent.MERGE_ENDS)
        if lease.state is LeaseState.FREE:
            return self._free(lease) + self._next_merge()
        if any(waiting is lease for waiting, _ in self._waiting):
            lease.advance(LeaseEvent.PIECE_ARRIVED)
        return [Send(lease.owner, _merge_answer(message)), *self._next_merge()]

    def _on_free_lease(self, now_ns: int, sender: str, message: FreeLease) -> list[Effect]:
        lease = self._find(message.request_id, message.epoch, message.generation)
        if lease is None:
            self._late_count += 1
            return [Send(sender, _freed(message.request_id, message.epoch, message.generation))]
        lease.advance(LeaseEvent.GIVEN_BACK)
        self._waiting = deque((other, restore) for other, restore in self._waiting if other is not lease)
        return self._free(lease) if lease.state is LeaseState.FREE else []

    # -- helpers --------------------------------------------------------------------------------------------------

    def _find(self, request_id: str, epoch: int, generation: int) -> Lease | None:
        lease = self._leases.get((request_id, epoch))
        return lease if lease is not None and lease.generation == generation else None

    def _next_merge(self) -> list[Effect]:
        """Begin the oldest waiting merge, unless one runs."""
        if self._running is not None or not self._waiting:
            return []
        lease, restore = self._waiting.popleft()
        lease.advance(LeaseEvent.MERGE_BEGINS)
        self._running = (lease, restore)
        windows = tuple(
            (source.source_rank, source.windows[restore.window_index].offset_bytes) for source in lease.granted.sources
        )
        return [
            Run(
                MergeJob(
                    request_id=lease.request_id,
                    epoch=lease.epoch,
                    generation=lease.generation,
                    source_instance=lease.source_instance,
                    source_incarnation=lease.source_incarnation,
                    kind=restore.kind,
                    with_draft=restore.with_draft,
                    piece_index=restore.piece_index,
                    token_start=restore.token_start,
                    token_count=restore.token_count,
                    target_block_ids=restore.target_block_ids,
                    target_slot=restore.target_slot,
                    windows=windows,
                    part=restore.part,
                    layers=restore.layers,
                )
            )
        ]

    def _free(self, lease: Lease) -> list[Effect]:
        self._space.give_back(lease.offset_bytes)
        del self._leases[lease.request_id, lease.epoch]
        return [Send(lease.owner, _freed(lease.request_id, lease.epoch, lease.generation))]

    def _late(self) -> list[Effect]:
        self._late_count += 1
        return [Note("debug", "late message ignored", (("actor", "staging"), ("count", self._late_count)))]


def _freed(request_id: str, epoch: int, generation: int) -> LeaseFreed:
    return LeaseFreed(request_id=request_id, epoch=epoch, generation=generation)


def _merge_answer(done: MergeDone) -> Message:
    if done.error:
        return MergeFailed(
            request_id=done.request_id,
            epoch=done.epoch,
            generation=done.generation,
            kind=done.kind,
            piece_index=done.piece_index,
            part=done.part,
            reason=done.error,
        )
    return Merged(
        request_id=done.request_id,
        epoch=done.epoch,
        generation=done.generation,
        kind=done.kind,
        piece_index=done.piece_index,
        part=done.part,
        merge_ms=done.merge_ms,
        sync_ms=done.sync_ms,
    )
