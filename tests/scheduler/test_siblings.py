"""Samples of one prompt: computed once, taken along, and on their own from then on."""

from __future__ import annotations

from typing import Any

from messages.batch import BatchRow, ExecuteBatch
from messages.handoff import AddNewRequest, FirstGeneration, HandoffComplete, HandoffFailed, RequestAccepted
from messages.requests import CancelRequest, Failed, Finished, Generation, SamplingParams, Sibling, SubmitRequest
from messages.transfer import OpenPush
from tests.scheduler.harness import EOS, Harness, submit
from tests.scheduler.invariants import check_idle
from tests.scheduler.test_prefill import accept, asked, prefill, says


def samples(count: int, prompt: int = 10, **changes: Any) -> SubmitRequest:
    """``count`` samples a0, a1, … of one prompt, with seeds 0, 1, …."""
    first = submit("a0", prompt, **{"max_tokens": 6, **changes})
    siblings = tuple(
        Sibling(request_id=f"a{k}", epoch=0, sampling=SamplingParams(max_tokens=6, eos_token_ids=(EOS,), seed=k))
        for k in range(1, count)
    )
    return SubmitRequest(
        **{name: getattr(first, name) for name in first.__struct_fields__ if name != "siblings"}, siblings=siblings
    )


def prefilled(harness: Harness) -> int:
    """Prompt tokens that were computed so far."""
    return int(dict(harness.machine.status(0)[0])["prefilled_tokens"])


def forks(batch: ExecuteBatch) -> list[BatchRow]:
    return [row for row in batch.rows if row.fork_of]


def first_tokens(harness: Harness) -> dict[str, int]:
    """The first token of each request that has one."""
    return {one.request_id: one.token_ids[0] for one in harness.take(Generation) if one.first_index == 0}


# -- a mixed instance ------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_once_for_all_its_samples() -> None:
    harness = Harness()
    harness.tell(samples(3))
    batches = harness.run()
    assert prefilled(harness) == 10
    ran = [[row.request_id for row in batch.rows] for batch in batches[:3]]
    assert ran == [["a0"], ["a0", "a1", "a2"], ["a0", "a1", "a2"]]
    assert [(row.request_id, row.start, row.token_ids, row.samples) for row in forks(batches[1])] == [
        ("a1", 10, (), True),
        ("a2", 10, (), True),
    ]
    ends = {end.request_id: end for end in harness.take(Finished)}
    assert {name: end.usage.completion_tokens for name, end in ends.items()} == {"a0": 6, "a1": 6, "a2": 6}
    assert {name: end.usage.cached_tokens for name, end in ends.items()} == {"a0": 0, "a1": 10, "a2": 10}
    check_idle(harness.machine)


def test_full_blocks_of_the_prompt_are_shared_and_what_is_written_is_not() -> None:
    harness = Harness()
    harness.tell(samples(3, 9))
    harness.step()
    batch = harness.step()
    first, second, third = (row.block_ids for row in batch.rows)
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    assert len({start.slot for start in batch.opened}) == 2 and not {0} & {start.slot for start in batch.opened}


def test_the_block_with_the_prompts_last_position_is_never_shared() -> None:
    """The draft's row there depends on the token that follows, even when the prompt fills the block."""
    harness = Harness()
    harness.tell(samples(2, 8))
    (first, second) = (row.block_ids for row in harness.step().rows)
    assert first[0] == second[0] and first[1] != second[1]


def test_shared_blocks_stay_until_the_last_sample_ends() -> None:
    harness = Harness()
    harness.tell(samples(3))
    harness.step()
    harness.step()
    pool = harness.machine.pool
    assert pool is not None
    batch = harness.one(ExecuteBatch)
    shared = batch.rows[0].block_ids[:2]
    for name in ("a0", "a2"):
        harness.tell(CancelRequest(request_id=name, epoch=0))
    harness.answer(batch)
    assert pool.slots.count - pool.slots.free_count == 1
    assert all(pool.may_use("a1", block, pool.blocks) for block in shared)
    harness.tell(CancelRequest(request_id="a1", epoch=0))
    harness.run()
    check_idle(harness.machine)


def test_a_sample_that_ends_at_its_first_token_does_not_hold_up_the_others() -> None:
    harness = Harness()
    harness.tell(samples(3))
    harness.step()
    harness.step({"a0": (EOS,), "a1": (7,), "a2": (8,)})
    assert [end.request_id for end in harness.take(Finished)] == ["a0"]
    harness.run()
    assert sorted(end.request_id for end in harness.take(Finished)) == ["a1", "a2"]
    assert prefilled(harness) == 10
    check_idle(harness.machine)


def test_when_the_leader_is_cancelled_before_its_prompt_is_complete_another_sample_leads() -> None:
    harness = Harness()
    harness.tell(samples(3))
    harness.tell(CancelRequest(request_id="a0", epoch=0))
    batches = harness.run()
    assert next(end.request_id for end in harness.take(Finished)) == "a0"
    assert [row.fork_of for batch in batches for row in forks(batch)] == ["a1"]
    check_idle(harness.machine)


def test_when_the_leader_is_cancelled_during_the_last_chunk_those_taken_along_go_on() -> None:
    harness = Harness()
    harness.tell(samples(3))
    harness.step()
    batch = harness.one(ExecuteBatch)
    harness.tell(CancelRequest(request_id="a0", epoch=0))
    harness.answer(batch)
    harness.run()
    assert sorted((end.request_id, end.reason) for end in harness.take(Finished)) == [
        ("a0", "cancelled"),
        ("a1", "length"),
        ("a2", "length"),
    ]
    assert prefilled(harness) == 10
    check_idle(harness.machine)


def test_a_cancelled_follower_begins_nothing() -> None:
    harness = Harness()
    harness.tell(samples(3))
    harness.tell(CancelRequest(request_id="a1", epoch=0))
    batches = harness.run()
    assert {row.request_id for batch in batches for row in batch.rows} == {"a0", "a2"}
    check_idle(harness.machine)


def test_samples_without_memory_beside_the_first_form_a_group_again() -> None:
    harness = Harness(slot_count=2)
    harness.tell(samples(4))
    batches = harness.run()
    assert [(row.request_id, row.fork_of) for batch in batches for row in forks(batch)] == [("a1", "a0"), ("a3", "a2")]
    assert prefilled(harness) == 20
    assert len(harness.take(Finished)) == 4
    check_idle(harness.machine)


def test_samples_without_a_row_beside_the_first_form_a_group_again() -> None:
    harness = Harness(max_seqs_per_batch=2)
    harness.tell(samples(3))
    harness.run()
    assert prefilled(harness) == 20
    assert len(harness.take(Finished)) == 3
    check_idle(harness.machine)


def test_a_preempted_sample_computes_its_prompt_alone_and_keeps_its_tokens() -> None:
    harness = Harness(block_count=7)
    harness.tell(samples(3, 10, max_tokens=9))
    harness.run()
    assert dict(harness.machine.status(0)[0])["preempted"] >= 1
    assert {end.request_id: end.usage.completion_tokens for end in harness.take(Finished)} == {
        "a0": 9,
        "a1": 6,
        "a2": 6,
    }
    check_idle(harness.machine)


def test_an_online_request_gets_the_blocks_that_only_offline_samples_share() -> None:
    harness = Harness(block_count=8)
    harness.tell(samples(3, 17, priority="offline"))
    for _ in range(3):
        harness.step()
    harness.tell(submit("online", 25, max_tokens=2))
    harness.run()
    ends = [end.request_id for end in harness.take(Finished)]
    assert ends[0] == "online" and sorted(ends[1:]) == ["a0", "a1", "a2"]
    check_idle(harness.machine)


def test_prompts_whose_logprobs_are_wanted_are_not_shared() -> None:
    harness = Harness()
    harness.tell(samples(2, prompt_logprobs=0))
    harness.run()
    assert prefilled(harness) == 20
    check_idle(harness.machine)


def test_a_doubled_submission_begins_nothing_twice() -> None:
    harness = Harness()
    harness.tell(samples(3))
    harness.tell(samples(3))
    harness.run()
    assert prefilled(harness) == 10 and len(harness.take(Finished)) == 3
    check_idle(harness.machine)


def test_a_prompt_that_fails_fails_for_all_its_samples() -> None:
    harness = Harness()
    harness.tell(samples(2, 4))
    batch = harness.one(ExecuteBatch)
    harness.answer(batch, error="it broke")
    assert sorted(failed.request_id for failed in harness.take(Failed)) == ["a0", "a1"]
    harness.run()
    check_idle(harness.machine)


# -- a prefill instance ----------------------------------------------------------------------------------------------


def offers(harness: Harness) -> dict[str, tuple[str, AddNewRequest]]:
    return {offer.request_id: (to, offer) for to, offer in asked(harness)}


def to_the_first_tokens(harness: Harness, count: int) -> AddNewRequest:
    """The prompt of ``count`` samples is complete; gives the offer of the one that led."""
    harness.tell(samples(count))
    ((name, (to, offer)),) = offers(harness).items()
    assert name == "a0"
    accept(harness, to, offer)
    harness.step()
    harness.step()
    return offer


def test_each_sample_is_handed_off_from_the_same_source() -> None:
    harness = prefill("d0", "d1")
    leader = to_the_first_tokens(harness, 3)
    assert first_tokens(harness).keys() == {"a0", "a1", "a2"} and prefilled(harness) == 10
    found = offers(harness)
    assert {name: to for name, (to, _) in found.items()} == {"a1": "d1", "a2": "d0"}
    for to, offer in found.values():
        accept(harness, to, offer)
    pushes, firsts = harness.take(OpenPush), harness.take(FirstGeneration)
    assert len({(push.source_block_ids, push.source_slot) for push in pushes}) == 1
    assert {push.request_id: push.ready_tokens for push in pushes} == {"a0": 0, "a1": 10, "a2": 10}
    assert {first.request_id: first.cached_tokens for first in firsts} == {"a0": 0, "a1": 10, "a2": 10}
    pool = harness.machine.pool
    assert pool is not None
    says(harness, "d0", HandoffComplete, leader)
    says(harness, "d1", HandoffComplete, found["a1"][1])
    assert pool.blocks.count - pool.blocks.free_count == 3, "the last sample's decode instance may still read"
    says(harness, "d0", HandoffComplete, found["a2"][1])
    check_idle(harness.machine)


def test_a_sample_that_ends_at_its_first_token_is_offered_to_nobody() -> None:
    harness = prefill()
    harness.tell(samples(3))
    ((to, leader),) = offers(harness).values()
    accept(harness, to, leader)
    harness.step()
    harness.step({"a0": (7,), "a1": (EOS,), "a2": (8,)})
    assert [end.request_id for end in harness.take(Finished)] == ["a1"]
    ((to, offer),) = offers(harness).values()
    assert offer.request_id == "a2"
    accept(harness, to, offer)
    for one in (leader, offer):
        says(harness, "d0", HandoffComplete, one)
    check_idle(harness.machine)


def test_a_leader_that_ends_at_its_first_token_leaves_the_state_to_the_others() -> None:
    harness = prefill()
    harness.tell(samples(2))
    ((to, leader),) = offers(harness).values()
    accept(harness, to, leader)
    harness.step()
    harness.step({"a0": (EOS,), "a1": (8,)})
    ((to, offer),) = offers(harness).values()
    accept(harness, to, offer)
    assert harness.one(FirstGeneration).request_id == "a1"
    says(harness, "d0", HandoffComplete, offer)
    pool = harness.machine.pool
    assert pool is not None and pool.blocks.free_count < pool.blocks.count, "the leader's reservation is not back yet"
    says(harness, "d0", HandoffFailed, leader, reason="released")
    check_idle(harness.machine)


def test_cancelling_every_sample_at_any_moment_leaves_nothing() -> None:
    for moment in range(5):
        harness = prefill()
        harness.tell(samples(3))
        open_offers = dict(offers(harness))
        if moment >= 1:
            accept(harness, *open_offers["a0"])
        if moment == 2:
            harness.step()
        if moment >= 3:
            harness.step()
            batch = harness.one(ExecuteBatch)
            if moment == 4:
                harness.answer(batch)
                open_offers |= offers(harness)
        for k in range(3):
            harness.tell(CancelRequest(request_id=f"a{k}", epoch=0))
        open_offers |= offers(harness)
        if moment == 3:
            harness.answer(batch)
        if moment in (1, 2):
            harness.run()
        for to, offer in open_offers.values():
            says(harness, to, HandoffFailed, offer, reason="released")
        assert [end.reason for end in harness.take(Finished)] == ["cancelled"] * 3
        check_idle(harness.machine)


def test_when_a_prefill_leader_is_cancelled_early_the_next_one_is_offered() -> None:
    harness = prefill()
    harness.tell(samples(3))
    ((_, leader),) = offers(harness).values()
    harness.tell(CancelRequest(request_id="a0", epoch=0))
    ((to, offer),) = offers(harness).values()
    assert offer.request_id == "a1"
    says(harness, "d0", HandoffFailed, leader, reason="released")
    accept(harness, to, offer)
    assert [row.fork_of for batch in harness.run() for row in forks(batch)] == ["a1"]


def test_samples_wait_while_decode_instances_are_full_and_hold_no_row() -> None:
    harness = prefill()
    to_the_first_tokens(harness, 3)
    states = {name: state for name, _, state, _, _ in harness.machine.status(0)[1]}
    assert states["a0"] == "handed off" and set(states.values()) <= {"handed off", "reoffering", "prefilled"}
    assert harness.machine.batcher is not None and not harness.machine.batcher.running


def test_a_follower_says_whose_prompt_it_waits_for() -> None:
    for harness in (Harness(), prefill()):
        harness.tell(samples(2))
        rows = {name: (state, waits_for) for name, _, state, waits_for, _ in harness.machine.status(0)[1]}
        assert rows["a1"] == ("following", "the prompt that a0 computes")


def test_an_accepted_reservation_arrives_per_sample() -> None:
    """A decode instance sees requests of their own: nothing in its offers tells that they are samples of one prompt."""
    harness = prefill()
    leader = to_the_first_tokens(harness, 2)
    ((_, offer),) = offers(harness).values()
    assert offer.prompt_token_ids == leader.prompt_token_ids
    assert (offer.sampling.seed, leader.sampling.seed) == (1, 0)
    assert RequestAccepted.__name__ not in {type(send.message).__name__ for send in harness.sent}
