"""A prefill instance's side of the hand-off."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from actors.scheduler.offers import backoff_ms
from messages.base import control_address
from messages.batch import ExecuteBatch
from messages.cluster import (
    ClusterView,
    Heartbeat,
    InstanceInfo,
    InstanceLost,
    LinkFailed,
    LinkPeer,
    LinkReport,
    PeerLinked,
)
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
from messages.requests import CancelRequest, Failed, Finished, Generation
from messages.transfer import ClosePush, OpenPush
from tests.scheduler.harness import EOS, Harness, info, submit
from tests.scheduler.invariants import check_idle

ENGINE = control_address("p0", "engine")


def prefill(*decoders: str, **changes: Any) -> Harness:
    """A prefill instance that is linked with decode instances (d0 by default)."""
    harness = Harness("PREFILL", "p0", **changes)
    harness.link(*(info(name, "DECODE") for name in decoders or ("d0",)))
    harness.sent.clear()
    return harness


def asked(harness: Harness) -> list[tuple[str, AddNewRequest]]:
    """(decode instance, offer) of every offer since the last look."""
    offers = [(send.to.partition(".")[0], send.message) for send in harness.sent]
    harness.sent = [send for send in harness.sent if not isinstance(send.message, AddNewRequest)]
    return [(to, message) for to, message in offers if isinstance(message, AddNewRequest)]


def ask(harness: Harness) -> tuple[str, AddNewRequest]:
    """The only offer since the last look."""
    (only,) = asked(harness)
    return only


def says(harness: Harness, instance: str, kind: Any, offer: AddNewRequest, **fields: Any) -> None:
    """``instance`` answers an offer."""
    message = kind(
        request_id=offer.request_id,
        epoch=offer.epoch,
        instance=instance,
        incarnation=fields.pop("incarnation", 1),
        **fields,
    )
    harness.tell(message, control_address(instance, "scheduler"))


def accept(harness: Harness, instance: str, offer: AddNewRequest) -> None:
    says(harness, instance, RequestAccepted, offer, target_block_ids=(7, 8), target_slot=3, leases=())


def refuse(harness: Harness, instance: str, offer: AddNewRequest, code: Literal[400, 404, 409, 413] = 404) -> None:
    says(harness, instance, RequestRefused, offer, code=code, reason=f"{code} of {instance}")


def hand_off(harness: Harness, **changes: Any) -> tuple[str, AddNewRequest]:
    """A request up to FirstGeneration."""
    harness.tell(submit(**changes))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    harness.run()
    harness.one(FirstGeneration)
    harness.take(OpenPush)
    harness.take(Generation)
    return instance, offer


def closed(harness: Harness) -> None:
    """Nothing is left, of offers either."""
    check_idle(harness.machine)
    assert not harness.machine.side.offers.open  # type: ignore[union-attr]


def test_a_request_is_offered_prefilled_and_handed_off_and_its_blocks_freed_on_completion() -> None:
    harness = prefill()
    harness.tell(submit("a", 10))
    instance, offer = ask(harness)
    harness.none(ExecuteBatch)
    accept(harness, instance, offer)
    kinds = [type(send.message) for send in harness.sent]
    assert kinds == [OpenPush, ExecuteBatch]  # the way is open before anything is computed that travels it
    opened = harness.one(OpenPush)
    assert (opened.target_block_ids, opened.target_slot, opened.ready_tokens) == ((7, 8), 3, 0)
    assert opened.source_block_ids == (0, 1, 2)
    batches = harness.run()
    assert [batch.rows[0].push_chunk for batch in batches] == [0, 1]
    generation = harness.one(Generation)
    assert (generation.first_index, generation.token_ids) == (0, (1010,))
    first = harness.one(FirstGeneration)
    assert (first.token_id, first.token_index, first.computed_tokens, first.chunk_count) == (1010, 0, 10, 2)
    assert harness.machine.pool is not None and harness.machine.pool.blocks.free_count == 13
    harness.none(Finished)
    says(harness, "d0", HandoffComplete, offer)
    harness.one(ClosePush)
    closed(harness)


def test_in_pull_mode_no_chunk_is_pushed() -> None:
    harness = prefill(mode="PULL")
    harness.tell(submit("a", 10))
    accept(harness, *ask(harness))
    assert harness.one(OpenPush).mode == "PULL"
    assert [batch.rows[0].push_chunk for batch in harness.run()] == [-1, -1]
    assert harness.one(FirstGeneration).chunk_count == 0


@pytest.mark.parametrize("token, max_tokens, reason", [(7, 1, "length"), (EOS, 9, "stop"), (5, 9, "stop")])
def test_a_request_that_ends_at_its_first_token_ends_here_and_releases_its_reservation(
    token: int, max_tokens: int, reason: str
) -> None:
    harness = prefill()
    harness.tell(submit("a", 5, max_tokens=max_tokens, stop_token_ids=(5,)))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    harness.step({"a": (token,)})
    assert harness.one(Generation).token_ids == (token,)
    finished = harness.one(Finished)
    assert (finished.reason, finished.usage.completion_tokens) == (reason, 1)
    harness.none(FirstGeneration)
    harness.one(ReleaseRequest)
    assert harness.machine.pool is not None and harness.machine.pool.blocks.free_count < 16
    says(harness, "d0", RequestReleased, offer)
    closed(harness)


def test_only_a_window_of_requests_is_offered_ahead() -> None:
    harness = prefill("d0", "d1", "d2", offer_window=3, block_count=64, slot_count=8)
    for name in "abcdef":
        harness.tell(submit(name))
    offers = asked(harness)
    assert [(to, message.request_id) for to, message in offers] == [("d0", "a"), ("d1", "b"), ("d2", "c")]
    accept(harness, *offers[0])  # its prefill begins at once: the window moves on
    assert [message.request_id for _, message in asked(harness)] == ["d"]


def test_decode_instances_are_asked_in_turn() -> None:
    harness = prefill("d0", "d1", block_count=64, slot_count=8)
    turns = []
    for name in "abcd":
        harness.tell(submit(name))
        instance, offer = ask(harness)
        turns.append(instance)
        accept(harness, instance, offer)
    assert turns == ["d0", "d1", "d0", "d1"]


def test_a_refused_request_is_offered_elsewhere_at_once_and_backs_off_when_all_are_full() -> None:
    harness = prefill("d0", "d1")
    harness.tell(submit("a"))
    first = ask(harness)
    refuse(harness, *first)
    second = ask(harness)
    assert (first[0], second[0]) == ("d0", "d1") and second[1].epoch == first[1].epoch + 1
    refuse(harness, *second)
    assert not asked(harness)
    check_idle_memory(harness)
    harness.fire("retry")
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    harness.run()
    harness.one(FirstGeneration)


def check_idle_memory(harness: Harness) -> None:
    """Whoever waits for a decode instance holds nothing here."""
    assert harness.machine.pool is not None and not harness.machine.pool.holdings


def test_a_refused_request_does_not_hold_up_those_behind_it() -> None:
    harness = prefill()
    harness.tell(submit("big"))
    refuse(harness, *ask(harness))
    harness.tell(submit("small"))
    assert ask(harness)[1].request_id == "small"


def test_two_half_pool_requests_complete_one_after_the_other() -> None:
    """C22: each needs more than half of what both sides have."""
    harness = prefill(block_count=5)
    harness.tell(submit("a", 12))
    harness.tell(submit("b", 12))
    accept(harness, *ask(harness))
    harness.run()
    harness.one(FirstGeneration)
    offers = asked(harness)
    assert not offers  # there is no room here for b yet
    says(harness, "d0", HandoffComplete, AddNewRequestKey("a", 0))
    instance, offer = ask(harness)
    refuse(harness, instance, offer)  # a decodes there
    harness.fire("retry")
    accept(harness, *ask(harness))
    harness.run()
    harness.one(FirstGeneration)


class AddNewRequestKey:
    """Just the key of an offer."""

    def __init__(self, request_id: str, epoch: int) -> None:
        self.request_id = request_id
        self.epoch = epoch


def test_a_request_fails_retryably_after_a_bounded_number_of_rounds() -> None:
    harness = prefill(offer_attempts_max=3)
    harness.tell(submit("a"))
    for _ in range(2):
        refuse(harness, *ask(harness))
        harness.fire("retry")
    refuse(harness, *ask(harness))
    failed = harness.one(Failed)
    assert (failed.code, failed.retryable) == (503, True) and "404 of d0" in failed.message
    closed(harness)


def test_without_a_decode_instance_a_request_waits_then_fails_retryably() -> None:
    harness = Harness("PREFILL", "p0", offer_attempts_max=3)
    harness.tell(submit("a"))
    for _ in range(2):
        harness.fire("retry")
    failed = harness.one(Failed)
    assert failed.retryable and "no decode instance is linked" in failed.message
    check_idle(harness.machine)


def test_a_decode_instance_that_links_wakes_those_that_wait() -> None:
    harness = Harness("PREFILL", "p0")
    harness.tell(submit("a"))
    harness.link(info("d0", "DECODE"))
    assert ask(harness)[1].request_id == "a"


def test_backoff_grows_is_capped_and_differs_between_requests() -> None:
    settings = Harness("PREFILL", "p0").settings
    delays = [backoff_ms(settings, "a", rounds) for rounds in range(1, 30)]
    assert delays == [backoff_ms(settings, "a", rounds) for rounds in range(1, 30)]
    assert 10 <= delays[0] <= 20 and all(500 <= delay <= 1000 for delay in delays[8:])
    assert backoff_ms(settings, "b", 1) != delays[0]


@pytest.mark.parametrize("delivered, fits", [(5, True), (6, False)])
def test_a_continuation_that_just_fits_is_taken(delivered: int, fits: bool) -> None:
    """Its last delivered token needs no room here: it is decoded elsewhere."""
    harness = prefill("d0", block_count=3)
    tokens = tuple(range(1005, 1005 + delivered))
    harness.tell(submit("a", 8, epoch=1, delivered_token_ids=tokens, max_tokens=9))
    assert bool(asked(harness)) is fits
    assert not fits or not harness.take(Failed)


def test_what_no_decode_instance_can_ever_hold_is_413_with_the_numbers() -> None:
    harness = prefill("d0", "d1")
    harness.tell(submit("a"))
    refuse(harness, *ask(harness), code=413)
    refuse(harness, *ask(harness), code=413)
    failed = harness.one(Failed)
    assert (failed.code, failed.retryable, failed.message) == (413, False, "413 of d0")
    closed(harness)


def test_a_decode_instance_that_can_never_hold_it_is_not_asked_again() -> None:
    harness = prefill("d0", "d1")
    harness.tell(submit("a"))
    refuse(harness, *ask(harness), code=413)
    refuse(harness, *ask(harness))
    harness.fire("retry")
    assert ask(harness)[0] == "d1"


@pytest.mark.parametrize("code", [400, 409])
def test_a_bad_or_duplicate_request_fails_at_once(code: Literal[400, 409]) -> None:
    harness = prefill("d0", "d1")
    harness.tell(submit("a"))
    refuse(harness, *ask(harness), code=code)
    failed = harness.one(Failed)
    assert (failed.code, failed.retryable) == (code, False)
    closed(harness)


def test_a_prompt_that_this_instance_can_never_hold_is_refused_before_anything_is_asked() -> None:
    harness = prefill(block_count=4)
    harness.tell(submit("a", 17))
    assert harness.one(Failed).code == 413
    assert not asked(harness)


def test_a_silent_decode_instance_is_asked_back_and_the_request_offered_elsewhere() -> None:
    harness = prefill("d0", "d1")
    harness.tell(submit("a"))
    silent, old = ask(harness)
    harness.fire("offer")
    assert harness.one(ReleaseRequest).epoch == old.epoch
    other, new = ask(harness)
    assert (silent, other) == ("d0", "d1") and new.epoch > old.epoch
    accept(harness, silent, old)  # too late: it is being asked back
    harness.fire("release")
    harness.one(ReleaseRequest)
    says(harness, silent, RequestReleased, old)
    accept(harness, other, new)
    harness.run()
    harness.one(FirstGeneration)
    says(harness, other, HandoffComplete, new)
    closed(harness)


def test_a_silent_decode_instance_holds_up_nobody_else() -> None:
    """C25."""
    harness = prefill("d0", "d1", offer_window=4, block_count=64, slot_count=16)
    for index in range(12):
        harness.tell(submit(f"r{index}"))
    handed = set()
    for _ in range(20):
        for instance, offer in asked(harness):
            if instance == "d1":
                accept(harness, instance, offer)
                handed.add(offer.request_id)
        if harness.machine.batcher is not None and harness.machine.batcher.step is not None:
            harness.step()
    assert len(handed) >= 10  # all but what d0 was asked and did not answer
    harness.fire("offer")
    harness.fire("offer")
    for instance, offer in asked(harness):
        assert instance == "d1"
        accept(harness, instance, offer)
        handed.add(offer.request_id)
    assert len(handed) == 12


def test_a_silent_decode_instance_is_passed_over_until_it_says_anything() -> None:
    harness = prefill("d0", "d1", block_count=64, slot_count=16)
    harness.tell(submit("a"))
    silent, offer = ask(harness)
    harness.fire("offer")
    accept(harness, *ask(harness))
    for name in "bcd":
        harness.tell(submit(name))
        instance, other = ask(harness)
        assert instance != silent
        accept(harness, instance, other)
    says(harness, silent, RequestReleased, offer)
    harness.tell(submit("e"))
    assert ask(harness)[0] == silent


def test_the_only_decode_instance_is_asked_even_if_it_is_silent() -> None:
    harness = prefill()
    harness.tell(submit("a"))
    ask(harness)
    harness.fire("offer")
    harness.fire("retry")
    assert ask(harness)[0] == "d0"


def test_a_decode_instance_lost_during_prefill_costs_no_second_prefill() -> None:
    harness = prefill("d0", "d1")
    harness.tell(submit("a", 10))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    harness.step()
    harness.tell(InstanceLost(instance=instance, incarnation=1, reason="killed"))
    batch = harness.step()
    assert batch.rows[0].start == 8 and batch.rows[0].samples
    assert harness.one(Generation).token_ids == (1010,)
    other, again = ask(harness)
    assert other == "d1" and again.epoch > offer.epoch
    harness.take(OpenPush)
    accept(harness, other, again)
    opened = harness.one(OpenPush)
    assert (opened.ready_tokens, opened.epoch) == (10, again.epoch)
    first = harness.one(FirstGeneration)
    assert (first.epoch, first.token_id, first.chunk_count, first.computed_tokens) == (again.epoch, 1010, 2, 10)
    harness.none(ExecuteBatch)
    says(harness, other, HandoffComplete, again)
    harness.none(Generation)
    closed(harness)


def test_chunks_computed_after_the_loss_do_not_travel() -> None:
    harness = prefill()
    harness.tell(submit("a", 20))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    harness.step()
    says(harness, instance, HandoffFailed, offer, reason="torn")
    assert [batch.rows[0].push_chunk for batch in harness.run()] == [1, -1]  # one was in flight already


@pytest.mark.parametrize("how", ["dead", "failed", "released"])
def test_a_decode_instance_lost_before_completion_costs_no_second_prefill(how: str) -> None:
    harness = prefill("d0", "d1")
    instance, offer = hand_off(harness)
    if how == "dead":
        harness.tell(InstanceLost(instance=instance, incarnation=1, reason="killed"))
    elif how == "failed":
        says(harness, instance, HandoffFailed, offer, reason="torn")
    else:
        says(harness, instance, RequestReleased, offer)
    other, again = ask(harness)
    assert other != instance and again.epoch == offer.epoch + 1
    accept(harness, other, again)
    assert harness.one(OpenPush).ready_tokens == 5
    harness.one(FirstGeneration)
    harness.none(ExecuteBatch)
    says(harness, other, HandoffComplete, again)
    closed(harness)


def test_first_generation_is_repeated_before_the_hand_off_is_given_up() -> None:
    harness = prefill("d0", "d1")
    instance, offer = hand_off(harness)
    harness.fire("handoff")
    assert harness.one(FirstGeneration).epoch == offer.epoch
    harness.fire("handoff")
    assert harness.one(ReleaseRequest).epoch == offer.epoch
    other, again = ask(harness)
    accept(harness, other, again)
    harness.one(FirstGeneration)
    says(harness, other, HandoffComplete, again)
    assert harness.machine.pool is not None and harness.machine.pool.holdings  # the silent one may still read
    says(harness, instance, HandoffComplete, offer)  # too late, it will be released
    assert harness.machine.pool.holdings
    says(harness, instance, RequestReleased, offer)
    closed(harness)


def test_blocks_of_a_request_are_held_until_the_decode_instance_is_known_dead() -> None:
    harness = prefill()
    instance, _ = hand_off(harness)
    harness.tell(CancelRequest(request_id="a", epoch=65535))
    assert harness.one(Finished).reason == "cancelled"
    for _ in range(3):
        harness.fire("release")
    assert harness.machine.pool is not None and harness.machine.pool.holdings
    harness.tell(InstanceLost(instance=instance, incarnation=1, reason="killed"))
    closed(harness)


def test_blocks_stay_while_a_write_to_a_dead_decode_instance_still_reads_them() -> None:
    harness = prefill()
    harness.closes_pushes = False
    instance, _ = hand_off(harness)
    harness.tell(CancelRequest(request_id="a", epoch=65535))
    harness.tell(InstanceLost(instance=instance, incarnation=1, reason="killed"))
    assert harness.machine.pool is not None and harness.machine.pool.holdings
    close = harness.one(ClosePush)
    harness.push_closed(close)
    harness.push_closed(close)
    closed(harness)


@pytest.mark.parametrize("stage", ["offering", "backoff", "accepted", "prefilling", "handed off", "prefilled"])
def test_a_cancel_at_any_time_releases_both_sides(stage: str) -> None:
    harness = prefill(block_count=64, slot_count=8, max_seqs_per_batch=1)
    blocker = None
    if stage == "accepted":  # the only row of the step in flight is another's
        harness.tell(submit("blocker", 8))
        blocker = ask(harness)
        accept(harness, *blocker)
    harness.tell(submit("a", 10))
    instance, offer = ask(harness)
    if stage == "backoff":
        refuse(harness, instance, offer)
    elif stage != "offering":
        accept(harness, instance, offer)
    if stage == "prefilling":
        harness.step()
    if stage in ("handed off", "prefilled"):
        harness.run()
    if stage == "prefilled":
        says(harness, instance, HandoffFailed, offer, reason="torn")
        refuse(harness, *ask(harness))
    harness.tell(CancelRequest(request_id="a", epoch=65535))
    assert harness.one(Finished).reason == "cancelled"
    if stage in ("backoff", "prefilled"):
        harness.none(ReleaseRequest)
    else:
        harness.one(ReleaseRequest)
        says(harness, instance, RequestReleased, offer)
    assert not harness.has_timer("retry")
    harness.run()
    if blocker is not None:
        says(harness, blocker[0], HandoffComplete, blocker[1])
    closed(harness)


def test_late_answers_change_nothing() -> None:
    """I5: stale epochs, other incarnations, doubled answers."""
    harness = prefill("d0", "d1")
    harness.tell(submit("a"))
    instance, old = ask(harness)
    refuse(harness, instance, old)
    other, offer = ask(harness)
    refuse(harness, instance, old)
    says(harness, instance, HandoffComplete, old)
    says(harness, instance, HandoffFailed, old, reason="late")
    says(harness, instance, RequestReleased, old)
    says(harness, other, RequestRefused, offer, code=404, reason="former life", incarnation=0)
    assert not asked(harness)
    accept(harness, other, offer)
    accept(harness, other, offer)
    harness.run()
    harness.one(OpenPush)
    harness.one(FirstGeneration)
    says(harness, other, HandoffComplete, offer, incarnation=0)
    harness.none(ClosePush)
    says(harness, other, HandoffComplete, offer)
    says(harness, other, HandoffComplete, offer)
    harness.none(ReleaseRequest)
    closed(harness)


@pytest.mark.parametrize("code", [400, 404, 409, 413])
@pytest.mark.parametrize("stage", ["accepted", "prefilling", "handed off"])
def test_a_doubled_offer_that_is_refused_after_it_was_taken_changes_nothing(
    stage: str, code: Literal[400, 404, 409, 413]
) -> None:
    """The first copy was taken; the second is answered when the epoch has ended there, long after."""
    harness = prefill()
    harness.tell(submit("a", 10))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    if stage == "accepted":
        refuse(harness, instance, offer, code)
        harness.run()
    elif stage == "prefilling":
        harness.step()
        refuse(harness, instance, offer, code)
        harness.run()
    else:
        harness.run()
        refuse(harness, instance, offer, code)
    harness.one(FirstGeneration)
    harness.none(Failed)
    harness.none(ReleaseRequest)
    says(harness, instance, HandoffComplete, offer)
    closed(harness)


def test_an_acceptance_of_an_offer_that_is_over_is_released() -> None:
    harness = prefill("d0", "d1")
    harness.tell(submit("a"))
    instance, offer = ask(harness)
    refuse(harness, instance, offer)
    accept(harness, instance, offer)
    assert harness.one(ReleaseRequest).epoch == offer.epoch


def test_a_newer_attempt_replaces_the_older_one_and_its_offer() -> None:
    harness = prefill()
    harness.tell(submit("a"))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    harness.tell(submit("a", epoch=65536, delivered_token_ids=(1005,)))
    assert harness.one(ReleaseRequest).epoch == 0
    harness.none(Finished)
    instance, newer = ask(harness)
    assert newer.epoch == 65536 and newer.delivered_token_ids == (1005,)
    accept(harness, instance, newer)
    harness.run()
    harness.none(Generation)  # its first token is delivered
    first = harness.one(FirstGeneration)
    assert (first.token_id, first.token_index, first.computed_tokens, first.epoch) == (1005, 0, 5, 65536)
    says(harness, instance, RequestReleased, offer)
    says(harness, instance, HandoffComplete, newer)
    closed(harness)


@pytest.mark.parametrize("delivered, blocks", [(1, 2), (2, 3), (5, 3), (6, 4)])
def test_a_request_that_was_decoded_before_is_prefilled_up_to_its_last_delivered_token(
    delivered: int, blocks: int
) -> None:
    """C29: nothing is sampled here; the last delivered token is handed off as a first token is, with its bootstrap."""
    harness = prefill()
    output = tuple(range(1008, 1008 + delivered))
    harness.tell(submit("a", 8, max_tokens=20, delivered_token_ids=output))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    rows = []
    while batches := harness.take(ExecuteBatch):
        rows += batches[0].rows
        harness.answer(batches[0], bootstrap_hidden=b"hidden", bootstrap_dtype="float32")
    assert [row.samples for row in rows] == [False] * len(rows)
    assert [row.resumes for row in rows] == [False] * (len(rows) - 1) + [True]
    assert sum(len(row.token_ids) for row in rows) == 7 + delivered
    harness.none(Generation)
    first = harness.one(FirstGeneration)
    assert (first.token_id, first.token_index, first.computed_tokens) == (output[-1], delivered - 1, 7 + delivered)
    assert (first.bootstrap_hidden, first.bootstrap_dtype) == (b"hidden", "float32")
    assert len(first.source_block_ids) == blocks
    says(harness, instance, HandoffComplete, offer)
    closed(harness)


def test_an_id_used_again_while_its_last_use_is_being_released_gets_another_epoch() -> None:
    harness = prefill()
    harness.tell(submit("a"))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    harness.tell(CancelRequest(request_id="a", epoch=65535))
    harness.tell(submit("a"))
    again = ask(harness)
    assert again[1].epoch == 1
    harness.run()
    says(harness, instance, RequestReleased, offer)
    accept(harness, *again)
    harness.run()
    says(harness, again[0], HandoffComplete, again[1])
    closed(harness)


def test_offline_is_not_offered_while_an_online_request_waits_for_a_decode_instance() -> None:
    harness = prefill()
    harness.tell(submit("on"))
    refuse(harness, *ask(harness))
    harness.tell(submit("off", priority="offline"))
    assert not asked(harness)
    harness.fire("retry")
    instance, offer = ask(harness)
    assert offer.request_id == "on"
    accept(harness, instance, offer)
    assert ask(harness)[1].request_id == "off"


def test_an_offline_request_that_has_not_begun_gives_way_to_an_online_one() -> None:
    """C20: preempted after AddNewRequest; the decode instance is told at once."""
    harness = prefill(block_count=4, max_seqs_per_batch=1)
    harness.tell(submit("off", 12, priority="offline"))
    instance, offer = ask(harness)
    harness.tell(submit("on", 12))
    released = harness.one(ReleaseRequest)
    assert released.request_id == "off"
    instance, online = ask(harness)
    assert online.request_id == "on"
    accept(harness, instance, online)
    harness.run()
    says(harness, instance, RequestReleased, offer)
    says(harness, instance, HandoffComplete, online)
    instance, again = ask(harness)
    assert again.request_id == "off"
    accept(harness, instance, again)
    harness.run()
    says(harness, instance, HandoffComplete, again)
    closed(harness)


def test_a_row_error_fails_the_request_and_releases_its_reservation() -> None:
    harness = prefill()
    harness.tell(submit("a"))
    instance, offer = ask(harness)
    accept(harness, instance, offer)
    harness.step(error="logits are not finite")
    assert harness.one(Failed).code == 500
    harness.one(ReleaseRequest)
    says(harness, instance, RequestReleased, offer)
    closed(harness)


def test_requests_wait_when_there_are_fewer_slots_than_requests() -> None:
    """C23."""
    harness = prefill(slot_count=1)
    for name in "abc":
        harness.tell(submit(name))
    for _ in range(3):
        instance, offer = ask(harness)
        accept(harness, instance, offer)
        harness.run()
        says(harness, instance, HandoffComplete, offer)
    closed(harness)


def test_a_refused_link_is_tried_again_with_growing_delays_and_then_left() -> None:
    harness = Harness("PREFILL", "p0", link_attempts_max=2)
    view_peer: InstanceInfo = info("d0", "DECODE")
    harness.link()
    harness.tell(ClusterView(version=2, registry_incarnation=1, instances=(info("p0", "PREFILL"), view_peer)))
    for _ in range(2):
        harness.one(LinkPeer)
        harness.tell(LinkFailed(instance="d0", incarnation=1, rank=0, reason="block sizes differ"))
        if harness.has_timer("link"):
            harness.fire("link")
    harness.none(LinkPeer)
    assert not harness.has_timer("link")
    assert [beat.links for beat in harness.take(Heartbeat)][-1] == (
        LinkReport(instance="d0", incarnation=1, refused="block sizes differ"),
    )
    values, _ = harness.machine.status(harness.now_ns)
    assert ("peer.d0", "broken") in values
    harness.tell(PeerLinked(instance="d0", incarnation=1, rank=-1))
    assert harness.one(Heartbeat).links == (LinkReport(instance="d0", incarnation=1),), "said at once"
    harness.tell(submit("a"))
    ask(harness)


def test_a_link_that_can_never_be_made_is_given_up_at_once() -> None:
    harness = Harness("PREFILL", "p0")
    harness.tell(
        ClusterView(version=2, registry_incarnation=1, instances=(info("p0", "PREFILL"), info("d0", "DECODE")))
    )
    harness.one(LinkPeer)
    harness.tell(LinkFailed(instance="d0", incarnation=1, rank=0, reason="block sizes differ", final=True))
    assert not harness.has_timer("link")
    assert [beat.links for beat in harness.take(Heartbeat)][-1] == (
        LinkReport(instance="d0", incarnation=1, refused="block sizes differ"),
    )
    newer = info("d0", "DECODE", incarnation=2)
    harness.tell(ClusterView(version=3, registry_incarnation=1, instances=(info("p0", "PREFILL"), newer)))
    assert harness.one(LinkPeer).peer.incarnation == 2, "another life may fit"


def test_status_says_what_each_request_waits_for() -> None:
    harness = prefill()
    harness.tell(submit("a"))
    harness.tell(submit("b"))
    _, (first, second) = harness.machine.status(harness.now_ns)
    assert first[2:4] == ("offering", "RequestAccepted of d0")
    hand_over = asked(harness)
    refuse(harness, *hand_over[1])
    accept(harness, *hand_over[0])
    harness.run()
    _, (first, second) = harness.machine.status(harness.now_ns)
    assert first[2:4] == ("handed off", "HandoffComplete of d0")
    assert second[2] == "backoff" and "404 of d0" in second[3]
