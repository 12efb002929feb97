"""What goes wrong in a transfer: given up, aborted, lost, failed. Writers are drained before anything is freed.

Cases C16 to C20, C36 to C39 of the hand-off list as far as transfer and staging decide them.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from actors.runtime.config import Options
from actors.transfer.jobs import MergeJob, PullJob, UnmapPeer, WriteJob
from messages.base import Message
from messages.cluster import InstanceLost, LinkFailed, LinkPeer, PeerLinked, UnlinkPeer
from messages.handoff import TransferMode
from messages.lifecycle import PeerLost
from messages.transfer import (
    AbortPush,
    ChunkArrived,
    FreeLease,
    LeaseFreed,
    LeaseGranted,
    OpenPush,
    PushDrained,
    PushFailed,
    ReceiveRefused,
    ReceiveReleased,
    Restored,
    RestoreFailed,
)
from tests.oracle.world import UNTOUCHED, fill_instance, geometry
from tests.transfer.cluster import D_ENGINE, P_ENGINE, Cluster, Handoff, info
from tests.transfer.test_handoff import CHUNK, FIRST, SECOND, cluster


def begun(world: Cluster, handoff: Handoff) -> None:
    """Reserve, open and compute, with writes held back."""
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.run()
    world.hold = lambda address, job: isinstance(job, WriteJob)
    handoff.compute(CHUNK)
    world.run()
    assert any(isinstance(job, WriteJob) for _, job in world.jobs)


def released(handoff: Handoff) -> set[int]:
    return {message.rank for message in handoff.of(ReceiveReleased) if message.epoch == handoff.epoch}


def lease_is_free(world: Cluster, rank: int = 0) -> bool:
    return dict(world.staging(rank).status(0)[0])["staging_used_bytes"] == 0


# -- giving up ----------------------------------------------------------------------------------------------------


def test_a_release_waits_for_a_slow_write_and_only_then_frees_the_lease() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    begun(world, handoff)
    handoff.release()
    world.run()
    assert not released(handoff) and not lease_is_free(world)
    world.hold = lambda address, job: isinstance(job, WriteJob) and address == "p0.r1/transfer"
    world.run()
    assert not released(handoff) and not lease_is_free(world)
    world.hold = lambda address, job: False
    world.run()
    assert released(handoff) == {0} and lease_is_free(world)


@pytest.mark.parametrize("topology", [(2, 1), (2, 2)])
def test_a_late_write_touches_nothing_of_the_next_owner(topology: tuple[int, int]) -> None:
    world = cluster(*topology)
    cancelled = Handoff(world, FIRST)
    begun(world, cancelled)
    cancelled.release()
    world.run()
    taker = Handoff(world, SECOND)
    taker.reserve()
    world.run()
    assert taker.opened()  # other rows, though the first lease still drains
    mine, theirs = ({w for m in h.leases for s in m.lease.sources for w in s.windows} for h in (taker, cancelled))
    assert not mine & theirs
    world.hold = lambda address, job: False
    world.run()
    assert released(cancelled) == set(range(topology[1]))
    taker.open_push()
    taker.compute(CHUNK)
    taker.pull()
    world.run()
    assert len(taker.restored()) == topology[1]
    for request in (cancelled, taker):
        request.close()
    world.run()
    assert world.nothing_is_left()
    if topology == (2, 1):
        world.assert_restored([SECOND])  # staged: no byte of the cancelled one came through


def test_released_blocks_are_never_written_again() -> None:
    world = cluster(2, 2)
    handoff = Handoff(world, FIRST)
    begun(world, handoff)
    handoff.release()
    world.hold = lambda address, job: False
    world.run()
    assert released(handoff) == {0, 1}
    before = [world.plane.regions[m.regions[0].region_id].copy() for m in world.targets]
    handoff.compute(CHUNK)
    world.run()
    after = [world.plane.regions[m.regions[0].region_id] for m in world.targets]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_an_abort_of_a_push_that_was_never_opened_keeps_it_from_ever_opening() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.release()
    world.run()
    assert released(handoff) == {0} and world.nothing_is_left()
    handoff.open_push(ready_tokens=FIRST.tokens)
    handoff.compute(CHUNK)
    world.run()
    assert world.nothing_is_left()
    assert np.all(world.plane.regions["d0.r0.1.staging"] == UNTOUCHED)


def test_an_epoch_that_was_released_never_opens_again_but_the_next_one_does() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.release()
    handoff.reserve()
    world.run()
    (refused,) = handoff.of(ReceiveRefused)
    assert "refused or released before" in refused.reason and world.nothing_is_left()
    Handoff(world, FIRST, epoch=1).whole(CHUNK)
    world.assert_restored([FIRST])


def test_a_release_before_the_lease_is_granted_gives_it_back() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    world.mangle = lambda sender, to, message: () if isinstance(message, LeaseGranted) else (message,)
    handoff.reserve()
    world.run()
    handoff.release()
    world.run()
    assert not released(handoff) and not lease_is_free(world)
    world.mangle = lambda sender, to, message: (message,)
    world.fire_timers()  # asks staging again
    world.run()
    assert released(handoff) == {0} and world.nothing_is_left()


def test_a_grant_for_an_attempt_that_nobody_knows_is_given_back() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    grants: list[Message] = []
    world.mangle = lambda sender, to, message: (
        (grants.append(message) or (message,)) if isinstance(message, LeaseGranted) else (message,)
    )
    handoff.whole(CHUNK)
    world.post("d0.r0/staging", "d0.r0/transfer", grants[0])
    world.run()
    assert world.nothing_is_left()


def test_abort_during_merge_frees_the_lease_once() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.hold = lambda address, job: isinstance(job, MergeJob)
    handoff.compute(CHUNK)
    world.run()
    handoff.release()
    world.run()
    assert not released(handoff), "the merge still writes target blocks"
    assert world.staging(0).status(0)[1][0][2] == "draining"
    world.hold = lambda address, job: False
    world.run()
    freed = [message for _, _, message in world.delivered if isinstance(message, LeaseFreed)]
    assert len(freed) == 1 and released(handoff) == {0}
    handoff.close()
    world.run()
    assert world.nothing_is_left()


@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
def test_a_release_waits_for_its_own_reads(mode: TransferMode) -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST, mode=mode)
    handoff.reserve()
    world.run()
    handoff.open_push()
    if mode == "PUSH":
        handoff.compute(CHUNK)
    world.hold = lambda address, job: isinstance(job, PullJob)
    handoff.pull()
    world.run()
    handoff.release()
    world.run()
    assert not released(handoff)
    world.hold = lambda address, job: False
    world.run()
    assert released(handoff) == {0}
    assert not handoff.restored() and not handoff.of(RestoreFailed)
    handoff.close()
    world.run()
    assert world.nothing_is_left()


def test_a_release_after_the_restore_is_answered_and_frees_once() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.whole(CHUNK)
    handoff.release()
    world.run()
    assert released(handoff) == {0} and world.nothing_is_left()
    assert sum(isinstance(message, FreeLease) for _, _, message in world.delivered) == 1


def test_repeated_releases_are_answered_each_time() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    begun(world, handoff)
    handoff.release()
    handoff.release()
    world.hold = lambda address, job: False
    world.run()
    handoff.release()
    world.run()
    assert len(handoff.of(ReceiveReleased)) == 2  # one for the drain, one for the question afterwards


@pytest.mark.parametrize("lost", [AbortPush, PushDrained, FreeLease, LeaseFreed])
def test_a_lost_message_of_the_drain_is_repeated(lost: type[Message]) -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    begun(world, handoff)
    world.hold = lambda address, job: False
    dropped: list[Message] = []

    def drop_first_two(sender: str, to: str, message: Message) -> tuple[Message, ...]:
        if isinstance(message, lost) and len(dropped) < 2:
            dropped.append(message)
            return ()
        return (message,)

    world.mangle = drop_first_two
    handoff.release()
    world.run()
    assert not released(handoff)
    for _ in range(2):
        world.fire_timers()
        world.run()
    assert released(handoff) == {0}
    handoff.close()
    world.run()
    assert world.nothing_is_left()


def test_closing_a_push_with_a_write_in_flight_forgets_it_with_that_write() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    begun(world, handoff)
    handoff.close()
    world.run()
    assert len(world.transfer("p0", 0).source.pushes) == 1
    world.hold = lambda address, job: False
    world.run()
    assert not world.transfer("p0", 0).source.pushes
    assert not [m for _, _, m in world.delivered if isinstance(m, ChunkArrived)]


# -- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [WriteJob, PullJob, MergeJob])
def test_a_job_that_fails_fails_the_restore_once_and_the_release_frees_everything(kind: type) -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.spoil = lambda address, job: "the disk is on fire" if isinstance(job, kind) else ""
    handoff.compute(CHUNK)
    handoff.pull()
    world.run()
    (failed,) = handoff.of(RestoreFailed)
    assert "the disk is on fire" in failed.reason and failed.rank == 0
    assert not handoff.restored()
    handoff.release()
    world.run()
    assert released(handoff) == {0}
    handoff.close()
    world.run()
    assert world.nothing_is_left()


def test_a_failed_push_is_told_to_target_and_own_engine() -> None:
    world = cluster(2, 2)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.spoil = lambda address, job: "torn" if address == "p0.r1/transfer" else ""
    handoff.compute(CHUNK)
    world.run()
    assert [m.source_rank for m in world.inbox[P_ENGINE] if isinstance(m, PushFailed)] == [1]
    assert [m.rank for m in handoff.of(RestoreFailed)] == [1]


@pytest.mark.parametrize(("told", "broken"), [("p0.r1", "d0.r0"), ("d0.r0", "p0.r1")])
def test_an_attempt_whose_messages_may_be_lost_fails_at_once_and_the_next_one_goes_through(
    told: str, broken: str
) -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    world.run()
    world.post(f"{told}/post", f"{told}/transfer", PeerLost(node="x0.r0", reason="the link broke"))
    world.run()
    assert not handoff.of(RestoreFailed), "nobody's link"
    world.post(f"{told}/post", f"{told}/transfer", PeerLost(node=broken, reason="the link broke"))
    handoff.compute(CHUNK)
    world.run()
    (failed,) = handoff.of(RestoreFailed)
    assert f"the link to {broken} broke" in failed.reason
    handoff.release()
    handoff.close()
    world.run()
    assert released(handoff) == {0} and world.nothing_is_left()


@pytest.mark.parametrize(("told", "broken"), [("p0.r1", "d0.r0"), ("d0.r0", "p0.r1")])
def test_a_link_that_breaks_when_everything_has_arrived_breaks_nothing(told: str, broken: str) -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    handoff.compute(CHUNK)
    world.run()
    world.hold = lambda address, job: isinstance(job, PullJob)
    handoff.pull()
    world.run()
    world.post(f"{told}/post", f"{told}/transfer", PeerLost(node=broken, reason="the link broke"))
    world.hold = lambda address, job: False
    world.run()
    assert len(handoff.restored()) == 1 and not handoff.of(RestoreFailed)


def test_a_chunk_larger_than_a_window_fails_the_push_with_the_numbers() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    handoff.open_push()
    handoff.compute(CHUNK + 1)
    world.run()
    (failed,) = handoff.of(RestoreFailed)
    assert "7 tokens" in failed.reason and "6" in failed.reason


def test_a_push_without_a_link_or_without_windows_is_refused() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    assert handoff.opened()
    leaseless = OpenPush(
        **handoff.ids,
        target_instance="d0",
        target_incarnation=1,
        mode="PUSH",
        source_block_ids=(),
        source_slot=0,
        target_block_ids=(),
        target_slot=0,
        leases=(),
    )
    world.post(P_ENGINE, "p0.r0/transfer", leaseless)
    world.post(P_ENGINE, "p0.r0/transfer", msgspec.structs.replace(leaseless, target_incarnation=4))
    world.run()
    reasons = [m.reason for m in world.inbox[P_ENGINE] if isinstance(m, PushFailed)]
    assert "no staging windows" in reasons[0] and "no link with d0 incarnation 4" in reasons[1]
    assert not world.transfer("p0", 0).source.pushes


def test_a_full_staging_area_refuses_and_takes_the_request_later() -> None:
    world = cluster(2, 1, options=Options(staging_mb=4))
    first, second = Handoff(world, FIRST), Handoff(world, SECOND)
    first.reserve()
    second.reserve()
    world.run()
    (refused,) = second.of(ReceiveRefused)
    assert "staging is full" in refused.reason and refused.request_id == "second"
    first.open_push()
    first.compute(CHUNK)
    first.pull()
    world.run()
    second = Handoff(world, SECOND, epoch=1)
    second.reserve()
    world.run()
    assert second.opened()


def test_what_was_refused_is_not_opened_by_a_doubled_message() -> None:
    """Its engine has forgotten it: nobody would release what a double opens."""
    world = cluster(2, 1, options=Options(staging_mb=4))
    first, second = Handoff(world, FIRST), Handoff(world, SECOND)
    first.reserve()
    second.reserve()
    world.run()
    first.release()
    second.reserve()  # the double: now there is room
    world.run()
    assert len(second.of(ReceiveRefused)) == 2 and not second.opened()
    assert world.nothing_is_left()


# -- lost peers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [UnlinkPeer, InstanceLost])
def test_a_lost_prefill_instance_counts_as_drained_and_is_unmapped_at_the_end(how: type[Message]) -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    begun(world, handoff)
    handoff.release()
    world.mangle = lambda sender, to, message: () if isinstance(message, PushDrained) else (message,)
    world.run()
    assert not released(handoff) and world.transfer("d0", 0).links.find("p0", 1)
    world.jobs.clear()  # the writers are dead
    more = {"reason": "killed"} if how is InstanceLost else {}
    world.post(D_ENGINE, "d0.r0/transfer", how(instance="p0", incarnation=1, **more))
    world.run()
    assert released(handoff) == {0} and lease_is_free(world)
    assert world.transfer("d0", 0).links.find("p0", 1) is None
    assert not any(region.startswith("p0.") for region in world.plane.attached)


def test_a_lost_prefill_instance_fails_what_it_still_owed() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    begun(world, handoff)
    world.post(D_ENGINE, "d0.r0/transfer", UnlinkPeer(instance="p0", incarnation=1))
    world.run()
    (failed,) = handoff.of(RestoreFailed)
    assert "p0 incarnation 1 is lost" in failed.reason
    assert world.transfer("d0", 0).links.find("p0", 1) is not None, "the lease still refers to its plan"
    handoff.release()
    world.run()
    assert released(handoff) == {0}
    assert world.transfer("d0", 0).links.find("p0", 1) is None
    assert not [m for _, to, m in world.delivered if isinstance(m, AbortPush)], "the dead need no abort"


def test_a_prefill_instance_lost_while_the_lease_is_asked_for_is_refused() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    world.mangle = lambda sender, to, message: () if isinstance(message, LeaseGranted) else (message,)
    handoff.reserve()
    world.run()
    world.post(D_ENGINE, "d0.r0/transfer", UnlinkPeer(instance="p0", incarnation=1))
    world.run()
    world.mangle = lambda sender, to, message: (message,)
    world.fire_timers()
    world.run()
    assert "lost" in handoff.of(ReceiveRefused)[0].reason
    assert lease_is_free(world) and not world.transfer("d0", 0).target.receives


def test_a_lost_decode_instance_ends_its_pushes_and_is_unmapped_after_the_last_write() -> None:
    world = cluster(2, 1)
    handoff = Handoff(world, FIRST)
    begun(world, handoff)
    for rank in (0, 1):
        world.post(P_ENGINE, f"p0.r{rank}/transfer", UnlinkPeer(instance="d0", incarnation=1))
    world.run()
    assert world.transfer("p0", 0).links.find("d0", 1) is not None
    assert not any(isinstance(job, UnmapPeer) for _, job in world.jobs)
    world.hold = lambda address, job: False
    world.run()
    assert not world.transfer("p0", 0).source.pushes
    assert world.transfer("p0", 0).links.find("d0", 1) is None
    handoff.open_push()
    world.run()
    assert [m for m in world.inbox[P_ENGINE] if isinstance(m, PushFailed)] == []  # that epoch is over: late


def test_a_prefill_instance_that_came_back_is_linked_beside_its_former_life() -> None:
    world = cluster(2, 1)
    old = Handoff(world, FIRST)
    begun(world, old)
    for rank in (0, 1):
        world.machines.pop(f"p0.r{rank}/transfer")
    world.jobs.clear()
    world.sources = world._start("p0", "PREFILL", 2, 2)
    fill_instance(world.plane, world.sources, [SECOND])
    world.link()
    fresh = Handoff(world, SECOND)
    world.hold = lambda address, job: False
    fresh.whole(CHUNK)
    assert len(fresh.restored()) == 1
    stale = next(m for _, _, m in world.delivered if isinstance(m, ChunkArrived))
    before = world.snapshot()
    world.post("p0.r0/transfer", "d0.r0/transfer", msgspec.structs.replace(stale, request_id="first"))
    world.run()
    assert world.snapshot() == before
    old.release()
    world.post(D_ENGINE, "d0.r0/transfer", UnlinkPeer(instance="p0", incarnation=1))
    world.run()
    assert released(old) == {0}
    world.assert_restored([SECOND])


# -- links --------------------------------------------------------------------------------------------------------


def failed_link(world: Cluster, message: LinkPeer, to: str = "d0.r0/transfer", *, final: bool = True) -> str:
    world.post(D_ENGINE, to, message)
    world.run()
    (failed,) = world.take(D_ENGINE, LinkFailed)
    assert failed.final == final, "the same two layouts will not fit the next time either"
    return failed.reason


def test_a_source_that_lies_is_refused_at_the_link_with_the_reason() -> None:
    world = cluster(2, 1, link=False)
    own = tuple(world.targets)
    lying = info([world.sources[0], msgspec.structs.replace(world.sources[1], block_size=32)], "PREFILL")
    assert "block size 32" in failed_link(world, LinkPeer(peer=lying, own_manifests=own))
    omitting = msgspec.structs.replace(world.sources[1], tensors=world.sources[1].tensors[1:])
    peer = info([world.sources[0], omitting], "PREFILL")
    assert "target.0.CONV: source rank 1" in failed_link(world, LinkPeer(peer=peer, own_manifests=own))
    stale = msgspec.structs.replace(info(world.sources, "PREFILL"), incarnation=9)
    assert "alive is 9" in failed_link(world, LinkPeer(peer=stale, own_manifests=own))


def test_a_link_between_roles_that_hand_nothing_over_is_refused() -> None:
    world = cluster(2, 1, link=False)
    message = LinkPeer(peer=info(world.sources, "MIX"), own_manifests=tuple(world.targets))
    assert "only PREFILL and DECODE" in failed_link(world, message)


def test_a_link_that_is_asked_for_before_all_own_ranks_are_ready_may_be_tried_again() -> None:
    world = cluster(2, 1, link=False)
    message = LinkPeer(peer=info(world.sources, "PREFILL"), own_manifests=())
    assert "named no manifest of rank 0" in failed_link(world, message, final=False)
    world.post(D_ENGINE, "d0.r0/transfer", msgspec.structs.replace(message, own_manifests=tuple(world.targets)))
    world.run()
    assert len(world.take(D_ENGINE, PeerLinked)) == 1


def test_a_lease_larger_than_staging_is_refused_at_the_link_with_the_option_to_raise() -> None:
    world = cluster(4, 1, kv_heads=4, link=False, options=Options(staging_mb=4))
    message = LinkPeer(peer=info(world.sources, "PREFILL"), own_manifests=tuple(world.targets))
    assert "raise staging_mb" in failed_link(world, message)


def test_a_staging_area_that_cannot_hold_one_lease_stops_the_start_with_the_option_to_raise() -> None:
    model = geometry(kv_heads=4, key_heads=4, value_heads=8, head_dim=256)
    world = Cluster(model, 2, 1, chunk_tokens=2048, options=Options(staging_mb=1), link=False)
    (failure,) = world.failures
    assert failure.fatal and "staging_mb 1 cannot hold one lease" in failure.reason and "2048 tokens" in failure.reason


def test_leases_without_windows_stop_the_start() -> None:
    world = Cluster(geometry(), 2, 1, options=Options(lease_windows=0), link=False)
    (failure,) = world.failures
    assert failure.fatal and "lease_windows 0" in failure.reason and "at least 1" in failure.reason


@pytest.mark.parametrize("windows", [1, 2, 3, 5])
def test_any_number_of_windows_carries_the_prompt(windows: int) -> None:
    world = cluster(2, 1, options=Options(staging_mb=64, lease_windows=windows))
    Handoff(world, FIRST).whole(4)
    world.assert_restored([FIRST])
    assert world.nothing_is_left()


def test_without_staging_mb_there_is_room_for_the_configured_number_of_leases() -> None:
    world = cluster(4, 1, options=Options(staging_leases=3))
    for index in range(3):
        handoff = Handoff(world, FIRST, epoch=index)
        handoff.reserve()
        world.run()
        assert handoff.opened()


def test_linking_twice_is_answered_twice_and_maps_once() -> None:
    world = cluster(2, 1)
    message = LinkPeer(peer=info(world.sources, "PREFILL"), own_manifests=tuple(world.targets))
    world.post(D_ENGINE, "d0.r0/transfer", message)
    world.run()
    assert len(world.take(D_ENGINE, PeerLinked)) == 1
    assert len(world.transfer("d0", 0).links) == 1


def test_a_peer_lost_while_it_is_being_mapped_is_unmapped() -> None:
    world = cluster(2, 1, link=False)
    world.hold = lambda address, job: True
    message = LinkPeer(peer=info(world.sources, "PREFILL"), own_manifests=tuple(world.targets))
    world.post(D_ENGINE, "d0.r0/transfer", message)
    world.post(D_ENGINE, "d0.r0/transfer", UnlinkPeer(instance="p0", incarnation=1))
    world.run()
    world.hold = lambda address, job: False
    world.run()
    (failed,) = world.take(D_ENGINE, LinkFailed)
    assert not failed.final
    assert len(world.transfer("d0", 0).links) == 0
    assert not any(region.startswith("p0.") for region in world.plane.attached)


def test_nothing_opens_before_the_link_stands() -> None:
    world = cluster(2, 1, link=False)
    handoff = Handoff(world, FIRST)
    handoff.reserve()
    world.run()
    assert "no link with p0" in handoff.of(ReceiveRefused)[0].reason
    handoff.reserve()
    world.run()
    assert "refused or released before" in handoff.of(ReceiveRefused)[-1].reason, (
        "its double comes when the link may stand"
    )


# -- chance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_lost_or_late_a_release_frees_everything(seed: int) -> None:
    """Drop and delay at random, give up at a random moment, heal, and demand convergence (C39)."""
    world = cluster(*[(2, 1), (4, 2), (2, 2), (1, 2)][seed % 4], seed=seed)
    chance = world.random
    assert chance is not None
    handoff = Handoff(world, FIRST, mode="PULL" if seed % 5 == 0 else "PUSH")
    handoff.reserve()
    world.run()
    handoff.open_push()
    local = ("Done", "Mapped", "Created")

    def lossy(sender: str, to: str, message: Message) -> tuple[Message, ...]:
        if type(message).__name__.endswith(local) or sender.endswith(("engine", "worker")):
            return (message,)
        return ((), (message,), (message, message))[chance.choices((0, 1, 2), (1, 6, 2))[0]]

    world.mangle = lossy
    if handoff.mode == "PUSH":
        handoff.compute(CHUNK)
    handoff.pull()
    for _ in range(chance.randrange(120)):
        world.step()
    handoff.release()
    world.run()
    world.mangle = lambda sender, to, message: (message,)
    for _ in range(3):
        world.fire_timers()
        handoff.release()  # the answer may have been lost: engines ask again
        world.run()
    assert released(handoff) == set(range(len(world.targets)))
    outcomes = {m.rank for m in handoff.of(Restored)} & {m.rank for m in handoff.of(RestoreFailed)}
    assert not outcomes
    handoff.close()
    world.run()
    assert world.nothing_is_left()
