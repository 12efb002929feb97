"""Hand-offs through the real machines and executors, in every mode, against the oracle; and who waits for whom."""

from __future__ import annotations

import msgspec
import pytest

from actors.runtime.config import Options
from actors.transfer import source_machine
from actors.transfer.jobs import MergeJob, PullJob, WriteJob
from messages.base import rank_address
from messages.handoff import TransferMode
from messages.transfer import ChunkArrived, ChunkMerged, LayersArrived, Restore, Restored, RestoreFailed
from tests.oracle.world import Request, geometry
from tests.transfer.cluster import D_ENGINE, Cluster, Handoff, filled

FIRST = Request("first", 22, (7, 2, 3, 0, 11, 5), (1, 6, 5, 2, 9, 8), 1, 2)
SECOND = Request("second", 9, (4, 1, 6), (10, 0, 7), 2, 0)
CHUNK = 6


def cluster(source_tp: int, target_tp: int, *, kv_heads: int = 2, depth: int = 1, **more: object) -> Cluster:
    model = geometry(kv_heads=kv_heads, key_heads=4, value_heads=8, layers="dada")
    made = Cluster(model, source_tp, target_tp, speculative_tokens=depth, chunk_tokens=CHUNK, **more)  # type: ignore[arg-type]
    return filled(made, (FIRST, SECOND))


@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (1, 2), (1, 4), (2, 4)])
def test_a_handoff_restores_every_byte_and_leaves_nothing(
    source_tp: int, target_tp: int, mode: TransferMode, parallel: bool
) -> None:
    options = Options(staging_mb=64, enable_pd_parallel_shard_pull=parallel)
    world = cluster(source_tp, target_tp, options=options)
    handoff = Handoff(world, FIRST, mode=mode)
    handoff.whole(CHUNK)
    assert sorted(message.rank for message in handoff.restored()) == list(range(target_tp))
    world.assert_restored([FIRST])
    assert world.nothing_is_left()


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 6])
def test_draft_kv_arrives_with_the_chunks_or_by_a_pull(chunk_tokens: int, depth: int, with_draft: bool) -> None:
    world = cluster(2, 1, depth=depth)
    Handoff(world, FIRST).whole(chunk_tokens, with_draft=with_draft)
    world.assert_restored([FIRST])
    assert world.nothing_is_left()


def test_what_is_reported_as_moved_is_what_the_plan_says() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.whole(CHUNK)
    (restored,) = handoff.restored()
    by_role = dict(restored.bytes_by_role)
    assert set(by_role) == {"target.KEY", "target.VALUE", "target.CONV", "target.SSM", "draft.KEY", "draft.VALUE"}
    assert restored.bytes_moved == sum(by_role.values())
    assert by_role["target.KEY"] == 22 * 2 * 2 * 2 * 4  # tokens, layers, heads, head_dim, float32


def test_a_verified_handoff_reads_every_source_again() -> None:
    world = cluster(4, 1, options=Options(staging_mb=64, verify_handoffs=True))
    handoff = Handoff(world, FIRST)
    handoff.whole(CHUNK)
    (restored,) = handoff.restored()
    assert restored.verified_bytes > restored.bytes_moved  # KV heads are replicated: both replicas are compared
    assert world.nothing_is_left()


def test_a_verification_that_finds_a_difference_fails_the_restore() -> None:
    world = cluster(2, 1, options=Options(staging_mb=64, verify_handoffs=True))
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    handoff.compute(CHUNK)
    world.run()
    place = world.sources[1].tensors[-1]
    start = place.base_bytes + FIRST.source_block_ids[2] * place.resource_stride_bytes
    world.plane.regions[place.region_id][start] ^= 0xFF
    handoff.pull()
    world.run()
    (failed,) = handoff.of(RestoreFailed)
    assert place.name in failed.reason and not handoff.restored()


def test_layers_are_written_while_later_layers_still_compute() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.run()
    layers = handoff.layers_of((0, 0, CHUNK))
    for message in layers[:2]:  # a delta layer and an attention layer
        handoff.to_sources(message, "p0.r0/worker")
    world.hold = lambda address, job: True
    world.run()
    jobs = [job for _, job in world.jobs if isinstance(job, WriteJob)]
    assert [job.layers for job in jobs] == [(("target", 1),), (("target", 1),)]
    assert not [m for _, _, m in world.delivered if isinstance(m, ChunkArrived)]


def test_a_chunk_arrives_once_per_source_and_is_merged_when_all_have_come() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.run()
    for message in handoff.layers_of((0, 0, CHUNK)):
        world.post("p0.r0/worker", "p0.r0/transfer", message)
    world.run()
    assert [m.source_rank for _, _, m in world.delivered if isinstance(m, ChunkArrived)] == [0]
    assert not [m for _, _, m in world.delivered if isinstance(m, Restore)]
    for message in handoff.layers_of((0, 0, CHUNK)):
        world.post("p0.r1/worker", "p0.r1/transfer", message)
    world.run()
    assert [m.kind for _, _, m in world.delivered if isinstance(m, Restore)] == ["chunk"]
    assert {to for _, to, m in world.delivered if isinstance(m, ChunkMerged)} == {"p0.r0/transfer", "p0.r1/transfer"}


def test_a_window_is_written_again_only_after_its_chunk_was_merged() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.hold = lambda address, job: isinstance(job, MergeJob)
    handoff.compute(CHUNK)
    world.run()
    arrived = {m.chunk_index for _, _, m in world.delivered if isinstance(m, ChunkArrived)}
    assert arrived == {0, 1}  # two windows
    for expected_chunks in ({0, 1, 2}, {0, 1, 2, 3}):
        world.finish(next(index for index, (_, job) in enumerate(world.jobs) if isinstance(job, MergeJob)))
        world.run()
        arrived = {m.chunk_index for _, _, m in world.delivered if isinstance(m, ChunkArrived)}
        assert arrived == expected_chunks
    world.hold = lambda address, job: False
    handoff.pull()
    world.run()
    world.assert_restored([FIRST])


def test_two_attempts_wait_for_each_other_only_in_the_merge() -> None:
    world = cluster(2, 1)
    slow, quick = Handoff(world, FIRST), Handoff(world, SECOND)
    for handoff in (slow, quick):
        handoff.reserve()
    world.run()
    for handoff in (slow, quick):
        handoff.open_push()
        handoff.compute(CHUNK)
        handoff.pull()
    world.hold = lambda address, job: isinstance(job, WriteJob | PullJob) and job.request_id == "first"
    world.run()
    assert len(quick.restored()) == 1 and not slow.restored()
    world.hold = lambda address, job: False
    world.run()
    world.assert_restored([FIRST, SECOND])


def test_only_one_merge_runs_at_a_time() -> None:
    world = cluster(2, 1)
    for handoff in (Handoff(world, FIRST), Handoff(world, SECOND)):
        handoff.reserve()
        world.run()
        handoff.open_push()
        handoff.compute(CHUNK)
    world.hold = lambda address, job: isinstance(job, MergeJob)
    world.run()
    assert sum(isinstance(job, MergeJob) for _, job in world.jobs) == 1


def test_serial_pulls_read_one_source_at_a_time() -> None:
    world = cluster(4, 1, options=Options(staging_mb=64, enable_pd_parallel_shard_pull=False))
    handoff = Handoff(world, FIRST, mode="PULL")
    handoff.reserve()
    world.run()
    handoff.open_push()
    handoff.pull()
    world.hold = lambda address, job: isinstance(job, PullJob)
    world.run()
    seen = 0
    while pulls := [index for index, (_, job) in enumerate(world.jobs) if isinstance(job, PullJob)]:
        assert len(pulls) == 1
        world.finish(pulls[0])
        world.run()
        seen += 1
    assert seen > 8
    world.assert_restored([FIRST])


def test_parallel_pulls_read_all_sources_at_once() -> None:
    world = cluster(4, 1)
    handoff = Handoff(world, FIRST, mode="PULL")
    handoff.reserve()
    world.run()
    handoff.open_push()
    handoff.pull()
    world.hold = lambda address, job: isinstance(job, PullJob)
    world.run()
    pulls = [job for _, job in world.jobs if isinstance(job, PullJob)]
    assert {job.source_rank for job in pulls if job.kind == "ssm"} == {0, 1, 2, 3}
    assert {job.source_rank for job in pulls if job.kind == "conv"} == {0, 1, 2, 3}
    assert {(job.source_rank, job.piece_index) for job in pulls if job.kind == "target"} == {
        (0, 0),
        (2, 0),
        (0, 1),
        (2, 1),
    }  # two windows, and one replica of each KV head


def test_what_was_prefilled_before_is_pushed_again_without_computing() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST, epoch=1)
    handoff.reserve()
    world.run()
    handoff.open_push(ready_tokens=FIRST.tokens)
    handoff.pull()
    world.run()
    assert len(handoff.restored()) == 1
    chunks = {
        (m.chunk_index, m.token_start, m.token_count) for _, _, m in world.delivered if isinstance(m, ChunkArrived)
    }
    assert chunks == {(0, 0, 6), (1, 6, 6), (2, 12, 6), (3, 18, 4)}
    world.assert_restored([FIRST])
    handoff.close()
    world.run()
    assert world.nothing_is_left()


def test_the_rest_of_a_prefill_follows_what_was_pushed_again() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST, epoch=1)
    handoff.reserve()
    world.run()
    handoff.open_push(ready_tokens=12)
    for chunk in handoff.chunks(CHUNK)[2:]:
        for message in handoff.layers_of(chunk):
            handoff.to_sources(message)
    handoff.pull()
    world.run()
    world.assert_restored([FIRST])


def test_equal_sizes_write_in_place_and_take_no_lease() -> None:
    world = cluster(2, 2)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    assert handoff.opened() and all(not message.lease.sources for message in handoff.leases)
    handoff.open_push()
    handoff.compute(CHUNK)
    handoff.pull()
    world.run()
    assert not [m for _, _, m in world.delivered if isinstance(m, Restore | ChunkMerged)]
    world.assert_restored([FIRST])


@pytest.mark.parametrize("seed", range(25))
def test_interleaved_attempts_never_mix_their_bytes_whatever_the_order(seed: int) -> None:
    sizes = [(2, 1), (4, 2), (4, 1), (1, 2), (2, 2)]
    world = cluster(*sizes[seed % len(sizes)], seed=seed)
    handoffs = [Handoff(world, FIRST), Handoff(world, SECOND, mode="PULL" if seed % 3 == 0 else "PUSH")]
    for handoff in handoffs:
        handoff.reserve()
    world.run()
    for handoff in handoffs:
        handoff.open_push()
    world.run()
    for handoff in handoffs:
        handoff.compute(CHUNK, with_draft=seed % 2 == 0)
        handoff.pull()
    world.run()
    for handoff in handoffs:
        assert len(handoff.restored()) == len(world.targets)
        handoff.close()
    world.run()
    world.assert_restored([FIRST, SECOND])
    assert world.nothing_is_left()


@pytest.fixture
def every_layer_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have even tiny layers merged as they land."""
    monkeypatch.setattr(source_machine, "EARLY_BYTES_MIN", 1)


@pytest.mark.usefixtures("every_layer_is_long")
def test_a_long_layer_is_merged_before_its_chunk_is_complete() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.run()
    layers = handoff.layers_of((0, 0, CHUNK))
    for message in layers[:2]:
        handoff.to_sources(message, "p0.r0/worker")
    world.run()
    merges = [m for _, _, m in world.delivered if isinstance(m, Restore)]
    assert [(m.kind, m.layers) for m in merges] == [("chunk", (("target", 1),))]
    assert not [m for _, _, m in world.delivered if isinstance(m, ChunkArrived | ChunkMerged)]
    for message in layers[2:]:
        handoff.to_sources(message, "p0.r0/worker")
    world.run()
    merges = [m for _, _, m in world.delivered if isinstance(m, Restore)]
    assert [layer for m in merges for layer in m.layers] == [("target", 1), ("target", 3), ("draft", 0)]
    assert len([m for _, _, m in world.delivered if isinstance(m, ChunkMerged)]) == 2  # once to each source


@pytest.mark.usefixtures("every_layer_is_long")
@pytest.mark.parametrize("seed", range(40))
def test_layers_merged_as_they_land_restore_the_same_bytes_whatever_the_order(seed: int) -> None:
    world = cluster(*[(2, 1), (4, 2), (4, 1)][seed % 3], kv_heads=4, seed=seed)
    if seed % 4 == 1:
        world.mangle = lambda sender, to, message: (message, message)
    if seed % 4 == 2:
        world.mangle = lambda sender, to, message: () if isinstance(message, LayersArrived) else (message,)
    handoffs = [Handoff(world, FIRST), Handoff(world, SECOND)]
    for handoff in handoffs:
        handoff.reserve()
    world.run()
    for handoff in handoffs:
        handoff.open_push()
    world.run()
    for handoff in handoffs:
        handoff.compute(CHUNK, with_draft=seed % 2 == 0)
        handoff.pull()
    world.run()
    for handoff in handoffs:
        assert {message.rank for message in handoff.restored()} == set(range(len(world.targets)))
        handoff.close()
    world.run()
    world.assert_restored([FIRST, SECOND])
    assert world.nothing_is_left()


def test_chunk_numbers_of_the_worker_need_not_continue_those_of_what_was_pushed_again() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST, epoch=1)
    handoff.reserve()
    world.run()
    handoff.open_push(ready_tokens=6)
    for index, start, count in handoff.chunks(CHUNK)[1:]:
        for message in handoff.layers_of((index + 7, start, count)):
            handoff.to_sources(message)
    handoff.pull()
    world.run()
    world.assert_restored([FIRST])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
def test_every_message_delivered_twice_changes_nothing(seed: int, mode: TransferMode) -> None:
    world = cluster(*[(2, 1), (4, 2), (2, 2)][seed % 3], seed=seed)
    world.mangle = lambda sender, to, message: (message, message)
    handoff = Handoff(world, FIRST, mode=mode)
    handoff.whole(CHUNK)
    restored = {message.rank for message in handoff.restored()}
    assert restored == set(range(len(world.targets)))
    # Each sent once: the second copy is the mangled network's.
    assert len(handoff.restored()) == 2 * len(world.targets)
    assert not handoff.of(RestoreFailed)
    world.assert_restored([FIRST])
    assert world.nothing_is_left()


def test_a_late_answer_of_another_life_generation_or_epoch_changes_nothing() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    handoff.compute(CHUNK)
    world.hold = lambda address, job: isinstance(job, MergeJob)
    world.run()
    arrived = next(m for _, _, m in world.delivered if isinstance(m, ChunkArrived))
    before = world.snapshot()
    replace = msgspec.structs.replace
    fresh = replace(arrived, chunk_index=3, token_start=18, token_count=4)
    for stale in (
        replace(fresh, source_incarnation=0),
        replace(fresh, epoch=7),
        replace(fresh, generation=99),
        replace(fresh, source_rank=9),
        replace(fresh, source_instance="p1"),
        arrived,
    ):
        world.post("p0.r0/transfer", "d0.r0/transfer", stale)
    merged = ChunkMerged(request_id="first", epoch=0, target_rank=0, chunk_index=0, generation=99)
    world.post("d0.r0/transfer", "p0.r0/transfer", merged)
    world.post("d0.r0/transfer", "p0.r0/transfer", replace(merged, generation=1, epoch=5))
    world.post("d0.r0/transfer", "p0.r0/transfer", replace(merged, generation=1, chunk_index=3))
    world.run()
    assert world.snapshot() == before
    world.hold = lambda address, job: False
    handoff.pull()
    world.run()
    world.assert_restored([FIRST])


def test_status_says_what_each_attempt_waits_for() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.run()
    values, rows = world.transfer("d0", 0).status(5)
    assert dict(values)["receives"] == 1
    assert rows[0][:4] == ("first", 0, "receive open", "chunks, PullKVCache")
    assert world.transfer("p0", 0).status(5)[1][0][2] == "push open"
    assert world.staging(0).status(5)[1][0][2] == "granted"
    assert rank_address("d0", 0, "transfer") in world.machines and D_ENGINE in world.inbox
    assert not handoff.of(Restored)
