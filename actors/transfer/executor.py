"""Carries out the jobs of transfer and staging through the data plane. It follows a plan and decides nothing.

Writes and pulls run on a small pool of threads, merges on threads of their own. ``threads=0`` runs every job at once
on the calling thread (tests, simulation). A failure becomes the ``error`` of the job's result; ``submit`` never raises.
Before a pull or a merge reports success the device is synchronised, so that what comes after it sees the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock

import numpy as np

from actors.runtime.context import Done, Emit
from actors.runtime.machine import Job
from actors.transfer.copies import Copy, Link, merge_copies, pull_copies, split, write_copies
from actors.transfer.jobs import CreateStaging, MapPeer, MergeJob, PullJob, UnmapPeer, VerifyJob, WriteJob
from actors.transfer.verify import Bytes, verify_restored
from messages.base import Message
from messages.layout import Manifest
from messages.transfer import MergeDone, PeerMapped, PeerUnmapped, PullDone, StagingCreated, VerifyDone, WriteDone
from transport.dataplane import DataPlane, Strided

Synchronise = Callable[[], None]


def no_synchronisation() -> None:
    """The CPU: a finished copy is visible to whoever learns of it by a message."""


class LinkBook:
    """The plans of all mapped peers of one rank, shared by its two executors. Thread-safe."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int, int], Link] = {}
        self._mapped: dict[tuple[str, int], MapPeer] = {}
        self._lock = Lock()

    def add(self, job: MapPeer) -> None:
        """Remember the job's plans, by peer and target rank."""
        with self._lock:
            self._mapped[job.instance, job.incarnation] = job
            for plan, staging_region in zip(job.plans, job.staging_region_ids, strict=True):
                self._links[job.instance, job.incarnation, plan.target_rank] = Link(plan, staging_region)

    def remove(self, instance: str, incarnation: int) -> tuple[str, ...]:
        """Forget a peer; returns the ids of the regions that were mapped for it."""
        with self._lock:
            for key in [key for key in self._links if key[:2] == (instance, incarnation)]:
                del self._links[key]
            job = self._mapped.pop((instance, incarnation), None)
            return tuple(region.region_id for region in job.regions) if job else ()

    def manifests(self, instance: str, incarnation: int) -> tuple[tuple[Manifest, ...], Manifest]:
        """(source manifests, own manifest) of a link whose restores are verified; raises ``LookupError``."""
        job = self._mapped.get((instance, incarnation))
        if job is None or job.target is None:
            raise LookupError(f"{instance} incarnation {incarnation} is not linked for verification")
        return job.sources, job.target

    def find(self, instance: str, incarnation: int, target_rank: int) -> Link:
        """The link with a peer; raises ``LookupError`` when it is not mapped."""
        link = self._links.get((instance, incarnation, target_rank))
        if link is None:
            raise LookupError(f"{instance} incarnation {incarnation} is not linked (target rank {target_rank})")
        return link


class RegionReader:
    """Reads bytes of the own caches or of a peer's, through a scratch region that is made at the first read.

    Its ``lock`` must be held: what a call returns is valid until the next one.
    """

    def __init__(self, data_plane: DataPlane, scratch_region: str) -> None:
        self.lock = Lock()
        self._data_plane = data_plane
        self._scratch = scratch_region
        self._scratch_bytes = 0

    def __call__(self, region_id: str, offset_bytes: int, size_bytes: int) -> Bytes:
        """``size_bytes`` at ``offset_bytes`` of a region."""
        if size_bytes > self._scratch_bytes:
            self._scratch = f"{self._scratch}+"  # a region cannot grow; sizes repeat, so this settles at once
            self._scratch_bytes = size_bytes
            self._data_plane.create_region(self._scratch, size_bytes)
        self._data_plane.read(region_id, [Strided(offset_bytes, size_bytes)], self._scratch, [Strided(0, size_bytes)])
        return np.frombuffer(self._data_plane.view(self._scratch), dtype=np.uint8)[:size_bytes].copy()


class TransferExecutor:
    """The jobs of a transfer actor: links, writes and pulls."""

    def __init__(
        self,
        data_plane: DataPlane,
        book: LinkBook,
        rank: int,
        *,
        threads: int,
        scratch_region: str = "verify",
        synchronise: Synchronise = no_synchronisation,
    ) -> None:
        self._data_plane = data_plane
        self._book = book
        self._rank = rank
        self._synchronise = synchronise
        self._reader = RegionReader(data_plane, scratch_region)
        self._pool = ThreadPoolExecutor(threads, "transfer") if threads else None

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Start the job; ``done`` gets its result on a pool thread."""
        if self._pool is None:
            done(self._run(job))
        else:
            self._pool.submit(lambda: done(self._run(job)))

    def close(self) -> None:
        """Drop jobs that have not begun, wait for those that have."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job) -> Message:
        match job:
            case WriteJob():
                return self._write(job)
            case PullJob():
                return self._pull(job)
            case VerifyJob():
                return self._verify(job)
            case MapPeer():
                return self._map(job)
            case UnmapPeer():
                return self._unmap(job)
            case CreateStaging():
                return self._create_staging(job)
            case _:
                raise TypeError(f"{type(job).__name__} is no job of a transfer actor")

    def _write(self, job: WriteJob) -> WriteDone:
        began = time.monotonic_ns()
        moved, error = 0, ""
        try:
            link = self._book.find(job.target_instance, job.target_incarnation, job.target_rank)
            for source_region, target_region, ranges in write_copies(link, self._rank, job):
                moved += self._data_plane.write(source_region, ranges.source, target_region, ranges.target)
        except Exception as caught:
            error = _text(caught)
        return WriteDone(
            request_id=job.request_id,
            epoch=job.epoch,
            target_rank=job.target_rank,
            chunk_index=job.chunk_index,
            part=job.part,
            layer_count=len(job.layers),
            bytes_written=moved,
            write_ms=_ms_since(began),
            error=error,
        )

    def _pull(self, job: PullJob) -> PullDone:
        began = time.monotonic_ns()
        moved, error = 0, ""
        try:
            link = self._book.find(job.source_instance, job.source_incarnation, self._rank)
            for source_region, target_region, ranges in pull_copies(link, job):
                moved += self._data_plane.read(source_region, ranges.source, target_region, ranges.target)
            self._synchronise()
        except Exception as caught:
            error = _text(caught)
        return PullDone(
            request_id=job.request_id,
            epoch=job.epoch,
            source_rank=job.source_rank,
            kind=job.kind,
            piece_index=job.piece_index,
            bytes_read=moved,
            pull_ms=_ms_since(began),
            error=error,
        )

    def _verify(self, job: VerifyJob) -> VerifyDone:
        compared, error = 0, ""
        try:
            sources, target = self._book.manifests(job.source_instance, job.source_incarnation)
            with self._reader.lock:
                compared = verify_restored(
                    self._reader,
                    sources,
                    target,
                    source_block_ids=job.source_block_ids,
                    source_slot=job.source_slot,
                    target_block_ids=job.target_block_ids,
                    target_slot=job.target_slot,
                    token_count=job.token_count,
                )
        except Exception as caught:
            error = _text(caught)
        return VerifyDone(request_id=job.request_id, epoch=job.epoch, bytes_compared=compared, error=error)

    def _map(self, job: MapPeer) -> PeerMapped:
        error = ""
        try:
            for region in job.regions:
                self._data_plane.attach(region)
            self._book.add(job)
        except Exception as caught:
            error = _text(caught)
        return PeerMapped(instance=job.instance, incarnation=job.incarnation, error=error)

    def _unmap(self, job: UnmapPeer) -> PeerUnmapped:
        error = ""
        try:
            for region_id in self._book.remove(job.instance, job.incarnation):
                self._data_plane.detach(region_id)
        except Exception as caught:
            error = _text(caught)
        return PeerUnmapped(instance=job.instance, incarnation=job.incarnation, error=error)

    def _create_staging(self, job: CreateStaging) -> StagingCreated:
        try:
            return StagingCreated(region=self._data_plane.create_region(job.region_id, job.size_bytes))
        except Exception as caught:
            return StagingCreated(error=f"staging of {job.size_bytes >> 20} MiB (option: staging_mb): {_text(caught)}")


class MergeExecutor:
    """The jobs of a staging actor: merges, one at a time. A long one is shared by ``threads`` threads."""

    def __init__(
        self,
        data_plane: DataPlane,
        book: LinkBook,
        rank: int,
        *,
        threads: int,
        synchronise: Synchronise = no_synchronisation,
    ) -> None:
        self._data_plane = data_plane
        self._book = book
        self._rank = rank
        self._synchronise = synchronise
        self._parts = max(1, threads)
        self._pool = ThreadPoolExecutor(1, "merge") if threads else None
        self._helpers = ThreadPoolExecutor(threads - 1, "merge-helper") if threads > 1 else None

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Start the merge; ``done`` gets its result on the merge thread."""
        if not isinstance(job, MergeJob):
            raise TypeError(f"{type(job).__name__} is no job of a staging actor")
        merge = job
        if self._pool is None:
            done(self._merge(merge))
        else:
            self._pool.submit(lambda: done(self._merge(merge)))

    def close(self) -> None:
        """Drop a merge that has not begun, wait for one that has."""
        for pool in (self._pool, self._helpers):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def _merge(self, job: MergeJob) -> MergeDone:
        began = time.monotonic_ns()
        merged_ns = began
        moved, error = 0, ""
        try:
            link = self._book.find(job.source_instance, job.source_incarnation, self._rank)
            moved = self._share(merge_copies(link, job))
            merged_ns = time.monotonic_ns()
            self._synchronise()
        except Exception as caught:
            error = _text(caught)
        return MergeDone(
            request_id=job.request_id,
            epoch=job.epoch,
            generation=job.generation,
            kind=job.kind,
            piece_index=job.piece_index,
            bytes_merged=moved,
            merge_ms=(merged_ns - began) / 1e6,
            sync_ms=_ms_since(merged_ns),
            part=job.part,
            error=error,
        )

    def _share(self, copies: list[Copy]) -> int:
        """Carry the copies out, with the helpers' help; returns the bytes when all of them are in place."""
        if self._helpers is None:
            return self._copy(copies)
        mine, *others = split(copies, self._parts)
        helped = [self._helpers.submit(self._copy, part) for part in others]
        try:
            moved = self._copy(mine)
        finally:
            wait(helped)  # also when this thread's part failed: nothing may be written after the result is out
        return moved + sum(future.result() for future in helped)

    def _copy(self, copies: Iterable[Copy]) -> int:
        return sum(self._data_plane.copy(source, r.source, target, r.target) for source, target, r in copies)


def _ms_since(began_ns: int) -> float:
    return (time.monotonic_ns() - began_ns) / 1e6


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
