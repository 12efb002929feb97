"""Executors on threads and shared memory; what they do with failures; copies cut for several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from actors.runtime.config import NodeConfig, Options
from actors.runtime.machine import Job
from actors.transfer import copies
from actors.transfer.actor import build
from actors.transfer.copies import Copy, split
from actors.transfer.executor import LinkBook, MergeExecutor, TransferExecutor
from actors.transfer.jobs import CreateStaging, MapPeer, MergeJob, PullJob, UnmapPeer, WriteJob
from actors.transfer.plan import plan
from actors.transfer.ranges import Ranges
from messages.base import Message
from messages.transfer import MergeDone, PeerMapped, PeerUnmapped, PullDone, StagingCreated, WriteDone
from tests.oracle.world import NaivePlane, geometry, instance
from transport.dataplane import DataPlaneError, Strided
from transport.shm_dataplane import ShmDataPlane, unlink_run_segments

RUN = "transfer-executor-test"


def finish(executor: TransferExecutor | MergeExecutor, job: Job) -> Message:
    """Run one job and wait for its result."""
    result: Future[Message] = Future()
    executor.submit(job, lambda to, message: None, result.set_result)
    return result.result(timeout=30)


@pytest.fixture
def plane() -> Iterator[ShmDataPlane]:
    made = ShmDataPlane(RUN)
    yield made
    made.close()
    assert unlink_run_segments(RUN) == []


WRITE = WriteJob(
    request_id="r",
    epoch=0,
    target_instance="d0",
    target_incarnation=1,
    target_rank=0,
    chunk_index=3,
    part=2,
    layers=(("target", 1),),
    token_start=0,
    token_count=4,
    source_block_ids=(0,),
    target_block_ids=(0,),
    window_offset=0,
)
PULL = PullJob(
    request_id="r",
    epoch=0,
    source_instance="p0",
    source_incarnation=1,
    source_rank=1,
    kind="conv",
    piece_index=0,
    token_start=0,
    token_count=0,
    source_block_ids=(0,),
    source_slot=0,
    target_block_ids=(0,),
    target_slot=0,
    window_offset=0,
)
MERGE = MergeJob(
    request_id="r",
    epoch=0,
    generation=5,
    source_instance="p0",
    source_incarnation=1,
    kind="chunk",
    with_draft=False,
    piece_index=3,
    token_start=0,
    token_count=4,
    target_block_ids=(0,),
    target_slot=0,
    windows=((0, 0), (1, 4096)),
    part=2,
)


def test_a_job_of_an_unknown_peer_fails_with_its_identity_in_the_result() -> None:
    book = LinkBook()
    transfer, merges = (
        TransferExecutor(NaivePlane(), book, 0, threads=2),
        MergeExecutor(NaivePlane(), book, 0, threads=2),
    )
    written, pulled, merged = finish(transfer, WRITE), finish(transfer, PULL), finish(merges, MERGE)
    assert isinstance(written, WriteDone) and (written.chunk_index, written.part) == (3, 2)
    assert "d0 incarnation 1 is not linked" in written.error
    assert isinstance(pulled, PullDone) and (pulled.kind, pulled.source_rank) == ("conv", 1) and pulled.error
    assert isinstance(merged, MergeDone) and (merged.generation, merged.part) == (5, 2) and merged.error
    transfer.close()
    merges.close()


def test_staging_that_cannot_be_created_names_the_option(plane: ShmDataPlane) -> None:
    transfer = TransferExecutor(plane, LinkBook(), 0, threads=1)
    made = finish(transfer, CreateStaging(region_id="d0.r0.1.staging", size_bytes=1 << 20))
    again = finish(transfer, CreateStaging(region_id="d0.r0.1.staging", size_bytes=1 << 20))
    assert isinstance(made, StagingCreated) and made.region is not None and made.region.size_bytes == 1 << 20
    assert isinstance(again, StagingCreated) and again.region is None and "staging_mb" in again.error
    transfer.close()


def test_a_peer_is_mapped_and_unmapped_and_a_region_that_is_not_there_fails_the_link(plane: ShmDataPlane) -> None:
    world = NaivePlane()
    sources, (target,) = instance(world, geometry(), "p0", 2), instance(world, geometry(), "d0", 1)
    book = LinkBook()
    transfer = TransferExecutor(plane, book, 0, threads=1)
    job = MapPeer(
        instance="p0",
        incarnation=1,
        plans=(plan(sources, target),),
        staging_region_ids=("s",),
        regions=(plane.create_region("here", 64),),
    )
    assert finish(transfer, job) == PeerMapped(instance="p0", incarnation=1)
    assert book.find("p0", 1, 0).staging_region == "s"
    assert finish(transfer, UnmapPeer(instance="p0", incarnation=1)) == PeerUnmapped(instance="p0", incarnation=1)
    with pytest.raises(LookupError):
        book.find("p0", 1, 0)
    elsewhere = MapPeer(
        instance="p0",
        incarnation=1,
        plans=(),
        staging_region_ids=(),
        regions=sources[0].regions,  # of another backend
    )
    failed = finish(transfer, elsewhere)
    assert isinstance(failed, PeerMapped) and "naive" in failed.error
    transfer.close()


def test_a_long_merge_on_two_threads_gives_the_same_bytes(plane: ShmDataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "SPLIT_BYTES_MIN", 1)
    world = NaivePlane()
    model = geometry(kv_heads=2, layers="aaada", head_dim=16)
    sources, (target,) = instance(world, model, "p0", 2), instance(world, model, "d0", 1)
    plane.create_region(target.regions[0].region_id, target.regions[0].size_bytes)
    plane.create_region("staging", 1 << 16)
    np.frombuffer(plane.view("staging"), dtype=np.uint8)[:] = np.random.default_rng(2).integers(0, 256, 1 << 16)
    book = LinkBook()
    book.add(
        MapPeer(
            instance="p0",
            incarnation=1,
            plans=(plan(sources, target),),
            staging_region_ids=("staging",),
            regions=(),
        )
    )
    results = []
    for threads in (0, 1, 2, 3):
        region = np.frombuffer(plane.view(target.regions[0].region_id), dtype=np.uint8)
        region[:] = 0
        merges = MergeExecutor(plane, book, 0, threads=threads)
        done = finish(merges, MERGE)
        assert isinstance(done, MergeDone) and not done.error and done.bytes_merged == 4 * 4 * 2 * 2 * 16 * 4
        results.append(region.copy())
        merges.close()
    assert results[0].any() and all(np.array_equal(results[0], other) for other in results[1:])


def test_a_merge_whose_helper_fails_reports_it_after_both_have_stopped() -> None:
    class Torn(NaivePlane):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.lock = threading.Lock()

        def copy(self, *args: object) -> int:
            with self.lock:
                self.calls += 1
                if self.calls == 2:
                    raise DataPlaneError("torn")
            return 0

    world = NaivePlane()
    model = geometry(layers="aaa")
    sources, (target,) = instance(world, model, "p0", 2), instance(world, model, "d0", 1)
    book = LinkBook()
    job = MapPeer(
        instance="p0", incarnation=1, plans=(plan(sources, target),), staging_region_ids=("staging",), regions=()
    )
    book.add(job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "SPLIT_BYTES_MIN", 1)
        plane = Torn()
        merges = MergeExecutor(plane, book, 0, threads=2)
        done = finish(merges, MERGE)
        merges.close()
    assert isinstance(done, MergeDone) and "torn" in done.error and plane.calls == 2


def test_the_device_is_synchronised_before_a_pull_or_merge_reports_success() -> None:
    world = NaivePlane()
    sources, (target,) = instance(world, geometry(), "p0", 2), instance(world, geometry(), "d0", 1)
    world.create_region("staging", 1 << 16)
    book = LinkBook()
    book.add(
        MapPeer(
            instance="p0",
            incarnation=1,
            plans=(plan(sources, target),),
            staging_region_ids=("staging",),
            regions=(),
        )
    )
    synchronised: list[str] = []
    transfer = TransferExecutor(world, book, 0, threads=0, synchronise=lambda: synchronised.append("pull"))
    merges = MergeExecutor(world, book, 0, threads=0, synchronise=lambda: synchronised.append("merge"))
    assert not getattr(finish(transfer, PULL), "error", "")
    assert not getattr(finish(merges, MERGE), "error", "")
    assert synchronised == ["pull", "merge"]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_split_copies_are_the_same_copies_in_about_equal_shares(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "SPLIT_BYTES_MIN", 1)
    pieces = [Strided(index * 10, index % 4 + 1) for index in range(23)]
    whole = [Copy("a", "b", Ranges(pieces[:9], pieces[:9])), Copy("a", "c", Ranges(pieces[9:], pieces[9:]))]
    lists = split(whole, parts)
    assert 1 <= len(lists) <= parts
    joined = [(copy.target_region, piece) for part in lists for copy in part for piece in copy.ranges.source]
    assert joined == [(copy.target_region, piece) for copy in whole for piece in copy.ranges.source]
    sizes = [sum(copy.ranges.size_bytes for copy in part) for part in lists]
    assert max(sizes) <= sum(sizes) / parts + 4


def test_a_short_copy_stays_whole() -> None:
    whole = [Copy("a", "b", Ranges([Strided(0, 10)] * 4, [Strided(0, 10)] * 4))]
    assert split(whole, 2) == [whole]


def test_the_factory_builds_both_actors_of_a_rank() -> None:
    class Context:
        data_plane = NaivePlane()
        config = NodeConfig(
            node="d0.r0",
            incarnation=1,
            run_id="x",
            run_dir="",
            options=Options(),
            factories=(),
            instance="d0",
            role="DECODE",
        )

    specs = build(Context())  # type: ignore[arg-type]
    assert [spec.name for spec in specs] == ["transfer", "staging"]
    for spec in specs:
        assert spec.machine.start(0) == [] and spec.executor is not None
        spec.executor.close()
