"""The gateway's rules, one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.attempts import INSTANCE_WAIT_MS
from actors.gateway.jobs import PublishInstances
from actors.gateway.machine import CLOSE_WAIT_MS, GAP_WAIT_MS, QUIET_MS, ROLL_CALL_MS
from actors.gateway.rollcall import PATIENCE_NS
from actors.runtime.machine import Run
from messages.base import EPOCHS_PER_ATTEMPT, GATEWAY, REGISTRY, SUPERVISOR, attempt_of, first_epoch
from messages.cluster import ClusterView, Heartbeat, ViewRequest
from messages.lifecycle import Drain, Drained, NotSent, PeerLost
from messages.requests import TokenLogprobs
from messages.timers import RequestTimer
from tests.gateway.harness import PROMPT, Harness, instance

# -- delivery --------------------------------------------------------------------------------------------------------


def test_tokens_of_both_instances_are_one_stream_and_end_once() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.tokens("d0", 1, 11, 12)
    gateway.finish("d0", 3)
    assert gateway.delivered() == [10, 11, 12]
    (end,) = gateway.ends()
    assert (end.reason, end.usage.prompt_tokens, end.usage.completion_tokens) == ("length", 3, 3)
    assert end.usage.cached_tokens == 2
    assert (end.timings.prefill_instance, end.timings.decode_instance) == ("p0", "d0")
    assert gateway.live() == 0


def test_a_request_that_ends_at_its_first_token_is_one_token_and_one_end() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit(max_tokens=1)
    gateway.tokens("p0", 0, 10)
    gateway.finish("p0", 1)
    assert gateway.delivered() == [10]
    (end,) = gateway.ends()
    assert end.reason == "length"
    assert end.timings.prefill_instance == end.timings.decode_instance == "p0"


def test_a_token_from_d_that_overtakes_the_first_one_waits_for_it() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("d0", 1, 11)
    gateway.finish("d0", 2)
    assert gateway.delivered() == []
    assert gateway.ends() == []
    gateway.tokens("p0", 0, 10)
    assert gateway.delivered() == [10, 11]
    assert len(gateway.ends()) == 1


def test_repeated_tokens_and_repeated_ends_are_delivered_once() -> None:
    gateway = Harness("m0")
    gateway.submit()
    gateway.tokens("m0", 0, 10)
    gateway.tokens("m0", 0, 10)
    gateway.tokens("m0", 0, 10, 11)
    gateway.finish("m0", 2)
    gateway.finish("m0", 2)
    gateway.tokens("m0", 1, 11)
    assert gateway.delivered() == [10, 11]
    assert len(gateway.ends()) == 1


def test_a_message_of_an_older_epoch_changes_nothing() -> None:
    gateway = Harness("p0", "d0", "d1")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.tokens("d1", 1, 11, epoch=1)  # p0 offered it again, to d1
    gateway.tokens("d0", 2, 77, epoch=0)
    gateway.fail("d0", epoch=0)
    gateway.finish("d0", 3, epoch=0)
    gateway.tokens("d1", 2, 12, epoch=1)
    assert gateway.delivered() == [10, 11, 12]
    assert gateway.ends() == []
    assert len(gateway.submissions()) == 1


def test_an_epoch_of_an_attempt_that_was_never_made_changes_nothing() -> None:
    gateway = Harness("m0")
    gateway.submit()
    gateway.tokens("m0", 0, 66, epoch=first_epoch(3))
    gateway.tokens("m0", 0, 10)
    assert gateway.delivered() == [10]


def test_logprobs_come_with_their_tokens_and_prompt_logprobs_come_once() -> None:
    gateway = Harness("m0")
    gateway.submit(logprobs=0, prompt_logprobs=0)
    entries = [TokenLogprobs(token_id=token, logprob=-1.0) for token in (10, 11)]
    prompt = (None, *(TokenLogprobs(token_id=token, logprob=-2.0) for token in PROMPT[1:]))
    gateway.tokens("m0", 1, 11, logprobs=(entries[1],))
    gateway.tokens("m0", 0, 10, logprobs=(entries[0],), prompt_logprobs=prompt)
    gateway.tokens("m0", 2, 12, logprobs=(entries[1],), prompt_logprobs=prompt)
    jobs = [effect.job for effect in gateway.effects if hasattr(effect, "job") and hasattr(effect.job, "logprobs")]
    assert [job.logprobs for job in jobs] == [tuple(entries), (entries[1],)]
    assert [job.prompt_logprobs for job in jobs] == [prompt, ()]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_with_repetitions_and_stale_messages_gives_each_index_once_in_order(data: st.DataObject) -> None:
    gateway = Harness("p0", "d0", "d1")
    count = data.draw(st.integers(2, 8))
    gateway.submit(max_tokens=count)
    pieces = [("p0" if index == 0 else "d0", index) for index in range(count)]
    order = data.draw(st.permutations(pieces + data.draw(st.lists(st.sampled_from(pieces), max_size=4))))
    for name, index in order:
        if data.draw(st.booleans()):
            gateway.tokens("d1", index, 666, epoch=first_epoch(data.draw(st.integers(1, 3))))
        gateway.tokens(name, index, 100 + index)
    gateway.finish("d0", count)
    assert gateway.delivered() == [100 + index for index in range(count)]
    assert len(gateway.ends()) == 1


# -- admission -------------------------------------------------------------------------------------------------------


def test_without_any_instance_that_can_serve_a_request_is_refused_with_retry_after() -> None:
    for instances in ((), ("p0",), ("d0",)):
        gateway = Harness(*instances)
        gateway.submit()
        (refusal,) = gateway.refusals()
        assert (refusal.code, refusal.retry_after_s > 0) == (503, True)
        assert gateway.live() == 0


def test_an_id_in_flight_is_refused_with_409_and_the_first_request_lives_on() -> None:
    gateway = Harness("m0")
    gateway.submit("a", ticket=1)
    gateway.submit("a", ticket=2)
    assert [(refusal.ticket, refusal.code) for refusal in gateway.refusals()] == [(2, 409)]
    gateway.tokens("m0", 0, 10, request_id="a")
    gateway.finish("m0", 1, request_id="a")
    assert gateway.delivered(ticket=1) == [10]
    gateway.submit("a", ticket=3)
    assert len(gateway.refusals()) == 1


def test_the_ids_of_several_samples_and_their_parent_are_all_taken() -> None:
    gateway = Harness("m0")
    gateway.submit("a", ticket=1, n=3)
    gateway.submit("a", ticket=2)
    gateway.submit("a-1", ticket=3)
    assert [refusal.code for refusal in gateway.refusals()] == [409, 409]


def test_an_id_stays_taken_until_its_end_is_delivered() -> None:
    gateway = Harness("m0")
    gateway.deliver_acks = False
    gateway.submit("a", ticket=1)
    gateway.tokens("m0", 0, 10, request_id="a")
    gateway.finish("m0", 1, request_id="a")
    gateway.submit("a", ticket=2)
    assert [refusal.code for refusal in gateway.refusals()] == [409]
    gateway.ack(gateway.ends()[0])
    gateway.submit("a", ticket=3)
    assert len(gateway.refusals()) == 1


def test_an_id_that_is_used_again_is_safe_from_its_former_life() -> None:
    gateway = Harness("m0")
    gateway.submit("r", ticket=1)
    gateway.cancel(ticket=1)
    gateway.submit("r", ticket=2)
    gateway.tokens("m0", 0, 66, epoch=0)
    assert gateway.delivered(ticket=2) == []
    assert gateway.submissions()[-1][1].epoch == first_epoch(1)
    gateway.tokens("m0", 0, 10, epoch=first_epoch(1))
    assert gateway.delivered(ticket=2) == [10]


def test_a_restarted_front_uses_epochs_beyond_those_of_its_former_lives() -> None:
    before, after = Harness("m0", incarnation=1), Harness("m0", incarnation=2)
    before.submit()
    after.submit()
    assert after.submissions()[0][1].epoch > before.submissions()[0][1].epoch + 1000 * EPOCHS_PER_ATTEMPT


def test_more_tokens_than_any_instance_holds_are_refused_with_the_numbers() -> None:
    gateway = Harness(instance("p0", max_model_len=50), instance("d0", max_model_len=20))
    gateway.submit(prompt=tuple(range(15)), max_tokens=6)
    (refusal,) = gateway.refusals()
    assert (refusal.code, refusal.param) == (400, "max_tokens")
    for number in ("15", "6", "21", "20"):
        assert number in refusal.message
    gateway.submit(prompt=tuple(range(14)), max_tokens=6, ticket=2)
    assert len(gateway.submissions()) == 1


def test_requests_go_to_the_least_loaded_instance_in_turn_among_equals() -> None:
    gateway = Harness("p0", "p1", "d0")
    for number in range(4):
        gateway.submit(f"r{number}", ticket=number)
    assert [to for to, _ in gateway.submissions()] == ["p0", "p1", "p0", "p1"]
    gateway.tokens("p0", 0, 10, request_id="r0")
    gateway.tokens("d0", 1, 11, request_id="r0")  # p0 is done with r0
    gateway.submit("r4", ticket=4)
    assert gateway.submissions()[-1][0] == "p0"


def test_a_request_that_ended_no_longer_counts_as_load() -> None:
    gateway = Harness("m0", "m1")
    for number in range(3):
        gateway.submit(f"r{number}", ticket=number)
    gateway.cancel(ticket=0)
    gateway.cancel(ticket=2)
    gateway.submit("r3", ticket=3)
    assert [to for to, _ in gateway.submissions()] == ["m0", "m1", "m0", "m0"]


# -- attempts --------------------------------------------------------------------------------------------------------


def test_a_retryable_failure_is_attempted_again_elsewhere_after_a_backoff() -> None:
    gateway = Harness("p0", "p1", "d0")
    gateway.submit()
    gateway.fail("p0")
    assert len(gateway.submissions()) == 1
    gateway.advance(100)
    to, submit = gateway.submissions()[-1]
    assert (to, submit.epoch, submit.delivered_token_ids) == ("p1", first_epoch(1), ())


def test_a_cancel_that_nobody_asked_for_is_a_retryable_failure() -> None:
    gateway = Harness("m0", "m1")
    gateway.submit()
    gateway.finish("m0", 0, reason="cancelled")
    assert gateway.ends() == []
    gateway.advance(100)
    assert gateway.submissions()[-1][0] == "m1"


def test_a_timer_of_an_older_attempt_does_nothing() -> None:
    gateway = Harness("m0")
    gateway.submit()
    gateway.fail("m0")
    gateway.advance(100)
    gateway.fail("m0", epoch=first_epoch(1))
    late = RequestTimer(request_id="r", epoch=first_epoch(1), purpose="wait")
    gateway.handle(GATEWAY, late)
    assert len(gateway.submissions()) == 2


def test_a_final_failure_is_told_at_once_with_its_code() -> None:
    gateway = Harness("p0", "p1", "d0")
    gateway.submit()
    gateway.fail("p0", code=413, retryable=False)
    (end,) = gateway.ends()
    assert (end.reason, end.code, end.message) == ("error", 413, "no luck")
    assert len(gateway.submissions()) == 1
    assert gateway.live() == 0


def test_a_lost_decode_instance_continues_the_stream_with_the_tokens_already_delivered() -> None:
    gateway = Harness("p0", "d0", "d1")
    gateway.submit(seed=7)
    gateway.tokens("p0", 0, 10)
    gateway.tokens("d0", 1, 11)
    gateway.lose("d0")
    submit = gateway.submissions()[-1][1]
    assert (submit.epoch, submit.delivered_token_ids, submit.sampling.seed) == (first_epoch(1), (10, 11), 7)
    gateway.tokens("d0", 2, 66)  # the dead one's last words
    gateway.tokens("p0", 2, 12, epoch=first_epoch(1))
    gateway.tokens("d1", 3, 13, epoch=first_epoch(1))
    gateway.finish("d1", 4, epoch=first_epoch(1))
    assert gateway.delivered() == [10, 11, 12, 13]
    assert [end.reason for end in gateway.ends()] == ["length"]
    assert gateway.ends()[0].timings.attempts == 2


def test_a_lost_prefill_instance_before_the_decode_instance_spoke_leads_to_a_new_attempt() -> None:
    for first in ((), (10,)):
        gateway = Harness("p0", "p1", "d0")
        gateway.submit()
        if first:
            gateway.tokens("p0", 0, *first)
        gateway.lose("p0")
        to, submit = gateway.submissions()[-1]
        assert (to, submit.delivered_token_ids) == ("p1", first)
        assert ("d0", "r", first_epoch(1) - 1) in gateway.cancels()


def test_a_lost_prefill_instance_after_the_decode_instance_spoke_changes_nothing() -> None:
    gateway = Harness("p0", "p1", "d0")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.tokens("d0", 1, 11)
    gateway.lose("p0")
    gateway.view("p1", "d0")
    assert len(gateway.submissions()) == 1
    assert gateway.cancels() == []


def test_an_instance_that_comes_back_under_a_new_incarnation_is_a_lost_instance() -> None:
    gateway = Harness("m0")
    gateway.submit()
    gateway.tokens("m0", 0, 10)
    gateway.view(instance("m0", incarnation=2))
    assert gateway.submissions()[-1][1].delivered_token_ids == (10,)
    assert gateway.submissions()[-1][1].epoch == first_epoch(1)


def test_news_about_older_lives_and_older_views_change_nothing() -> None:
    gateway = Harness(instance("m0", incarnation=2), "m1")
    gateway.submit()
    gateway.lose("m0", incarnation=1)
    old = ClusterView(version=0, registry_incarnation=1, instances=(instance("m1"),))
    gateway.handle(REGISTRY, old)
    assert [to for to, _ in gateway.submissions()] == ["m0"]


def test_an_instance_that_leaves_the_view_is_told_to_cancel_nothing_but_its_requests_move() -> None:
    gateway = Harness("m0", "m1")
    gateway.submit()
    gateway.view("m1")
    assert gateway.submissions()[-1][0] == "m1"


def test_attempts_are_bounded_and_end_in_one_clear_error() -> None:
    gateway = Harness("m0", request_attempts_max=3)
    gateway.submit()
    for attempt in range(3):
        gateway.fail("m0", epoch=first_epoch(attempt))
        gateway.advance(1000)
    (end,) = gateway.ends()
    assert (end.reason, end.code) == ("error", 503)
    assert "3 attempts" in end.message
    assert "request_attempts_max" in end.message
    assert len(gateway.submissions()) == 3


def test_when_the_delivered_tokens_already_end_the_request_nobody_is_asked_again() -> None:
    for tokens, reason in (((10, 11), "length"), ((99,), "stop")):
        gateway = Harness("m0")
        gateway.submit(max_tokens=2)
        gateway.tokens("m0", 0, *tokens)
        gateway.lose("m0")
        assert [end.reason for end in gateway.ends()] == [reason]
        assert len(gateway.submissions()) == 1


def test_a_request_whose_only_instance_died_waits_for_one_and_fails_after_a_bounded_wait() -> None:
    gateway = Harness("m0")
    gateway.submit()
    gateway.lose("m0")
    assert gateway.ends() == []
    gateway.view(instance("m0", incarnation=2))
    assert [to for to, _ in gateway.submissions()] == ["m0", "m0"]
    gateway.lose("m0", incarnation=2)
    gateway.advance(INSTANCE_WAIT_MS)
    (end,) = gateway.ends()
    assert (end.code, end.retry_after_s > 0) == (503, True)


def test_a_token_that_never_arrives_leads_to_a_new_attempt_although_others_follow_it() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("d0", 1, 11)
    gateway.advance(GAP_WAIT_MS - 1)
    gateway.tokens("d0", 2, 12)
    assert len(gateway.submissions()) == 1
    gateway.advance(1)
    assert gateway.submissions()[-1][1].epoch == first_epoch(1)
    assert ("p0", "r", first_epoch(1) - 1) in gateway.cancels()


def test_early_tokens_of_an_attempt_die_with_it() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("d0", 1, 66)
    gateway.advance(GAP_WAIT_MS)
    gateway.tokens("p0", 0, 10, epoch=first_epoch(1))
    assert gateway.delivered() == [10]


def test_a_gap_that_closes_in_time_leads_to_nothing() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("d0", 1, 11)
    gateway.tokens("p0", 0, 10)
    gateway.advance(GAP_WAIT_MS * 2)
    assert len(gateway.submissions()) == 1


def test_a_request_that_nobody_holds_any_more_is_attempted_again() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.advance(QUIET_MS + ROLL_CALL_MS)
    asked = dict(gateway.status_requests())
    assert set(asked) == {"p0", "d0"}
    gateway.report(asked["p0"], "p0")
    assert len(gateway.submissions()) == 1
    gateway.report(asked["d0"], "d0", "other")
    assert gateway.submissions()[-1][1].delivered_token_ids == (10,)


def test_a_quiet_request_that_somebody_holds_is_left_alone() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    for _ in range(3):
        gateway.advance(QUIET_MS + ROLL_CALL_MS)
        asked = dict(gateway.status_requests()[-2:])
        gateway.report(asked["p0"], "p0", "r")
        gateway.report(asked["d0"], "d0")
    assert len(gateway.submissions()) == 1


def test_a_sign_of_life_during_a_roll_call_saves_a_request_that_nobody_listed() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.advance(QUIET_MS + ROLL_CALL_MS)
    asked = dict(gateway.status_requests())
    gateway.report(asked["d0"], "d0")
    gateway.tokens("p0", 0, 10)
    gateway.advance(QUIET_MS)
    gateway.report(asked["p0"], "p0")
    assert len(gateway.submissions()) == 1


def test_a_roll_call_waits_for_a_busy_instance_but_not_for_ever() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.advance(QUIET_MS + ROLL_CALL_MS)
    first = dict(gateway.status_requests())
    gateway.report(first["d0"], "d0")
    gateway.advance(PATIENCE_NS / 1e6 - 2 * ROLL_CALL_MS)
    assert len(gateway.status_requests()) == 2
    gateway.advance(3 * ROLL_CALL_MS)
    assert len(gateway.status_requests()) == 4
    gateway.report(first["p0"], "p0")  # an answer to the first round
    assert len(gateway.submissions()) == 1


def test_a_roll_call_does_not_wait_for_the_dead() -> None:
    gateway = Harness("p0", "d0", "d1")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.advance(QUIET_MS + ROLL_CALL_MS)
    asked = dict(gateway.status_requests())
    gateway.report(asked["p0"], "p0")
    gateway.report(asked["d0"], "d0")
    gateway.lose("d1")
    assert len(gateway.submissions()) == 2


def test_when_an_unknown_decode_instance_may_have_died_the_holders_are_asked_soon() -> None:
    gateway = Harness("p0", "d0", "d1")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.lose("d0")
    gateway.advance(ROLL_CALL_MS)
    assert {to for to, _ in gateway.status_requests()} == {"p0", "d1"}


def test_a_broken_link_makes_the_gateway_ask_about_the_requests_behind_it() -> None:
    gateway = Harness("m0", "m1")
    gateway.submit()
    gateway.handle("front/office", PeerLost(node="m0.ctl", reason="broken"))
    gateway.advance(ROLL_CALL_MS)
    assert {to for to, _ in gateway.status_requests()} == {"m0", "m1"}


def test_a_request_of_which_something_cannot_be_said_ends_alone_with_the_reason() -> None:
    gateway = Harness("m0")
    gateway.submit("a", ticket=1)
    gateway.submit("b", ticket=2)
    unsaid = NotSent(request_id="a", epoch=0, what="SubmitRequest", to="m0.ctl/scheduler", reason="integer too large")
    gateway.handle("front/post", unsaid)
    gateway.handle("front/post", unsaid)
    (end,) = gateway.ends()
    assert (end.code, end.message) == (500, "integer too large")
    assert [to for to, *_ in gateway.cancels()] == ["m0"]


def test_a_request_past_its_deadline_ends_with_504_and_is_cancelled() -> None:
    gateway = Harness("p0", "d0", request_timeout_ms=2000)
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.advance(2000)
    (end,) = gateway.ends()
    assert (end.code, "request_timeout_ms" in end.message) == (504, True)
    assert {to for to, *_ in gateway.cancels()} == {"p0", "d0"}


# -- cancel and stop strings -----------------------------------------------------------------------------------------


def test_a_client_that_leaves_cancels_at_every_scheduler_that_may_hold_the_request() -> None:
    gateway = Harness("p0", "p1", "d0", "d1")
    gateway.submit()
    gateway.tokens("p0", 0, 10)  # between FirstGeneration and the first decode step
    gateway.cancel()
    assert sorted(gateway.cancels()) == [(name, "r", first_epoch(1) - 1) for name in ("d0", "d1", "p0")]
    assert [end.reason for end in gateway.ends()] == ["cancelled"]
    assert gateway.live() == 0


def test_a_cancel_after_the_decode_instance_spoke_goes_to_the_two_that_are_involved() -> None:
    gateway = Harness("p0", "p1", "d0", "d1")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.tokens("d1", 1, 11)
    gateway.cancel()
    assert {to for to, *_ in gateway.cancels()} == {"p0", "d1"}


def test_a_cancelled_ticket_cancels_all_its_samples_and_unknown_tickets_are_ignored() -> None:
    gateway = Harness("m0")
    gateway.submit("a", n=3)
    gateway.cancel(ticket=9)
    assert gateway.cancels() == []
    gateway.cancel()
    assert [request_id for _, request_id, _ in gateway.cancels()] == ["a-0", "a-1", "a-2"]
    assert gateway.live() == 0


def test_tokens_that_nobody_waits_for_are_cancelled_at_their_sender() -> None:
    gateway = Harness("m0")
    gateway.tokens("m0", 0, 10, request_id="orphan", epoch=5)
    assert gateway.cancels() == [("m0", "orphan", 5)]


def test_a_stop_string_cancels_the_rest_and_ends_with_the_instance_s_figures() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.tokens("d0", 1, 11, 12, 13)
    gateway.stop_string(token_count=2)
    assert {to for to, *_ in gateway.cancels()} == {"p0", "d0"}
    gateway.tokens("d0", 4, 14)
    gateway.finish("d0", 5, reason="cancelled")
    (end,) = gateway.ends()
    assert (end.reason, end.usage.completion_tokens, end.usage.cached_tokens) == ("stop", 2, 2)
    assert gateway.delivered() == [10, 11, 12, 13]


def test_a_stop_string_ends_after_a_bounded_wait_when_the_instance_says_nothing() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("p0", 0, 10)
    gateway.stop_string(token_count=1)
    gateway.advance(CLOSE_WAIT_MS)
    assert [(end.reason, end.usage.completion_tokens) for end in gateway.ends()] == [("stop", 1)]


def test_a_stop_string_found_between_two_attempts_ends_the_request_at_once() -> None:
    gateway = Harness("m0")
    gateway.submit()
    gateway.tokens("m0", 0, 10)
    gateway.fail("m0")
    gateway.stop_string(token_count=1)
    assert [end.reason for end in gateway.ends()] == ["stop"]


def test_a_stop_string_found_when_its_instance_died_needs_no_new_attempt() -> None:
    gateway = Harness("m0", "m1")
    gateway.submit()
    gateway.tokens("m0", 0, 10)
    gateway.stop_string(token_count=1)
    gateway.lose("m0")
    assert [end.reason for end in gateway.ends()] == ["stop"]
    assert len(gateway.submissions()) == 1


# -- the rest --------------------------------------------------------------------------------------------------------


def test_samples_have_requests_of_their_own_and_leave_nothing_behind() -> None:
    gateway = Harness("m0")
    gateway.submit("a", n=3)
    ((to, submit),) = gateway.submissions()
    assert (to, submit.request_id, [sibling.request_id for sibling in submit.siblings]) == ("m0", "a-0", ["a-1", "a-2"])
    for k in range(3):
        gateway.tokens("m0", 0, 10 + k, request_id=f"a-{k}")
        gateway.finish("m0", 1, request_id=f"a-{k}")
    assert [gateway.delivered(sample=k) for k in range(3)] == [[10], [11], [12]]
    assert gateway.live() == 0


def test_samples_of_one_prompt_count_one_by_one_for_the_instance_that_gets_them() -> None:
    gateway = Harness("m0", "m1")
    gateway.submit("a", n=3)
    gateway.submit("b", ticket=2)
    gateway.submit("c", ticket=3)
    assert [to for to, _ in gateway.submissions()] == ["m0", "m1", "m1"]


def test_a_sample_is_attempted_again_alone_with_the_seed_it_had() -> None:
    gateway = Harness("m0", "m1")
    gateway.submit("a", n=3)
    ((_, first),) = gateway.submissions()
    gateway.fail("m0", request_id="a-1", retryable=True)
    gateway.advance(1000)
    to, again = gateway.submissions()[-1]
    assert (to, again.request_id, again.siblings) == ("m1", "a-1", ())
    assert again.sampling == first.siblings[0].sampling and attempt_of(again.epoch) == 1


def test_samples_that_waited_for_an_instance_are_submitted_together_unless_they_have_tokens() -> None:
    gateway = Harness("m0")
    gateway.submit("a", n=3)
    gateway.tokens("m0", 0, 5, request_id="a-1")
    gateway.lose("m0")
    gateway.view("m1")
    submitted = {
        submit.request_id: [sibling.request_id for sibling in submit.siblings]
        for to, submit in gateway.submissions()
        if to == "m1"
    }
    assert submitted == {"a-0": ["a-2"], "a-1": []}


def test_a_drain_refuses_new_requests_finishes_old_ones_and_says_when_it_is_done() -> None:
    gateway = Harness("m0")
    gateway.submit()
    gateway.handle(SUPERVISOR, Drain(deadline_ms=1000))
    published = [effect.job for effect in gateway.effects if isinstance(effect, Run)]
    said = [job.missing for job in published if isinstance(job, PublishInstances)]
    assert said[-1] == "the server is stopping", "/health says so from now on"
    gateway.submit("late", ticket=2)
    assert [refusal.code for refusal in gateway.refusals()] == [503]
    assert gateway.sent(Drained) == []
    gateway.tokens("m0", 0, 10)
    gateway.finish("m0", 1)
    assert gateway.sent(Drained) == [("supervisor", Drained(node="front", actor="gateway"))]


def test_a_drain_s_deadline_fails_what_is_left_with_a_clear_error() -> None:
    gateway = Harness("m0")
    gateway.submit()
    gateway.handle(SUPERVISOR, Drain(deadline_ms=1000))
    gateway.advance(1000)
    (end,) = gateway.ends()
    assert (end.code, "stopping" in end.message) == (503, True)
    assert len(gateway.sent(Drained)) == 1
    assert gateway.cancels()


def test_one_line_tells_where_a_request_s_time_went() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.advance(20)
    gateway.tokens("p0", 0, 10)
    gateway.advance(30)
    gateway.tokens("d0", 1, 11, 12)
    gateway.finish("d0", 3)
    (line,) = gateway.perf_lines()
    fields = dict(line.fields)
    assert (fields["request"], fields["prompt"], fields["output"], fields["route"]) == ("r", 3, 3, "p0→d0")
    assert (fields["ttft_ms"], fields["tpot_ms"], fields["e2e_ms"]) == (20.0, 15.0, 50.0)
    assert "handoff_ms" in fields
    assert "bytes" in fields


def test_a_heartbeat_that_names_another_view_makes_the_gateway_ask_for_it() -> None:
    gateway = Harness("m0")
    before = len(gateway.sent(ViewRequest))
    beat = Heartbeat(
        instance="m0",
        incarnation=1,
        running=0,
        waiting=0,
        blocks_free=1,
        blocks_total=1,
        slots_free=1,
        slots_total=1,
        view_version=1,
    )
    gateway.handle(GATEWAY, beat)
    assert len(gateway.sent(ViewRequest)) == before
    gateway.view("m0", "m1")
    gateway.handle(GATEWAY, beat)
    assert len(gateway.sent(ViewRequest)) == before + 1


def test_no_timer_is_left_when_nothing_is_in_flight() -> None:
    gateway = Harness("p0", "d0")
    gateway.submit()
    gateway.tokens("d0", 1, 11)
    gateway.tokens("p0", 0, 10)
    gateway.fail("d0")
    gateway.advance(500)
    gateway.tokens("p0", 2, 12, epoch=first_epoch(1))
    gateway.finish("p0", 3, epoch=first_epoch(1))
    gateway.advance(ROLL_CALL_MS)
    assert gateway.timers == {}


def test_what_is_missing_to_serve_is_published_until_a_link_stands() -> None:
    gateway = Harness()
    assert gateway.missing() == "no instance can serve"
    gateway.view("p0", links=())
    assert gateway.missing() == "no instance can serve"
    gateway.view("p0", "d0", links=())
    assert gateway.missing() == "prefill and decode instances are being linked"
    gateway.view("p0", "d0", links=(), refused=(("p0", "d0", "block sizes differ"),))
    assert "links refused: p0 with d0: block sizes differ" in gateway.missing()
    gateway.view("p0", "d0")
    assert gateway.missing() == ""
    gateway.lose("d0")
    assert gateway.missing() == "no instance can serve"
    gateway.view("m0")
    assert gateway.missing() == ""


def test_requests_go_to_prefill_instances_that_are_linked_while_there_are_any() -> None:
    gateway = Harness("p0")
    gateway.view("p0", "p1", "d0", links=(("p1", "d0"),))
    for number in range(3):
        gateway.submit(f"r{number}", ticket=number)
    assert [to for to, _ in gateway.submissions()] == ["p1"] * 3
    gateway.view("p0", "p1", "d0", links=())
    gateway.submit("r3", ticket=3)
    assert [to for to, _ in gateway.submissions()][-1] == "p0", "it waits there until the link stands"
