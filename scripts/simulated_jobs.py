"""Simulated job executors of transfer and staging: the real copies of the real plans, spread over virtual time.

A job takes a seeded time. Its copies are carried out one after the other at moments within that time, so that other
actors act between them, as they do while a real copy runs; a node's death stops it in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import msgspec

from actors.runtime.context import Done, Emit
from actors.runtime.faults import TornWrite
from actors.runtime.machine import Job
from actors.runtime.simulated_nodes import SimulatedContext
from actors.transfer.copies import Copy, merge_copies, pull_copies, write_copies
from actors.transfer.executor import LinkBook
from actors.transfer.jobs import CreateStaging, MapPeer, MergeJob, PullJob, UnmapPeer, WriteJob
from messages.base import Message
from messages.transfer import MergeDone, PeerMapped, PeerUnmapped, PullDone, StagingCreated, WriteDone
from scripts.simulated_memory import NodeMemory
from transport.dataplane import DataPlaneError

PIECES_MAX: Final = 3
"""At how many moments, at most, a job's copies happen."""

WriteFault = Callable[[str, str, str, int], float]
"""``(node, operation, region, bytes)`` → extra ms; raises ``DataPlaneError`` or ``TornWrite``."""
CheckCopy = Callable[[str, Job], None]
"""``(node, job)``, before each moment at which the job's bytes move; raises ``Violation``."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How long simulated work takes, in ms: (least, most), and how often it takes much longer."""

    copy_ms: tuple[float, float] = (0.05, 1.0)
    merge_ms: tuple[float, float] = (0.02, 0.5)
    step_ms: tuple[float, float] = (0.5, 2.0)
    map_ms: tuple[float, float] = (0.2, 3.0)
    slow: float = 0.0
    slow_ms: tuple[float, float] = (20.0, 200.0)

    def draw(self, random: Random, range_ms: tuple[float, float]) -> float:
        """How long one piece of work takes."""
        low, high = range_ms
        if self.slow and random.random() < self.slow:
            low, high = self.slow_ms
        return low + random.random() * (high - low)


class Copier:
    """Carries out lists of copies in virtual time for one life of a rank node."""

    def __init__(
        self,
        context: SimulatedContext,
        memory: NodeMemory,
        speed: Speed,
        check: CheckCopy | None,
        fault: WriteFault | None,
    ) -> None:
        self.context = context
        self.memory = memory
        self.speed = speed
        self.random = context.simulation.random
        self._node = context.node.name
        self._check = check
        self._fault = fault

    def run(
        self, job: Job, operation: str, copies: list[Copy], take_ms: float, end: Callable[[int, str], None]
    ) -> None:
        """Copy everything within ``take_ms``; then ``end(bytes moved, error)``."""
        try:
            if self._fault is not None and copies:
                size = sum(copy.ranges.size_bytes for copy in copies)
                take_ms += self._fault(self._node, operation, copies[0].target_region, size)
        except TornWrite as torn:
            self._tear(job, copies, torn, end)
            return
        except DataPlaneError as error:
            text = str(error)
            self.context.call_later(take_ms, lambda: end(0, text))
            return
        moments = min(PIECES_MAX, max(1, len(copies)))
        copying = _Copying(self, job, copies, moments, take_ms / moments, end)
        self.context.call_later(copying.every_ms, copying.go_on)

    def _tear(self, job: Job, copies: list[Copy], torn: TornWrite, end: Callable[[int, str], None]) -> None:
        kept = copies[: int(len(copies) * torn.fraction)]
        text = str(torn)
        self.context.call_later(0.1, lambda: end(self.copy(job, kept), text))

    def copy(self, job: Job, copies: list[Copy]) -> int:
        """Copy now; returns the bytes moved. Raises ``DataPlaneError``, or ``Violation`` when that breaks a rule."""
        if self._check is not None:
            self._check(self._node, job)
        moved = 0
        for source_region, target_region, ranges in copies:
            moved += self.memory.copy(source_region, ranges.source, target_region, ranges.target)
        return moved


class _Copying:
    """A job under way: its copies in ``moments`` parts, one every ``every_ms``."""

    __slots__ = ("_copier", "_copies", "_end", "_job", "_moments", "_moved", "_part", "every_ms")

    def __init__(
        self,
        copier: Copier,
        job: Job,
        copies: list[Copy],
        moments: int,
        every_ms: float,
        end: Callable[[int, str], None],
    ) -> None:
        self._copier = copier
        self._job = job
        self._copies = copies
        self._moments = moments
        self.every_ms = every_ms
        self._end = end
        self._part = 0
        self._moved = 0

    def go_on(self) -> None:
        """The next part."""
        copies, part, moments = self._copies, self._part, self._moments
        now = copies[part * len(copies) // moments : (part + 1) * len(copies) // moments]
        self._part += 1
        try:
            self._moved += self._copier.copy(self._job, now)
        except DataPlaneError as error:
            self._end(self._moved, str(error))
            return
        if self._part == moments:
            self._end(self._moved, "")
        else:
            self._copier.context.call_later(self.every_ms, self.go_on)


class SimulatedTransferExecutor:
    """The jobs of a transfer actor."""

    def __init__(self, copier: Copier, book: LinkBook, rank: int) -> None:
        self._copier = copier
        self._book = book
        self._rank = rank

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Start the job."""
        copier = self._copier
        speed = copier.speed
        match job:
            case WriteJob():
                self._write(job, done)
            case PullJob():
                self._pull(job, done)
            case MapPeer():
                copier.context.call_later(speed.draw(copier.random, speed.map_ms), lambda: done(self._map(job)))
            case UnmapPeer():
                copier.context.call_later(speed.draw(copier.random, speed.map_ms), lambda: done(self._unmap(job)))
            case CreateStaging():
                region = copier.memory.create_region(job.region_id, job.size_bytes)
                copier.context.call_later(0.1, lambda: done(StagingCreated(region=region)))
            case _:
                raise TypeError(f"{type(job).__name__} is no job of a simulated transfer actor")

    def close(self) -> None:
        """Nothing outlives a node's life here."""

    def _write(self, job: WriteJob, done: Done) -> None:
        take_ms = self._copier.speed.draw(self._copier.random, self._copier.speed.copy_ms)

        def end(moved: int, error: str) -> None:
            done(
                WriteDone(
                    request_id=job.request_id,
                    epoch=job.epoch,
                    target_rank=job.target_rank,
                    chunk_index=job.chunk_index,
                    part=job.part,
                    layer_count=len(job.layers),
                    bytes_written=moved,
                    write_ms=take_ms,
                    error=error,
                )
            )

        try:
            link = self._book.find(job.target_instance, job.target_incarnation, job.target_rank)
        except LookupError as error:
            text = str(error)
            self._copier.context.call_later(take_ms, lambda: end(0, text))
            return
        self._copier.run(job, "write", write_copies(link, self._rank, job), take_ms, end)

    def _pull(self, job: PullJob, done: Done) -> None:
        take_ms = self._copier.speed.draw(self._copier.random, self._copier.speed.copy_ms)

        def end(moved: int, error: str) -> None:
            done(
                PullDone(
                    request_id=job.request_id,
                    epoch=job.epoch,
                    source_rank=job.source_rank,
                    kind=job.kind,
                    piece_index=job.piece_index,
                    bytes_read=moved,
                    pull_ms=take_ms,
                    error=error,
                )
            )

        try:
            link = self._book.find(job.source_instance, job.source_incarnation, self._rank)
        except LookupError as error:
            text = str(error)
            self._copier.context.call_later(take_ms, lambda: end(0, text))
            return
        self._copier.run(job, "read", pull_copies(link, job), take_ms, end)

    def _map(self, job: MapPeer) -> Message:
        error = ""
        try:
            for region in job.regions:
                self._copier.memory.attach(region)
            self._book.add(job)
        except DataPlaneError as caught:
            error = str(caught)
        return PeerMapped(instance=job.instance, incarnation=job.incarnation, error=error)

    def _unmap(self, job: UnmapPeer) -> Message:
        for region_id in self._book.remove(job.instance, job.incarnation):
            self._copier.memory.detach(region_id)
        return PeerUnmapped(instance=job.instance, incarnation=job.incarnation)


class SimulatedMergeExecutor:
    """The jobs of a staging actor."""

    def __init__(self, copier: Copier, book: LinkBook, rank: int) -> None:
        self._copier = copier
        self._book = book
        self._rank = rank

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Start the merge."""
        if not isinstance(job, MergeJob):
            raise TypeError(f"{type(job).__name__} is no job of a staging actor")
        merge = job
        take_ms = self._copier.speed.draw(self._copier.random, self._copier.speed.merge_ms)

        def end(moved: int, error: str) -> None:
            done(
                MergeDone(
                    request_id=merge.request_id,
                    epoch=merge.epoch,
                    generation=merge.generation,
                    kind=merge.kind,
                    piece_index=merge.piece_index,
                    bytes_merged=moved,
                    merge_ms=take_ms,
                    sync_ms=0.0,
                    error=error,
                )
            )

        try:
            link = self._book.find(merge.source_instance, merge.source_incarnation, self._rank)
        except LookupError as error:
            text = str(error)
            self._copier.context.call_later(take_ms, lambda: end(0, text))
            return
        self._copier.run(merge, "copy", merge_copies(link, merge), take_ms, end)

    def close(self) -> None:
        """Nothing outlives a node's life here."""
