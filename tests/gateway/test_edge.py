"""Where the actor's thread meets the event loop: what comes before the machine, after it, and goes wrong in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.detokenizer import TextStream
from actors.gateway.edge import Edge, SampleStream, TicketStream
from actors.gateway.jobs import DeliverEnd, DeliverTokens, PublishInstances, Timings
from actors.gateway.metrics import GatewayMetrics
from actors.runtime.machine import Job
from messages.base import Message
from messages.codec import decode, encode
from messages.envelope import Envelope
from messages.gateway import ClientCancel, ClientStopped, ClientSubmit, Delivered, Sample
from messages.requests import PhaseTimes, SamplingParams, Usage
from tests.messages.samples import unruly


class Letters:
    """Token 97 is "a"; token 0 breaks it."""

    def push(self, token_id: int) -> str:
        if token_id == 0:
            raise ValueError("no such letter")
        return chr(token_id)

    def flush(self) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Bench:
    """An edge, what it told the machine, and what its jobs answered."""

    def __init__(self, *, started: bool = True) -> None:
        self.posted: list[Message] = []
        self.done: list[Message] = []
        self.edge = Edge(self.posted.append, GatewayMetrics())
        if started:
            self.run(PublishInstances(instances=(("m0", "MIX", 10),), missing="", length_max=10))

    def run(self, *jobs: Job) -> None:
        for job in jobs:
            self.edge.submit(job, lambda to, message: None, self.done.append)

    def open(self, count: int = 1, stops: tuple[str, ...] = ()) -> TicketStream:
        sample = Sample(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams())
        return self.edge.open(
            "r", [SampleStream(sample, TextStream(Letters(), stops=stops)) for _ in range(count)], "online"
        )


def tokens(*token_ids: int, first_index: int = 0, ticket: int = 1) -> DeliverTokens:
    return DeliverTokens(ticket=ticket, sample=0, first_index=first_index, token_ids=token_ids)


def end(ticket: int = 1) -> DeliverEnd:
    timings = Timings(
        ttft_ms=1, tpot_ms=1, e2e_ms=1, attempts=1, prefill_instance="m0", decode_instance="m0", phases=PhaseTimes()
    )
    return DeliverEnd(ticket=ticket, sample=0, reason="length", usage=Usage(), timings=timings)


def in_loop(body: Callable[[Bench], object]) -> Bench:
    """Run an async test body with a bench."""
    bench = Bench()

    async def run() -> None:
        result = body(bench)
        assert asyncio.iscoroutine(result)
        await asyncio.wait_for(result, 20)

    asyncio.run(run())
    return bench


def test_only_ends_are_answered_and_exactly_once() -> None:
    async def body(bench: Bench) -> None:
        bench.open()
        bench.run(tokens(97), end(), tokens(98, ticket=9), end(ticket=9))

    bench = in_loop(body)
    assert bench.done == [Delivered(ticket=1, sample=0), Delivered(ticket=9, sample=0)]


def test_one_wake_up_serves_all_that_a_step_brings() -> None:
    async def body(bench: Bench) -> None:
        streams = [bench.open() for _ in range(8)]
        loop = asyncio.get_running_loop()
        calls: list[object] = []
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args, **kwargs: (calls.append(args), original(*args, **kwargs))[1]  # type: ignore[method-assign, assignment]
        bench.run(*(tokens(97, ticket=stream.ticket) for stream in streams))  # before the loop gets its turn
        for stream in streams:
            await stream.news()
            assert stream.samples[0].total.text == "a"
        assert len([args for args in calls if args[0].__qualname__ == "Inbox._work_off"]) == 1  # type: ignore[index]

    in_loop(body)


def test_before_the_machine_has_a_view_and_after_it_stopped_requests_are_refused() -> None:
    async def body(unused: Bench) -> None:
        bench = Bench(started=False)
        assert bench.open().failure is not None
        assert bench.posted == []
        bench.run(PublishInstances(instances=(), missing="no instance can serve", length_max=0))
        assert bench.open().failure is None
        bench.edge.close()
        stream = bench.open()
        assert stream.failure is not None
        assert stream.failure.code == 503
        assert [type(message) for message in bench.posted] == [ClientSubmit]

    in_loop(body)


def test_whoever_waits_when_the_actor_stops_gets_an_error() -> None:
    async def body(bench: Bench) -> None:
        stream = bench.open()
        bench.edge.close()
        while await stream.news():
            pass
        assert stream.failure is not None
        assert stream.failure.code == 503

    in_loop(body)


def test_text_that_cannot_be_made_fails_its_request_alone() -> None:
    async def body(bench: Bench) -> None:
        broken, healthy = bench.open(), bench.open()
        bench.run(tokens(0, ticket=1), tokens(0, first_index=1, ticket=1), tokens(97, ticket=2), end(ticket=2))
        while await broken.news():
            pass
        while await healthy.news():
            pass
        assert broken.failure is not None
        assert broken.failure.code == 500
        assert healthy.samples[0].total.text == "a"
        assert [type(message) for message in bench.posted[2:]] == [ClientCancel]

    in_loop(body)


def test_a_stop_string_is_told_once_and_ends_the_sample_s_text() -> None:
    async def body(bench: Bench) -> None:
        stream = bench.open(stops=("ab",))
        bench.run(tokens(120, 97, 98, 97, 98), tokens(97, 98, first_index=5), end())
        while await stream.news():
            pass
        sample = stream.samples[0]
        assert (sample.total.text, sample.total.token_ids) == ("x", [120, 97, 98])
        assert (sample.finish_reason, sample.stop_reason) == ("stop", "ab")
        assert bench.posted[1:] == [ClientStopped(ticket=1, sample=0, token_count=3)]

    in_loop(body)


@pytest.mark.parametrize("over", [False, True])
def test_letting_go_of_a_request_cancels_it_unless_it_is_over(over: bool) -> None:
    async def body(bench: Bench) -> None:
        stream = bench.open()
        if over:
            bench.run(end())
            while await stream.news():
                pass
        bench.edge.release(stream)
        bench.edge.release(stream)
        assert [type(message) for message in bench.posted[1:]] == ([] if over else [ClientCancel])

    in_loop(body)


def test_deltas_are_given_once_and_add_up_to_the_total() -> None:
    async def body(bench: Bench) -> None:
        stream = bench.open()
        bench.run(tokens(97, 98))
        await stream.news()
        first = stream.samples[0].take()
        bench.run(tokens(99, first_index=2), end())
        while await stream.news():
            pass
        second = stream.samples[0].take()
        assert (first.text, second.text, stream.samples[0].take().text) == ("ab", "c", "")
        first.add(second)
        assert first == stream.samples[0].total

    in_loop(body)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), unruly(), min_size=1, max_size=2))
def test_a_value_that_no_message_can_carry_fails_its_request_alone(fields: dict[str, object]) -> None:
    """Whatever it is and whichever field holds it: what reaches the machine can be sent and read."""

    async def body(bench: Bench) -> None:
        sample = Sample(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(**fields))  # type: ignore[arg-type]
        stream = bench.edge.open("r", [SampleStream(sample, TextStream(Letters()))], "online")
        if stream.failure is not None:
            assert stream.failure.code == 400
            assert not await stream.news()
            assert bench.posted == []
        else:
            (submit,) = bench.posted
            assert isinstance(submit, ClientSubmit)
            assert decode(encode(Envelope(message_id="1", sender="a/b", to="c/d", sent_ns=1, message=submit)))
        assert bench.open().failure is None, "the next request is taken"

    in_loop(body)


def test_every_sample_is_looked_at_and_a_shared_prompt_once() -> None:
    async def body(bench: Bench) -> None:
        prompt = (1, 2, 3)
        samplings = [SamplingParams(), SamplingParams(seed=1 << 70)]
        samples = [Sample(request_id="r", prompt_token_ids=prompt, sampling=sampling) for sampling in samplings]
        streams = [SampleStream(sample, TextStream(Letters())) for sample in samples]
        failure = bench.edge.open("r", streams, "online").failure
        assert failure is not None and "cannot be passed on" in failure.message
        other = Sample(request_id="r", prompt_token_ids=(1, 1 << 70), sampling=SamplingParams())
        assert bench.edge.open("r", [*streams[:1], SampleStream(other, TextStream(Letters()))], "online").failure

    in_loop(body)
