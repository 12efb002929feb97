"""A step that is sent while the one before it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.batch import BatchRow, ExecuteBatch
from messages.requests import CancelRequest, Finished, Generation
from messages.transfer import ReserveLeases
from tests.scheduler.harness import EOS, Harness, next_token, submit
from tests.scheduler.invariants import check_idle
from tests.scheduler.test_decode import P0, decode, offer, restore


def running_ahead(**changes: object) -> Harness:
    return Harness(enable_async_scheduling=True, **changes)


def fed(batch: ExecuteBatch) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Request → position and tokens of its row."""
    return {row.request_id: (row.start, row.token_ids) for row in batch.rows}


def test_while_a_decode_step_runs_the_next_one_is_sent() -> None:
    harness = running_ahead()
    harness.tell(submit("a", 5, max_tokens=9))
    harness.step()
    first, second = harness.take(ExecuteBatch)
    assert fed(first) == {"a": (5, (1005,))}
    assert fed(second) == {"a": (6, ())}  # the token that the first one samples
    harness.answer(first)
    assert fed(harness.one(ExecuteBatch)) == {"a": (7, ())}
    harness.answer(second)
    assert [generation.token_ids for generation in harness.take(Generation)] == [(1005,), (1006,), (1007,)]


def test_the_step_that_brings_a_sequences_last_token_is_not_followed_by_another() -> None:
    harness = running_ahead()
    harness.tell(submit("a", 5, max_tokens=3))
    harness.step()
    first, second = harness.take(ExecuteBatch)
    harness.answer(first)
    harness.none(ExecuteBatch)
    harness.answer(second)
    assert harness.one(Finished).usage.completion_tokens == 3
    harness.none(ExecuteBatch)
    check_idle(harness.machine)


def test_a_sequence_that_ended_in_the_first_step_keeps_its_memory_until_the_second_is_over() -> None:
    harness = running_ahead()
    harness.tell(submit("a", 5, max_tokens=9))
    harness.step()
    first, second = harness.take(ExecuteBatch)
    harness.answer(first, {"a": (EOS,)})
    assert harness.one(Finished).reason == "stop"
    pool = harness.machine.pool
    assert pool is not None and pool.holdings
    harness.take(Generation)
    harness.answer(second)
    harness.none(Generation)  # nobody wants it
    check_idle(harness.machine)


def test_a_cancelled_sequences_memory_is_free_when_both_steps_are_over() -> None:
    harness = running_ahead()
    harness.tell(submit("a", 5, max_tokens=9))
    harness.step()
    first, second = harness.take(ExecuteBatch)
    harness.tell(CancelRequest(request_id="a", epoch=0, reason="gone"))
    pool = harness.machine.pool
    assert pool is not None
    for batch in (first, second):
        assert pool.holdings
        harness.answer(batch)
    check_idle(harness.machine)


def test_whoever_comes_while_two_steps_are_in_flight_joins_when_both_are_over() -> None:
    harness = running_ahead()
    harness.tell(submit("a", 5, max_tokens=20))
    harness.step()
    first, second = harness.take(ExecuteBatch)
    harness.tell(submit("b", 5, max_tokens=20))
    harness.answer(first)
    harness.none(ExecuteBatch)  # the next one is b's too
    harness.answer(second)
    together = harness.one(ExecuteBatch)
    assert {row.request_id: row.is_prefill for row in together.rows} == {"a": False, "b": True}
    harness.answer(together)
    assert [set(fed(batch)) for batch in harness.take(ExecuteBatch)] == [{"a", "b"}, {"a", "b"}]


@pytest.mark.parametrize("changes", [{"enable_async_scheduling": False}, {"speculative_tokens": 2}])
def test_without_async_scheduling_or_with_drafts_there_is_one_step_in_flight(changes: dict[str, object]) -> None:
    harness = Harness(**{"enable_async_scheduling": True, **changes})
    harness.tell(submit("a", 5, max_tokens=9))
    harness.step()
    harness.one(ExecuteBatch)


def test_a_step_ahead_preempts_nobody() -> None:
    harness = running_ahead(block_count=4, max_seqs_per_batch=2)
    harness.tell(submit("a", 7, max_tokens=9))
    harness.tell(submit("b", 7, max_tokens=9))
    harness.step()
    batch = harness.one(ExecuteBatch)  # the next one needs a block more for each
    assert fed(batch).keys() == {"a", "b"}
    batcher = harness.machine.batcher
    assert batcher is not None and batcher.preempted_count == 0
    harness.answer(batch)
    assert batcher.preempted_count == 1
    harness.run()
    check_idle(harness.machine)


def test_an_offer_that_waits_for_memory_in_flight_is_not_kept_waiting_by_steps_ahead() -> None:
    harness = decode(enable_async_scheduling=True, block_count=6)
    restore(harness, offer("off", 9, max_tokens=4, priority="offline"))
    first, second = harness.take(ExecuteBatch)
    restore(harness, offer("run", 2, max_tokens=9))
    for batch in (first, second):
        harness.answer(batch)
    third, fourth = harness.take(ExecuteBatch)
    assert fed(third).keys() == {"off", "run"}
    harness.tell(offer("on", 11, max_tokens=4), P0)  # preempts the offline one, whose memory is in flight
    harness.tell(CancelRequest(request_id="off", epoch=0, reason="gone"))  # so that nobody is left in the queue
    harness.answer(third)
    harness.none(ReserveLeases)
    harness.none(ExecuteBatch)
    harness.answer(fourth)
    harness.one(ReserveLeases)
    assert harness.run()[0].rows[0].request_id == "run"


def play(
    requests: list[tuple[int, int, int, str]], early: Callable[[], bool], **changes: object
) -> dict[str, list[int]]:
    """Tokens of every request when the engine answers in order, now and then before the next request comes."""
    harness = Harness(max_seqs_per_batch=3, block_count=8, **changes)
    batches: deque[ExecuteBatch] = deque()
    tokens: dict[str, list[int]] = {}
    known: dict[tuple[str, int], int] = {}

    def sampled(row: BatchRow) -> tuple[int, ...]:
        token = next_token(row)
        return (EOS,) if token % 7 == 3 else (token,)

    def answer() -> None:
        batch = batches.popleft()
        for row in batch.rows:
            for index, token in enumerate(row.token_ids):
                assert known.setdefault((row.request_id, row.start + index), token) == token
        harness.answer(batch, {row.request_id: sampled(row) for row in batch.rows if row.samples})
        collect()

    def collect() -> None:
        batches.extend(harness.take(ExecuteBatch))
        for generation in harness.take(Generation):
            mine = tokens.setdefault(generation.request_id, [])
            assert generation.first_index == len(mine)
            mine += generation.token_ids

    for index, (prompt, max_tokens, answers, priority) in enumerate(requests):
        harness.tell(submit(f"r{index}", prompt, max_tokens=max_tokens, priority=priority))
        collect()
        for _ in range(answers):
            if batches and early():
                answer()
    while batches:
        answer()
    check_idle(harness.machine)
    return tokens


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(0, 4), st.sampled_from(["online", "offline"])),
        min_size=1,
        max_size=7,
    ),
    st.randoms(use_true_random=False),
)
def test_tokens_are_the_same_as_with_one_step_at_a_time(
    requests: list[tuple[int, int, int, str]], chance: object
) -> None:
    def early() -> bool:
        return bool(chance.random() < 0.7)  # type: ignore[attr-defined]

    ahead = play(requests, early, enable_async_scheduling=True)
    assert ahead == play(requests, lambda: True, enable_async_scheduling=False)
