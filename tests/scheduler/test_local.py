"""A mixed instance: batching, preemption, classes, ends, refusals."""

from __future__ import annotations

import pytest

from actors.scheduler.machine import SchedulerState
from messages.batch import BatchResult, ExecuteBatch
from messages.cluster import ClusterView, Heartbeat, RegisterInstance
from messages.lifecycle import Drain, Drained, NotSent
from messages.requests import CancelRequest, Failed, Finished, Generation, TokenLogprobs
from tests.scheduler.harness import EOS, Harness, info, submit
from tests.scheduler.invariants import check_idle


def tokens_of(harness: Harness, request_id: str) -> list[int]:
    """The tokens the client has, each index once and in order (I1)."""
    tokens: list[int] = []
    for generation in harness.take(Generation):
        if generation.request_id == request_id:
            assert generation.first_index == len(tokens)
            tokens += generation.token_ids
    return tokens


def test_a_request_is_prefilled_in_chunks_then_decoded_to_its_max_tokens() -> None:
    harness = Harness()
    harness.tell(submit("a", 10, max_tokens=3))
    batches = harness.run()
    assert [len(batch.rows[0].token_ids) for batch in batches] == [8, 2, 1, 1]
    assert [batch.rows[0].samples for batch in batches] == [False, True, True, True]
    assert [batch.step for batch in batches] == [1, 2, 3, 4]
    assert len(batches[0].opened) == 1 and not batches[1].opened
    finished = harness.one(Finished)
    assert finished.reason == "length"
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (10, 3)
    assert tokens_of(harness, "a") == [1010, 1011, 1012]
    check_idle(harness.machine)


def test_decode_rows_come_before_prefill_chunks_and_share_the_budget() -> None:
    harness = Harness(max_tokens_per_batch=9)
    harness.tell(submit("a", 4, max_tokens=20))
    harness.step()
    harness.tell(submit("b", 20))
    harness.step()
    batch = harness.one(ExecuteBatch)
    assert [(row.request_id, len(row.token_ids)) for row in batch.rows] == [("a", 1), ("b", 8)]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits() -> None:
    harness = Harness(enable_chunked_prefill=False, max_model_len=16)
    harness.tell(submit("a", 10, max_tokens=2))
    harness.tell(submit("b", 12, max_tokens=2))
    batches = harness.run()
    assert [[len(row.token_ids) for row in batch.rows] for batch in batches] == [[10], [1, 12], [1]]
    check_idle(harness.machine)


def test_whole_prompts_that_cannot_fit_one_step_are_refused_at_start() -> None:
    harness = Harness(enable_chunked_prefill=False)
    (failure,) = harness.failures
    assert failure.fatal and "48" in failure.reason and "max_tokens_per_batch" in failure.reason


def test_accepted_tokens_after_the_end_are_dropped_with_their_logprobs() -> None:
    harness = Harness(speculative_tokens=3)
    harness.tell(submit("a", 4, max_tokens=9))
    harness.step()
    logprobs = tuple(TokenLogprobs(token_id=token, logprob=-1.0) for token in (7, EOS, 8, 9))
    harness.step({"a": (7, EOS, 8, 9)}, drafted=3, accepted=3, logprobs=logprobs)
    _, second = harness.take(Generation)
    assert second.token_ids == (7, EOS) and second.logprobs == logprobs[:2]
    finished = harness.one(Finished)
    assert finished.reason == "stop" and finished.usage.completion_tokens == 3
    assert (finished.usage.drafted_tokens, finished.usage.accepted_by_position) == (3, (1, 1, 1))
    check_idle(harness.machine)


@pytest.mark.parametrize("max_tokens, drafts", [(2, 0), (3, 1), (5, 3), (30, 3)])
def test_drafts_never_reach_beyond_max_tokens(max_tokens: int, drafts: int) -> None:
    harness = Harness(speculative_tokens=3)
    harness.tell(submit("a", 4, max_tokens=max_tokens))
    harness.step()
    assert harness.one(ExecuteBatch).rows[0].speculative_tokens == drafts


def test_drafts_never_reach_beyond_the_model_length() -> None:
    harness = Harness(speculative_tokens=3, max_model_len=7)
    harness.tell(submit("a", 4, max_tokens=30))
    harness.step()
    batch = harness.one(ExecuteBatch)
    assert batch.rows[0].speculative_tokens == 1
    harness.answer(batch, {"a": (7, 8)})
    assert harness.one(Finished).reason == "length"
    check_idle(harness.machine)


def test_a_stop_token_ends_with_its_id_and_min_tokens_holds_it_off() -> None:
    harness = Harness()
    harness.tell(submit("a", 4, max_tokens=9, stop_token_ids=(9,), min_tokens=2))
    harness.step({"a": (9,)})
    harness.step({"a": (EOS,)})
    harness.none(Finished)
    harness.step({"a": (9,)})
    finished = harness.one(Finished)
    assert (finished.reason, finished.stop_token_id) == ("stop", 9)
    assert finished.usage.completion_tokens == 3


def test_ignore_eos_runs_to_max_tokens() -> None:
    harness = Harness()
    harness.tell(submit("a", 4, max_tokens=2, ignore_eos=True))
    harness.step({"a": (EOS,)})
    harness.step({"a": (EOS,)})
    assert harness.one(Finished).reason == "length"


def test_the_youngest_is_preempted_when_blocks_run_out_and_its_tokens_do_not_change() -> None:
    harness = Harness(block_count=6)
    harness.tell(submit("a", 8, max_tokens=12))
    harness.tell(submit("b", 8, max_tokens=12))
    batches = harness.run()
    assert harness.machine.batcher is not None and harness.machine.batcher.preempted_count > 0
    restarted = [start for batch in batches for start in batch.opened if start.request_id == "b"]
    assert len(restarted) == 2 and restarted[1].output_token_ids
    reopened = next(batch for batch in batches if restarted[1] in batch.opened)
    row = next(row for row in reopened.rows if row.request_id == "b")
    assert row.start == 0 and row.is_prefill  # its caches are gone: everything is computed again
    generations = harness.take(Generation)
    for request_id in ("a", "b"):
        tokens = [t for g in generations if g.request_id == request_id for t in g.token_ids]
        assert tokens == list(range(1008, 1020))
    assert {f.request_id for f in harness.take(Finished)} == {"a", "b"}
    check_idle(harness.machine)


def test_a_preempted_sequence_resumes_before_new_ones() -> None:
    harness = Harness(block_count=6)
    harness.tell(submit("a", 8, max_tokens=12))
    harness.tell(submit("b", 8, max_tokens=12))
    harness.tell(submit("c", 8, max_tokens=2))
    harness.run()
    assert [f.request_id for f in harness.take(Finished)] == ["a", "b", "c"]


def test_a_preempted_sequence_decodes_on_from_its_last_token_with_all_its_drafts() -> None:
    """C29: the step boundary is where it was; nothing is sampled by the prefill that computes its output again."""
    harness = Harness(block_count=6, speculative_tokens=3)
    harness.tell(submit("a", 8, max_tokens=12))
    harness.tell(submit("b", 8, max_tokens=12))
    rows = [row for batch in harness.run() for row in batch.rows if row.request_id == "b"]
    again = next(index for index, row in enumerate(rows) if index and row.start == 0)
    end = next(row for row in rows[again:] if row.resumes)
    assert not any(row.samples for row in rows[again:] if row.is_prefill)
    known = end.start + len(end.token_ids)
    following = rows[rows.index(end) + 1]
    assert (following.start, following.token_ids) == (known, (1000 + known,))
    assert (following.is_prefill, following.speculative_tokens) == (False, 3)
    decoded = [row.start for row in rows if not row.is_prefill]
    assert decoded == sorted(set(decoded)), "no step is taken twice"
    check_idle(harness.machine)


@pytest.mark.parametrize("block_count", range(6, 24, 3))
@pytest.mark.parametrize("speculative_tokens", [0, 1, 3, 8])
def test_requests_that_need_each_others_blocks_for_their_drafts_all_end(
    speculative_tokens: int, block_count: int
) -> None:
    """No taking turns for ever: the oldest keeps what it has, and every request fits alone with its last drafts."""
    harness = Harness(block_count=block_count, speculative_tokens=speculative_tokens)
    lengths = [(3, 21), (8, 12), (8, 16), (15, 9), (1, 23), (7, 1)]
    for number, (prompt, max_tokens) in enumerate(lengths):
        harness.tell(submit(f"r{number}", prompt, max_tokens=max_tokens))
    harness.run()
    assert {f.request_id: f.usage.completion_tokens for f in harness.take(Finished)} == {
        f"r{number}": max_tokens for number, (_, max_tokens) in enumerate(lengths)
    }
    check_idle(harness.machine)


def test_a_row_whose_drafts_do_not_fit_the_step_waits_for_the_next() -> None:
    """C29: what the neighbours leave of the budget does not decide how much is drafted."""
    harness = Harness(max_tokens_per_batch=6, speculative_tokens=3)
    for name in "ab":
        harness.tell(submit(name, 4, max_tokens=5))
    drafted = [
        {row.request_id: row.speculative_tokens for row in batch.rows if not row.is_prefill} for batch in harness.run()
    ]
    assert [step["b"] for step in drafted if "b" in step] == [3, 2, 1, 0]
    assert {"a": 3} in drafted, "it would have fitted with fewer"
    assert all(sum(1 + count for count in step.values()) <= 6 for step in drafted)
    check_idle(harness.machine)


def test_a_step_that_cannot_hold_one_requests_drafts_is_refused_at_start() -> None:
    (failure,) = Harness(max_tokens_per_batch=3, speculative_tokens=3).failures
    assert failure.fatal and "max_tokens_per_batch is 3" in failure.reason and "4 tokens" in failure.reason
    assert not Harness(max_tokens_per_batch=4, speculative_tokens=3).failures
    assert not Harness("PREFILL", "p0", max_tokens_per_batch=3, speculative_tokens=3).failures, "never drafts"


def test_more_requests_than_slots_are_queued() -> None:
    harness = Harness(slot_count=2, block_count=40)
    for name in "abcde":
        harness.tell(submit(name, 5, max_tokens=3))
    harness.run()
    assert sorted(f.request_id for f in harness.take(Finished)) == list("abcde")
    check_idle(harness.machine)


def test_offline_runs_only_when_no_online_request_waits() -> None:
    harness = Harness(max_tokens_per_batch=8)
    harness.tell(submit("off", 16, max_tokens=2, priority="offline"))
    batch = harness.one(ExecuteBatch)
    harness.tell(submit("on", 16, max_tokens=2))
    harness.answer(batch)
    order = [row.request_id for batch in harness.run() for row in batch.rows]
    assert order == ["on", "on", "on", "off", "off", "off"]
    check_idle(harness.machine)


def test_offline_takes_nothing_while_an_online_request_waits_for_blocks() -> None:
    harness = Harness(block_count=7)
    harness.tell(submit("a", 16, max_tokens=4))
    harness.tell(submit("b", 16, max_tokens=4))
    harness.tell(submit("off", 4, max_tokens=1, priority="offline"))  # would fit beside a
    order = [row.request_id for batch in harness.run() for row in batch.rows]
    assert order.index("off") > order.index("b") > max(i for i, name in enumerate(order) if name == "a")
    check_idle(harness.machine)


def test_an_online_request_takes_the_blocks_of_an_offline_one() -> None:
    harness = Harness(block_count=5)
    harness.tell(submit("off", 12, max_tokens=8, priority="offline"))
    harness.step()
    harness.tell(submit("on", 12, max_tokens=4))
    harness.run()
    assert [f.request_id for f in harness.take(Finished)] == ["on", "off"]
    check_idle(harness.machine)


def test_offline_fills_what_online_leaves_of_a_step() -> None:
    harness = Harness()
    harness.tell(submit("on", 4, max_tokens=3))
    harness.step()
    harness.tell(submit("off", 4, max_tokens=3, priority="offline"))
    harness.step()
    assert {row.request_id for row in harness.one(ExecuteBatch).rows} == {"on", "off"}


@pytest.mark.parametrize(
    "request_, code, words",
    [
        (submit("a", 48), 400, ("48", "max_model_len")),
        (submit("a", 0), 400, ("empty",)),
        (submit("a", 30, max_tokens=18), 413, ("12 blocks", "8")),
        (submit("a", 4, max_tokens=0), 400, ("max_tokens",)),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(request_: object, code: int, words: tuple[str, ...]) -> None:
    harness = Harness(block_count=8)
    harness.tell(request_)  # type: ignore[arg-type]
    failed = harness.one(Failed)
    assert failed.code == code and not failed.retryable
    assert all(word in failed.message for word in words), failed.message
    harness.none(ExecuteBatch)
    check_idle(harness.machine)


def test_too_many_waiting_requests_get_a_503() -> None:
    harness = Harness(slot_count=1, waiting_requests_max=2)
    for name in "abcd":
        harness.tell(submit(name))
    failed = harness.one(Failed)
    assert (failed.request_id, failed.code, failed.retryable) == ("d", 503, True)


def test_a_cancel_frees_everything_once_the_step_in_flight_is_over() -> None:
    harness = Harness()
    harness.tell(submit("a"))
    harness.tell(CancelRequest(request_id="a", epoch=0))
    assert harness.one(Finished).reason == "cancelled"
    assert harness.machine.pool is not None and harness.machine.pool.blocks.free_count < 16
    harness.step()
    harness.none(Generation)
    check_idle(harness.machine)


def test_blocks_of_a_cancelled_request_are_not_granted_while_its_step_runs() -> None:
    harness = Harness(block_count=2, slot_count=2)
    harness.tell(submit("a", 5, max_tokens=2))
    old = harness.one(ExecuteBatch)
    harness.tell(CancelRequest(request_id="a", epoch=0))
    harness.tell(submit("b", 5, max_tokens=2))
    harness.none(ExecuteBatch)
    harness.answer(old)
    new = harness.one(ExecuteBatch)
    assert new.closed == ("a",) and new.rows[0].request_id == "b"


def test_a_cancel_that_overtakes_its_request_ends_it_at_once() -> None:
    harness = Harness()
    harness.tell(CancelRequest(request_id="a", epoch=0))
    harness.tell(submit("a"))
    assert harness.one(Finished).reason == "cancelled"
    harness.none(ExecuteBatch)


def test_a_late_cancel_of_an_ended_request_does_not_touch_its_ids_next_use() -> None:
    harness = Harness()
    harness.tell(submit("a", max_tokens=1))
    harness.run()
    harness.tell(CancelRequest(request_id="a", epoch=0))
    harness.take(Finished)
    harness.tell(submit("a", max_tokens=1))
    harness.run()
    assert harness.one(Finished).reason == "length"


def test_a_duplicate_submission_changes_nothing() -> None:
    harness = Harness()
    harness.tell(submit("a"))
    harness.tell(submit("a"))
    harness.run()
    harness.one(Finished)
    check_idle(harness.machine)


def test_a_newer_attempt_replaces_the_older_one() -> None:
    harness = Harness()
    harness.tell(submit("a", max_tokens=4))
    old = harness.one(ExecuteBatch)
    harness.tell(submit("a", max_tokens=4, epoch=65536, delivered_token_ids=(1005,)))
    harness.answer(old)
    harness.run()
    (finished,) = harness.take(Finished)
    assert finished.epoch == 65536 and finished.usage.completion_tokens == 4
    generations = harness.take(Generation)
    assert [g.first_index for g in generations] == [1, 2, 3]
    assert [t for g in generations for t in g.token_ids] == [1006, 1007, 1008]
    check_idle(harness.machine)


def test_a_retry_whose_answer_was_complete_gets_its_end_again() -> None:
    harness = Harness()
    harness.tell(submit("a", max_tokens=2, epoch=65536, delivered_token_ids=(7, 8)))
    assert harness.one(Finished).reason == "length"
    harness.none(ExecuteBatch)


def test_a_row_that_fails_ends_its_request_and_no_other() -> None:
    harness = Harness()
    harness.tell(submit("a"))
    harness.step(error="logits are not finite")
    failed = harness.one(Failed)
    assert failed.code == 500 and "not finite" in failed.message and not failed.retryable
    harness.tell(submit("b"))
    harness.run()
    harness.one(Finished)
    check_idle(harness.machine)


def test_results_of_another_step_or_incarnation_change_nothing() -> None:
    harness = Harness()
    harness.tell(submit("a", 4, max_tokens=2))
    batch = harness.one(ExecuteBatch)
    harness.tell(BatchResult(step=batch.step, incarnation=0, rank=0, rows=()))
    harness.tell(BatchResult(step=batch.step + 1, incarnation=1, rank=0, rows=()))
    harness.none(Generation)
    harness.answer(batch)
    harness.answer(batch)
    harness.run()
    harness.one(Finished)
    assert len(harness.take(Generation)) == 2


def test_prompt_logprobs_of_all_chunks_come_with_the_first_token() -> None:
    harness = Harness()
    harness.tell(submit("a", 10, max_tokens=2))
    entry = TokenLogprobs(token_id=1, logprob=-1.0)
    harness.step(prompt_logprobs=(None, *(entry,) * 7))
    harness.step(prompt_logprobs=(entry,) * 2)
    harness.run()
    first, second = harness.take(Generation)
    assert first.prompt_logprobs == (None, *(entry,) * 9) and second.prompt_logprobs == ()


def test_it_registers_until_the_view_names_it_and_again_when_a_new_view_does_not() -> None:
    harness = Harness()
    harness.one(RegisterInstance)
    harness.fire("register")
    harness.one(RegisterInstance)
    harness.tell(ClusterView(version=1, registry_incarnation=1, instances=(info("m0", "MIX"),)))
    harness.fire("register")
    harness.none(RegisterInstance)
    harness.tell(ClusterView(version=1, registry_incarnation=2, instances=()))
    harness.one(RegisterInstance)
    harness.take(Heartbeat)
    harness.fire("heartbeat")
    assert harness.one(Heartbeat).blocks_free == 16


def test_draining_refuses_new_requests_and_reports_when_the_last_has_ended() -> None:
    harness = Harness()
    harness.tell(submit("a"))
    harness.tell(Drain(deadline_ms=1000), "supervisor/root")
    harness.tell(submit("b"))
    failed = harness.one(Failed)
    assert (failed.request_id, failed.code, failed.retryable) == ("b", 503, True)
    harness.none(Drained)
    harness.run()
    harness.one(Finished)
    harness.one(Drained)
    assert harness.machine.state is SchedulerState.DRAINING


def test_draining_fails_what_is_left_at_its_deadline() -> None:
    harness = Harness()
    harness.tell(submit("a"))
    harness.tell(Drain(deadline_ms=1000), "supervisor/root")
    harness.fire("drain")
    assert harness.one(Failed).retryable
    harness.one(Drained)
    harness.run()
    check_idle(harness.machine)


def test_status_names_each_request_its_state_and_what_it_waits_for() -> None:
    harness = Harness(slot_count=1)
    harness.tell(submit("a"))
    harness.tell(submit("b"))
    _, requests = harness.machine.status(harness.now_ns)
    assert [(row[0], row[2], row[3]) for row in requests] == [
        ("a", "prefilling", "step 1"),
        ("b", "waiting", "blocks and a slot"),
    ]


def test_a_request_about_which_a_message_cannot_be_encoded_fails_and_frees_what_it_held() -> None:
    harness = Harness()
    harness.tell(submit("a"))
    harness.tell(submit("b", max_tokens=1))
    harness.tell(NotSent(request_id="a", epoch=0, what="Generation", to="front/gateway", reason="no bytes for it"))
    failed = harness.one(Failed)
    assert (failed.request_id, failed.code, failed.message, failed.retryable) == ("a", 500, "no bytes for it", False)
    harness.tell(NotSent(request_id="a", epoch=0, what="Failed", to="front/gateway", reason="no bytes for it"))
    harness.none(Failed)
    harness.run()
    assert [one.request_id for one in harness.take(Generation)] == ["b"]
    check_idle(harness.machine)


def test_an_answer_that_nobody_reads_yet_comes_in_groups_its_first_and_last_tokens_at_once() -> None:
    harness = Harness()
    harness.tell(submit("a", 4, max_tokens=9, output_interval=3, logprobs=0))
    logprobs = [TokenLogprobs(token_id=token, logprob=-float(token)) for token in range(11, 20)]
    told: list[list[Generation]] = []
    for entry in logprobs:
        harness.step({"a": (entry.token_id,)}, logprobs=(entry,))
        told.append(harness.take(Generation))
    assert [[len(each.token_ids) for each in step] for step in told] == [[1], [], [], [3], [], [], [3], [], [2]]
    flat = [each for step in told for each in step]
    assert [each.first_index for each in flat] == [0, 1, 4, 7]
    assert [token for each in flat for token in each.token_ids] == list(range(11, 20))
    assert [entry for each in flat for entry in each.logprobs] == logprobs
    assert harness.one(Finished).usage.completion_tokens == 9
    check_idle(harness.machine)


def test_a_group_survives_preemption_and_goes_on_after_what_an_earlier_attempt_delivered() -> None:
    harness = Harness(block_count=4, slot_count=2)
    harness.tell(submit("a", 4, max_tokens=8, output_interval=2))
    harness.tell(submit("b", 4, max_tokens=8, output_interval=16, delivered_token_ids=(1004, 1005)))
    harness.run()
    generations = harness.take(Generation)
    indices = {
        name: [(each.first_index, len(each.token_ids)) for each in generations if each.request_id == name]
        for name in "ab"
    }
    assert harness.machine.status(0)[0] and dict(harness.machine.status(0)[0])["preempted"] > 0
    assert indices == {"a": [(0, 1), (1, 2), (3, 2), (5, 2), (7, 1)], "b": [(2, 6)]}
    assert all(
        token == 1004 + each.first_index + offset for each in generations for offset, token in enumerate(each.token_ids)
    )
    check_idle(harness.machine)
