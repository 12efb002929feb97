"""Leases: disjoint aligned windows, one merge at a time, and a table of transitions that refuses everything else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.runtime.machine import Run, Send
from actors.transfer.attempts import IllegalTransition, Tombstones
from actors.transfer.jobs import MergeJob
from actors.transfer.plan import plan
from actors.transfer.push import TRANSITIONS as PUSH_TRANSITIONS
from actors.transfer.receive import TRANSITIONS as RECEIVE_TRANSITIONS
from actors.transfer.receive import ReceiveEvent, ReceiveState
from actors.transfer.staging import (
    RANGE_ALIGNMENT_BYTES,
    WINDOW_ALIGNMENT_BYTES,
    StagingSize,
    StagingSpace,
    lease_bytes,
)
from actors.transfer.staging_machine import TRANSITIONS, Lease, LeaseEvent, LeaseState, StagingMachine
from messages.base import Message
from messages.handoff import RankLease
from messages.layout import RegionDescriptor
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
from tests.oracle.world import NaivePlane, geometry, instance

OWNER = "d0.r0/transfer"
MIB = 1 << 20


def machine(size_bytes: int = 64 * MIB) -> StagingMachine:
    made = StagingMachine(0)
    region = RegionDescriptor(region_id="s", size_bytes=size_bytes, backend="naive", location="s")
    made.handle(0, OWNER, StagingReady(region=region))
    return made


def grant(name: str, *, sizes: tuple[int, ...] = (100_000, 50_000), windows: int = 2, epoch: int = 0) -> GrantLease:
    return GrantLease(
        request_id=name,
        epoch=epoch,
        source_instance="p0",
        source_incarnation=1,
        source_ranks=tuple(range(len(sizes))),
        window_bytes=sizes,
        window_count=windows,
    )


def said(made: StagingMachine, message: Message) -> list[Message]:
    """What the machine says, and the jobs it asks for as they are."""
    effects = made.handle(0, OWNER, message)
    return [e.message for e in effects if isinstance(e, Send)] + [e.job for e in effects if isinstance(e, Run)]  # type: ignore[list-item]


def leased(made: StagingMachine, name: str, **more: int) -> RankLease:
    (answer,) = said(made, grant(name, **more))  # type: ignore[arg-type]
    assert isinstance(answer, LeaseGranted)
    return answer.lease


def restore(name: str, lease: RankLease, piece: int = 0, *, epoch: int = 0, generation: int | None = None) -> Restore:
    return Restore(
        request_id=name,
        epoch=epoch,
        generation=lease.generation if generation is None else generation,
        kind="chunk",
        piece_index=piece,
        window_index=piece % 2,
        token_start=0,
        token_count=4,
        target_block_ids=(0,),
        target_slot=0,
    )


def done(job: object, error: str = "") -> MergeDone:
    assert isinstance(job, MergeJob)
    return MergeDone(
        request_id=job.request_id,
        epoch=job.epoch,
        generation=job.generation,
        kind=job.kind,
        piece_index=job.piece_index,
        bytes_merged=7,
        merge_ms=1.5,
        error=error,
    )


def free(name: str, lease: RankLease, generation: int | None = None) -> FreeLease:
    return FreeLease(request_id=name, epoch=0, generation=lease.generation if generation is None else generation)


# -- leases -------------------------------------------------------------------------------------------------------


def test_windows_of_all_leases_are_disjoint_and_every_range_is_aligned() -> None:
    made = machine()
    taken = []
    for index in range(4):
        lease = leased(made, f"r{index}")
        for source in lease.sources:
            assert source.windows[0].offset_bytes % RANGE_ALIGNMENT_BYTES == 0
            for window in source.windows:
                assert window.offset_bytes % WINDOW_ALIGNMENT_BYTES == 0
                taken.append((window.offset_bytes, window.offset_bytes + window.size_bytes))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


def test_a_lease_that_does_not_fit_is_refused_with_the_numbers() -> None:
    made = machine(8 * MIB)
    leased(made, "one")
    (refused,) = said(made, grant("two", sizes=(3 * MIB,)))
    assert isinstance(refused, LeaseRefused) and "6 MiB, 4 of 8 MiB granted" in refused.reason
    assert isinstance(said(made, grant("three"))[0], LeaseGranted)


def test_nothing_is_granted_before_the_region_exists() -> None:
    assert isinstance(said(StagingMachine(0), grant("one"))[0], LeaseRefused)


def test_generations_grow_over_all_leases() -> None:
    made = machine()
    generations = []
    for index in range(3):
        lease = leased(made, f"r{index}")
        generations.append(lease.generation)
        said(made, free(f"r{index}", lease))
    assert generations == sorted(set(generations))


def test_asking_twice_for_the_same_attempt_gives_the_same_lease() -> None:
    made = machine()
    assert leased(made, "one") == leased(made, "one")
    assert leased(made, "one") != leased(made, "one", epoch=1)


def test_freed_rows_are_granted_again_under_another_generation() -> None:
    made = machine(4 * MIB)
    lease = leased(made, "one")
    assert isinstance(said(made, grant("two"))[0], LeaseRefused)
    assert said(made, free("one", lease)) == [LeaseFreed(request_id="one", epoch=0, generation=lease.generation)]
    again = leased(made, "two")
    assert again.generation > lease.generation
    assert again.sources == lease.sources


# -- merges -------------------------------------------------------------------------------------------------------


def test_one_merge_runs_at_a_time_in_order_of_arrival() -> None:
    made = machine()
    one, two = leased(made, "one"), leased(made, "two")
    (job,) = said(made, restore("one", one))
    assert said(made, restore("two", two)) == []
    assert said(made, restore("one", one, 1)) == []
    order = []
    while job is not None:
        answer, *following = said(made, done(job))
        assert isinstance(answer, Merged) and answer.merge_ms == 1.5
        order.append((answer.request_id, answer.piece_index))
        job = following[0] if following else None
    assert order == [("one", 0), ("two", 0), ("one", 1)]


def test_a_merge_reads_the_window_of_each_source() -> None:
    made = machine()
    lease = leased(made, "one")
    (job,) = said(made, restore("one", lease, 3))
    assert isinstance(job, MergeJob)
    assert job.windows == tuple((source.source_rank, source.windows[1].offset_bytes) for source in lease.sources)


def test_a_merge_that_fails_says_so_and_the_next_one_runs() -> None:
    made = machine()
    one, two = leased(made, "one"), leased(made, "two")
    (job,) = said(made, restore("one", one))
    said(made, restore("two", two))
    failed, following = said(made, done(job, "no"))
    assert isinstance(failed, MergeFailed) and failed.reason == "no"
    assert isinstance(following, MergeJob) and following.request_id == "two"


def test_a_lease_freed_while_its_merge_runs_drains_first_and_its_waiting_merges_never_run() -> None:
    made = machine()
    one, two = leased(made, "one"), leased(made, "two")
    (job,) = said(made, restore("one", one))
    said(made, restore("one", one, 1))
    said(made, restore("two", two))
    assert said(made, free("one", one)) == []
    assert said(made, free("one", one)) == []
    freed, following = said(made, done(job))
    assert freed == LeaseFreed(request_id="one", epoch=0, generation=one.generation)
    assert isinstance(following, MergeJob) and following.request_id == "two"


def test_a_lease_freed_while_it_waits_to_merge_is_free_at_once() -> None:
    made = machine()
    one, two = leased(made, "one"), leased(made, "two")
    said(made, restore("one", one))
    said(made, restore("two", two))
    assert isinstance(said(made, free("two", two))[0], LeaseFreed)


def test_late_messages_change_nothing() -> None:
    made = machine()
    lease = leased(made, "one")
    (job,) = said(made, restore("one", lease))
    before = made.status(0)[1]
    stale = lease.generation + 7
    assert said(made, restore("one", lease, 1, generation=stale)) == []
    assert said(made, restore("one", lease, 1, epoch=3)) == []
    assert said(made, restore("two", lease)) == []
    assert said(made, restore("one", lease)) == []  # the same piece again
    assert said(made, free("one", lease, stale)) == [LeaseFreed(request_id="one", epoch=0, generation=stale)]
    other = done(job)
    assert said(made, MergeDone(**{**_fields(other), "piece_index": 5})) == []
    assert said(made, MergeDone(**{**_fields(other), "generation": stale})) == []
    assert made.status(0)[1] == before
    assert isinstance(said(made, done(job))[0], Merged)
    assert said(made, done(job)) == []


def _fields(message: MergeDone) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


# -- tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", LeaseEvent)
@pytest.mark.parametrize("state", LeaseState)
def test_an_illegal_transition_raises_one_named_error_and_changes_nothing(state: LeaseState, event: LeaseEvent) -> None:
    lease = Lease("one", 0, 3, OWNER, "p0", 1, 0, RankLease(target_rank=0, generation=3), 0, state)
    if TRANSITIONS.allows(state, event):
        lease.advance(event)
        assert lease.state is TRANSITIONS.rows[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event.value} while {state.value}"):
            lease.advance(event)
        assert lease.state is state


def test_every_state_but_the_last_can_be_left_and_every_state_can_be_reached() -> None:
    for table, first, last in (
        (TRANSITIONS, LeaseState.GRANTED, {LeaseState.FREE}),
        (RECEIVE_TRANSITIONS, ReceiveState.OPENING, {ReceiveState.FREEING}),
    ):
        rows = dict(table.rows)
        reached, frontier = {first}, [first]
        while frontier:
            here = frontier.pop()
            for (state, _), following in rows.items():
                if state is here and following not in reached:
                    reached.add(following)  # type: ignore[arg-type]
                    frontier.append(following)  # type: ignore[arg-type]
        assert reached == set(type(first))
        assert {state for state, _ in rows} == set(type(first)) - last


def test_whatever_still_writes_can_be_given_up() -> None:
    for state in (ReceiveState.OPENING, ReceiveState.OPEN, ReceiveState.RESTORING, ReceiveState.FAILED):
        assert RECEIVE_TRANSITIONS.rows[state, ReceiveEvent.RELEASE_ASKED] is ReceiveState.DRAINING
    assert len(PUSH_TRANSITIONS.rows) == 12


def test_tombstones_are_bounded_and_forget_the_oldest() -> None:
    ended = Tombstones(limit=3)
    for index in range(5):
        ended.add(("r", index))
    ended.add(("r", 2))
    ended.add(("r", 5))
    assert len(ended) == 3
    assert [index for index in range(6) if ("r", index) in ended] == [2, 4, 5]


# -- sizes --------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * MIB)), max_size=40))
def test_granted_ranges_never_overlap_and_everything_comes_back(steps: list[tuple[bool, int]]) -> None:
    space = StagingSpace(32 * MIB)
    taken: list[tuple[int, int]] = []
    for take, size in steps:
        if take or not taken:
            offset = space.take(size)
            if offset is not None:
                assert offset % RANGE_ALIGNMENT_BYTES == 0 and offset + size <= 32 * MIB
                assert all(offset + size <= start or start + length <= offset for start, length in taken)
                taken.append((offset, size))
        else:
            space.give_back(taken.pop(size % len(taken))[0])
    for offset, _ in taken:
        space.give_back(offset)
    assert space.used_bytes == 0
    assert space.take(32 * MIB) == 0


def test_giving_back_what_was_not_taken_is_an_error() -> None:
    space = StagingSpace(4 * MIB)
    with pytest.raises(KeyError):
        space.give_back(0)


@pytest.mark.parametrize("target_tp", [1, 2, 4])
@pytest.mark.parametrize("source_tp", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("windows", [1, 2, 3])
def test_the_region_has_room_for_a_lease_of_any_peer(source_tp: int, target_tp: int, windows: int) -> None:
    model = geometry(kv_heads=24, key_heads=24, value_heads=48, head_dim=64)
    sources = instance(NaivePlane(), model, "p0", source_tp, speculative_tokens=2, chunk_tokens=64)
    targets = instance(NaivePlane(), model, "d0", target_tp, speculative_tokens=2, chunk_tokens=64)
    for target in targets:
        size = StagingSize(target, windows)
        needed = lease_bytes(plan(sources, target), windows)
        assert needed <= size.lease_bytes
        assert size.lease_min_bytes <= size.lease_bytes
