"""A decode instance's side of the hand-off."""

from __future__ import annotations

from typing import Any

import pytest

from messages.base import control_address
from messages.batch import ExecuteBatch
from messages.cluster import ClusterView, InstanceLost, LinkPeer, UnlinkPeer
from messages.handoff import (
    AddNewRequest,
    FirstGeneration,
    HandoffComplete,
    HandoffFailed,
    ReleaseRequest,
    RequestAccepted,
    RequestRefused,
    RequestReleased,
)
from messages.lifecycle import Drain
from messages.requests import CancelRequest, Failed, Finished, Generation, SamplingParams
from messages.transfer import (
    AllRestored,
    LeasesRefused,
    LeasesReserved,
    PullKVCache,
    ReceiveReleased,
    ReleaseReceive,
    ReserveLeases,
    RestoreFailed,
)
from tests.scheduler.harness import EOS, Harness, info
from tests.scheduler.invariants import check_idle

P0 = control_address("p0", "scheduler")
ENGINE = control_address("d0", "engine")


def decode(**changes: Any) -> Harness:
    """A decode instance that is linked with p0."""
    harness = Harness("DECODE", "d0", **changes)
    harness.link(info("p0", "PREFILL"))
    harness.sent.clear()
    return harness


def offer(request_id: str = "a", prompt: int = 5, epoch: int = 0, **changes: Any) -> AddNewRequest:
    """p0 offers a request."""
    sampling = {name: changes.pop(name) for name in list(changes) if name in SamplingParams.__struct_fields__}
    values: dict[str, Any] = dict(
        request_id=request_id,
        epoch=epoch,
        source_instance="p0",
        source_incarnation=1,
        prompt_token_ids=tuple(range(100, 100 + prompt)),
        reply_to="front/gateway",
        priority="online",
        mode="PUSH",
    )
    sampling = {"max_tokens": 4, "eos_token_ids": (EOS,), **sampling}
    return AddNewRequest(**{**values, **changes}, sampling=SamplingParams(**sampling))


def first_generation(message: AddNewRequest, **changes: Any) -> FirstGeneration:
    """p0 has prefilled what it offered."""
    delivered = message.delivered_token_ids[:-1]
    total = len(message.prompt_token_ids) + len(delivered)
    values: dict[str, Any] = dict(
        request_id=message.request_id,
        epoch=message.epoch,
        source_instance="p0",
        source_incarnation=1,
        token_id=1000 + total,
        token_index=len(delivered),
        chunk_count=1,
        computed_tokens=total,
        source_block_ids=(0, 1),
        source_slot=0,
        bootstrap_hidden=b"hidden",
        bootstrap_dtype="float32",
    )
    return FirstGeneration(**{**values, **changes})


def all_restored(request_id: str = "a", epoch: int = 0) -> AllRestored:
    return AllRestored(request_id=request_id, epoch=epoch, bytes_moved=9, push_ms=1, pull_ms=2, merge_ms=3, sync_ms=4)


def reserve(harness: Harness, message: AddNewRequest) -> RequestAccepted:
    """Offer, and have the engine grant."""
    harness.tell(message, P0)
    harness.one(ReserveLeases)
    harness.tell(LeasesReserved(request_id=message.request_id, epoch=message.epoch, leases=()), ENGINE)
    return harness.one(RequestAccepted)


def restore(harness: Harness, message: AddNewRequest) -> None:
    """All the way into the decode queue."""
    reserve(harness, message)
    harness.tell(first_generation(message), P0)
    harness.one(PullKVCache)
    harness.tell(all_restored(message.request_id, message.epoch), ENGINE)
    harness.one(HandoffComplete)


def released(harness: Harness, request_id: str = "a", epoch: int = 0) -> None:
    harness.tell(ReceiveReleased(request_id=request_id, epoch=epoch, rank=-1), ENGINE)


def test_a_hand_off_is_reserved_restored_and_decoded_from_token_1() -> None:
    harness = decode(speculative_tokens=3)
    message = offer(prompt=8)
    accepted = reserve(harness, message)
    assert len(accepted.target_block_ids) == 2  # exactly the prompt's blocks, however many are held (C03)
    harness.tell(first_generation(message), P0)
    pull = harness.one(PullKVCache)
    assert pull.source_block_ids == (0, 1)
    harness.none(ExecuteBatch)  # I2: nothing reads the caches before all ranks restored
    harness.tell(all_restored(), ENGINE)
    harness.one(HandoffComplete)
    batch = harness.one(ExecuteBatch)
    (start,), (row,) = batch.opened, batch.rows
    assert start.restored and start.bootstrap_hidden == b"hidden" and start.output_token_ids == (1008,)
    assert (row.token_ids, row.start, row.speculative_tokens, row.is_prefill) == ((1008,), 8, 2, False)
    harness.answer(batch, {"a": (1009, 1010, 1011)}, drafted=2, accepted=2)
    assert harness.one(Generation).first_index == 1
    finished = harness.one(Finished)
    assert (finished.prefill_instance, finished.decode_instance, finished.usage.completion_tokens) == ("p0", "d0", 4)
    assert (finished.times.pull_ms, finished.times.bytes_moved) == (2, 9)
    check_idle(harness.machine)


def test_no_room_is_404_and_leaves_nothing_behind() -> None:
    harness = decode(block_count=4)
    reserve(harness, offer("a", 10, max_tokens=2))
    harness.tell(offer("b", 10, max_tokens=2), P0)
    refused = harness.one(RequestRefused)
    assert refused.code == 404 and "blocks" in refused.reason
    harness.none(ReserveLeases)


def test_what_can_never_fit_is_413_with_the_numbers() -> None:
    harness = decode(block_count=4)
    harness.tell(offer("a", 12, max_tokens=5), P0)
    refused = harness.one(RequestRefused)
    assert refused.code == 413 and "5 blocks" in refused.reason and "has 4" in refused.reason
    check_idle(harness.machine)


def test_a_bad_request_is_400() -> None:
    harness = decode()
    harness.tell(offer("a", 48), P0)
    assert harness.one(RequestRefused).code == 400


def test_leases_that_are_refused_are_404_and_free_the_blocks() -> None:
    harness = decode()
    harness.tell(offer(), P0)
    harness.tell(LeasesRefused(request_id="a", epoch=0, reason="staging is full"), ENGINE)
    refused = harness.one(RequestRefused)
    assert (refused.code, refused.reason) == (404, "staging is full")
    check_idle(harness.machine)


def test_an_offer_before_the_link_is_up_is_404() -> None:
    harness = Harness("DECODE", "d0")
    harness.tell(offer(), P0)
    assert harness.one(RequestRefused).code == 404


@pytest.mark.parametrize("stage", ["reserving", "reserved", "restoring"])
def test_a_release_frees_only_after_the_writers_drained(stage: str) -> None:
    harness = decode()
    message = offer()
    if stage == "reserving":
        harness.tell(message, P0)
    else:
        reserve(harness, message)
    if stage == "restoring":
        harness.tell(first_generation(message), P0)
    harness.tell(ReleaseRequest(request_id="a", epoch=0, reason="cancelled"), P0)
    harness.one(ReleaseReceive)
    harness.none(RequestReleased)
    assert harness.machine.pool is not None and harness.machine.pool.blocks.free_count < 16
    harness.tell(LeasesReserved(request_id="a", epoch=0, leases=()), ENGINE)
    harness.tell(all_restored(), ENGINE)
    released(harness)
    harness.one(RequestReleased)
    harness.none(RequestAccepted)
    harness.none(HandoffComplete)
    check_idle(harness.machine)


def test_a_release_of_a_decoding_request_stops_it() -> None:
    harness = decode()
    restore(harness, offer())
    harness.tell(ReleaseRequest(request_id="a", epoch=0, reason="superseded"), P0)
    harness.one(RequestReleased)
    harness.step()
    harness.none(Generation)
    check_idle(harness.machine)


def test_a_release_that_overtakes_its_offer_keeps_it_out() -> None:
    harness = decode()
    harness.tell(ReleaseRequest(request_id="a", epoch=0, reason="cancelled"), P0)
    harness.one(RequestReleased)
    harness.tell(offer(), P0)
    harness.none(ReserveLeases)
    assert harness.one(RequestRefused).code == 404
    reserve(harness, offer(epoch=1))


def test_a_silent_prefill_instance_loses_its_reservation() -> None:
    harness = decode()
    reserve(harness, offer())
    harness.fire("reservation")
    harness.one(ReleaseReceive)
    released(harness)
    assert "reservation_timeout_ms" in harness.one(HandoffFailed).reason
    check_idle(harness.machine)


def test_a_failed_restore_releases_every_rank_and_is_never_decoded() -> None:
    harness = decode()
    message = offer()
    reserve(harness, message)
    harness.tell(first_generation(message), P0)
    harness.tell(RestoreFailed(request_id="a", epoch=0, rank=1, reason="torn"), ENGINE)
    harness.one(ReleaseReceive)
    harness.tell(all_restored(), ENGINE)
    harness.none(HandoffComplete)
    released(harness)
    assert "torn" in harness.one(HandoffFailed).reason
    harness.tell(first_generation(message), P0)
    harness.one(HandoffFailed)
    harness.none(ExecuteBatch)
    check_idle(harness.machine)


def test_a_restore_that_takes_too_long_fails() -> None:
    harness = decode()
    message = offer()
    reserve(harness, message)
    harness.tell(first_generation(message), P0)
    harness.fire("restore")
    harness.one(ReleaseReceive)
    released(harness)
    harness.one(HandoffFailed)
    check_idle(harness.machine)


@pytest.mark.parametrize("field, value", [("token_index", 1), ("computed_tokens", 4), ("source_incarnation", 0)])
def test_a_first_generation_that_contradicts_the_offer_fails_the_attempt(field: str, value: int) -> None:
    harness = decode()
    message = offer()
    reserve(harness, message)
    harness.tell(first_generation(message, **{field: value}), P0)
    harness.none(PullKVCache)
    harness.one(ReleaseReceive)
    released(harness)
    harness.one(HandoffFailed)
    check_idle(harness.machine)


def test_a_dead_prefill_instance_loses_what_it_had_not_handed_off() -> None:
    harness = decode()
    restore(harness, offer("a"))
    reserve(harness, offer("b"))
    harness.tell(InstanceLost(instance="p0", incarnation=1, reason="killed"))
    harness.one(UnlinkPeer)
    assert harness.one(ReleaseReceive).request_id == "b"
    released(harness, "b")
    harness.none(HandoffFailed)
    harness.run()
    assert harness.one(Finished).request_id == "a"
    check_idle(harness.machine)


def test_messages_of_a_dead_incarnation_are_ignored() -> None:
    harness = decode()
    harness.tell(InstanceLost(instance="p0", incarnation=1, reason="killed"))
    harness.sent.clear()
    harness.tell(offer(), P0)
    assert not harness.sent
    harness.tell(ClusterView(version=2, registry_incarnation=1, instances=(info("p0", "PREFILL", 1),)))
    harness.none(LinkPeer)


def test_a_restarted_prefill_instance_is_linked_anew_and_its_former_life_ends() -> None:
    harness = decode()
    reserve(harness, offer())
    view = ClusterView(version=2, registry_incarnation=1, instances=(info("d0", "DECODE"), info("p0", "PREFILL", 2)))
    harness.tell(view)
    harness.one(UnlinkPeer)
    assert harness.one(LinkPeer).peer.incarnation == 2
    harness.one(ReleaseReceive)


def test_absence_from_the_view_is_not_death() -> None:
    harness = decode()
    message = offer()
    reserve(harness, message)
    harness.tell(ClusterView(version=2, registry_incarnation=1, instances=(info("d0", "DECODE"),)))
    harness.none(ReleaseReceive)
    harness.tell(first_generation(message), P0)
    harness.one(PullKVCache)


def test_a_duplicate_offer_changes_nothing_and_another_requests_id_is_409() -> None:
    harness = decode()
    harness.link(info("p0", "PREFILL"), info("p1", "PREFILL"), version=2)
    harness.sent.clear()
    reserve(harness, offer())
    harness.tell(offer(), P0)
    assert not harness.sent
    harness.tell(offer(source_instance="p1"), control_address("p1", "scheduler"))
    assert harness.one(RequestRefused).code == 409
    restore(harness, offer("b"))


def test_a_newer_epoch_replaces_an_older_one_while_that_still_drains() -> None:
    harness = decode()
    reserve(harness, offer(epoch=0))
    reserve(harness, offer(epoch=1))
    harness.one(ReleaseReceive)
    harness.tell(offer(epoch=0), P0)
    harness.none(RequestAccepted)
    released(harness, epoch=0)
    harness.one(HandoffFailed)
    message = offer(epoch=1)
    harness.tell(first_generation(message), P0)
    harness.tell(all_restored(epoch=1), ENGINE)
    harness.one(HandoffComplete)
    harness.run()
    harness.one(Finished)
    check_idle(harness.machine)


def test_a_newer_attempt_from_the_gateway_stops_the_decoding_older_one() -> None:
    harness = decode()
    restore(harness, offer(epoch=0))
    batch = harness.one(ExecuteBatch)
    newer = offer(epoch=65536, delivered_token_ids=(1005,))
    reserve(harness, newer)
    harness.answer(batch)
    harness.none(Generation)
    harness.tell(first_generation(newer), P0)
    harness.tell(all_restored(epoch=65536), ENGINE)
    batch = harness.one(ExecuteBatch)
    assert batch.closed == ("a",) and batch.opened[0].epoch == 65536
    harness.answer(batch)
    assert harness.one(Generation).first_index == 1


def test_a_request_that_another_instance_began_decodes_on_from_its_last_delivered_token() -> None:
    """C29: the first step here begins where the next one would have begun there."""
    harness = decode(speculative_tokens=3)
    message = offer(prompt=7, delivered_token_ids=(1007, 1008, 1009), max_tokens=9)
    accepted = reserve(harness, message)
    assert len(accepted.target_block_ids) == 3  # seven tokens of the prompt, two delivered ones
    first = first_generation(message)
    assert (first.token_index, first.computed_tokens, first.token_id) == (2, 9, 1009)
    harness.tell(first, P0)
    harness.one(PullKVCache)
    harness.tell(all_restored(), ENGINE)
    batch = harness.one(ExecuteBatch)
    (start,), (row,) = batch.opened, batch.rows
    assert start.restored and start.output_token_ids == (1007, 1008, 1009)
    assert (row.token_ids, row.start, row.speculative_tokens) == ((1009,), 9, 3)
    harness.answer(batch)
    assert harness.one(Generation).first_index == 3


def test_a_lost_handoff_complete_is_said_again_when_asked() -> None:
    harness = decode()
    message = offer()
    restore(harness, message)
    harness.tell(first_generation(message), P0)
    harness.one(HandoffComplete)
    harness.run()
    harness.one(Finished)
    harness.tell(first_generation(message), P0)
    harness.one(HandoffComplete)
    check_idle(harness.machine)


def test_a_cancel_while_decoding_finishes_it_as_cancelled() -> None:
    harness = decode()
    restore(harness, offer())
    harness.tell(CancelRequest(request_id="a", epoch=65535))
    assert harness.one(Finished).reason == "cancelled"
    harness.step()
    check_idle(harness.machine)


def test_a_cancel_between_first_generation_and_decoding_frees_everything() -> None:
    harness = decode()
    message = offer()
    reserve(harness, message)
    harness.tell(first_generation(message), P0)
    harness.tell(CancelRequest(request_id="a", epoch=65535))
    harness.one(ReleaseReceive)
    harness.none(Finished)
    released(harness)
    harness.one(HandoffFailed)
    check_idle(harness.machine)


def test_a_cancel_of_an_older_attempt_leaves_the_newer_alone() -> None:
    harness = decode()
    restore(harness, offer(epoch=65536, delivered_token_ids=(7,)))
    harness.tell(CancelRequest(request_id="a", epoch=65535))
    harness.none(Finished)


def test_an_online_offer_takes_the_room_of_offline_sequences_when_their_step_is_over() -> None:
    harness = decode(block_count=4)
    restore(harness, offer("off", 9, max_tokens=4, priority="offline"))
    harness.tell(offer("on", 9, max_tokens=4), P0)
    harness.none(RequestRefused)
    harness.none(ReserveLeases)
    harness.step()
    harness.one(ReserveLeases)
    harness.none(ExecuteBatch)
    harness.tell(LeasesReserved(request_id="on", epoch=0, leases=()), ENGINE)
    harness.one(RequestAccepted)
    harness.tell(first_generation(offer("on", 9)), P0)
    harness.tell(all_restored("on"), ENGINE)
    batches = harness.run()
    assert [f.request_id for f in harness.take(Finished)] == ["on", "off"]
    again = next(start for batch in batches for start in batch.opened if start.request_id == "off")
    assert not again.restored and again.bootstrap_hidden == b"" and again.output_token_ids == (1009,)
    tokens = [t for g in harness.take(Generation) if g.request_id == "off" for t in g.token_ids]
    assert tokens == [1010, 1011, 1012]
    check_idle(harness.machine)


def test_an_offline_offer_preempts_nobody() -> None:
    harness = decode(block_count=4)
    restore(harness, offer("a", 9, max_tokens=4, priority="offline"))
    harness.tell(offer("b", 9, max_tokens=4, priority="offline"), P0)
    assert harness.one(RequestRefused).code == 404


def test_a_preempted_request_resumes_before_anything_new_is_taken() -> None:
    harness = decode(block_count=6)
    restore(harness, offer("a", 8, max_tokens=12))
    restore(harness, offer("b", 8, max_tokens=12))
    for _ in range(40):
        if harness.machine.batcher is not None and harness.machine.batcher.waiting:
            break
        harness.step()
    harness.tell(offer("c", 3, max_tokens=2), P0)
    refused = harness.one(RequestRefused)
    assert refused.code == 404 and "preempted" in refused.reason
    harness.run()
    assert {f.request_id for f in harness.take(Finished)} == {"a", "b"}
    check_idle(harness.machine)


def test_a_row_error_fails_the_request_and_the_instance_lives_on() -> None:
    harness = decode()
    restore(harness, offer("a"))
    harness.step(error="bootstrap has 12 bytes, 16 expected")
    failed = harness.one(Failed)
    assert "bootstrap" in failed.message and not failed.retryable
    restore(harness, offer("b"))
    harness.run()
    harness.one(Finished)
    check_idle(harness.machine)


def test_a_draining_decode_instance_takes_nothing_new() -> None:
    harness = decode()
    restore(harness, offer("a"))
    harness.tell(Drain(deadline_ms=1000), "supervisor/root")
    harness.tell(offer("b"), P0)
    assert harness.one(RequestRefused).code == 404
    harness.run()
    harness.one(Finished)
