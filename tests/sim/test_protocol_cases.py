"""Whole-protocol cases in a simulated cluster: real machines of every role, invariants checked after every step.

Each test ends with every request over as it should be, and every block, slot, lease, push and receive free.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from messages.batch import ExecuteBatch
from messages.envelope import Envelope
from messages.transfer import PullKVCache
from scripts.simulated_client import Request
from tests.sim.cases import Case, FirstChunks, request

HANDOFF_MESSAGES = (
    "SubmitRequest",
    "AddNewRequest",
    "RequestAccepted",
    "OpenReceive",
    "ReceiveOpened",
    "OpenPush",
    "ChunkArrived",
    "ChunkMerged",
    "FirstGeneration",
    "PullKVCache",
    "Restored",
    "HandoffComplete",
    "ClosePush",
    "PushClosed",
    "Generation",
    "Finished",
)
"""Messages between nodes on the way of one request."""

CRASH_POINTS = (
    "SubmitRequest",
    "AddNewRequest",
    "RequestAccepted",
    "ChunkArrived",
    "FirstGeneration",
    "PullKVCache",
    "Merged",
    "AllRestored",
    "HandoffComplete",
    "Generation",
    "Finished",
)
NODES = ("p0.ctl", "p0.r1", "d0.ctl", "d0.r0")


def three() -> list[Request]:
    return [request(1, 17, max_tokens=6), request(2, 4), request(3, 9)]


def test_hand_offs_complete_and_free_everything() -> None:
    case = Case(three()).run()
    assert case.states == ["finished"] * 3
    assert case.count("HandoffComplete", "p0") == 3


@pytest.mark.parametrize("action", ["drop", "duplicate", "delay", "reorder"])
@pytest.mark.parametrize("kind", HANDOFF_MESSAGES)
def test_one_disturbed_message_of_each_type_breaks_nothing(kind: str, action: str) -> None:
    """C39."""
    extra = " ms=1500" if action == "delay" else ""
    case = Case(three(), faults=f"{action} type={kind} nth=2{extra}").run()
    assert case.states == ["finished"] * 3
    assert case.disturbed >= 1


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_process_killed_at_a_step_of_the_protocol_costs_no_request(point: str, node: str) -> None:
    """C36, C37: the clients see complete, right streams, each token once."""
    case = Case(three())
    case.crash_at(node, point, nth=2)
    case.run()
    assert case.crashed == [node]
    assert case.states == ["finished"] * 3


@pytest.mark.parametrize("node", ["d0.ctl", "d0.r0"])
@pytest.mark.parametrize("point", ["ChunkArrived", "FirstGeneration", "PullKVCache", "AllRestored"])
def test_a_decode_instance_that_dies_before_completion_costs_no_second_prefill(point: str, node: str) -> None:
    case = Case([request(1, 17)], topology="P2/D1x2")
    case.crash_at(node, point)
    chunks = FirstChunks(case)
    case.run()
    assert case.crashed == [node]
    assert case.states == ["finished"]
    assert chunks.by_instance["p0"] == 1 or point == "AllRestored"
    assert case.count("HandoffComplete", "p0") >= 1


@pytest.mark.parametrize("topology", ["TP2", "P2/D1", "P1/D2"])
def test_a_request_of_one_token_ends_where_it_was_prefilled(topology: str) -> None:
    """C04."""
    case = Case([request(1, max_tokens=1), request(2, 17, max_tokens=1)], topology=topology).run()
    assert case.states == ["finished"] * 2
    assert [len(one.tokens) for one in case.cluster.clients.requests] == [1, 1]
    assert case.count("FirstGeneration", "d0") == 0


def test_a_first_token_that_stops_ends_on_the_prefill_instance_and_releases_the_reservation() -> None:
    """C05."""
    first = Case([request(1)]).cluster.clients.requests[0].expected
    case = Case([request(1, stop_token_ids=(first[0],))]).run()
    (only,) = case.cluster.clients.requests
    assert (only.state, only.tokens) == ("finished", first[:1])
    assert case.count("ReleaseRequest", "d0") == 1 and case.count("FirstGeneration", "d0") == 0


def test_a_prompt_that_no_decode_instance_can_hold_gets_its_error_and_is_never_prefilled() -> None:
    """C07."""
    case = Case([request(1, 40, max_tokens=20), request(2)], block_count=14, max_model_len=64)
    chunks = FirstChunks(case)
    case.run()
    refused, other = case.cluster.clients.requests
    assert refused.state == "error" and refused.error[:3] in ("400", "413"), refused.error
    assert other.state == "finished" and chunks.by_instance["p0"] == 1


def test_a_client_that_leaves_between_first_generation_and_decoding_leaves_nothing() -> None:
    """C19."""
    one = request(1, 17)
    case = Case([one, request(2)])

    def leave(envelope: Envelope) -> None:
        if isinstance(envelope.message, PullKVCache) and envelope.message.request_id == "r1":
            case.cluster.clients.cancel(one.ticket)

    case.on_handled.append(leave)
    case.run()
    assert case.states == ["cancelled", "finished"]


@pytest.mark.parametrize("after_ms", [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0])
@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
def test_a_cancel_at_any_time_frees_both_sides(after_ms: float, mode: str) -> None:
    """C18, C20: whatever the request does at that moment; the next requests are right."""
    leaving = [request(name, 17, cancel_after_ms=after_ms, max_tokens=9) for name in (1, 2)]
    case = Case([*leaving, request(3, 17)], kv_cache_transfer_mode=mode, block_count=20).run()
    assert case.states[2] == "finished"
    assert set(case.states[:2]) <= {"cancelled", "finished"}


def test_two_half_pool_requests_on_two_prefill_instances_do_not_deadlock() -> None:
    """C22."""
    requests = [request(name, 24, max_tokens=8) for name in range(1, 5)]
    case = Case(requests, topology="P1x2/D1", block_count=14).run()
    assert case.states == ["finished"] * 4


def test_more_requests_than_state_slots_are_queued() -> None:
    """C23."""
    requests = [request(name, 5) for name in range(1, 11)]
    case = Case(requests, max_seqs_per_batch=2).run()
    assert case.states == ["finished"] * 10


@pytest.mark.parametrize("node", ["d0.ctl", "d0.r0"])
def test_a_stuck_decode_instance_delays_only_what_it_was_given(node: str) -> None:
    """C25, C40: d0 hangs for good (the supervisor's hang detection is switched off); d1 serves the rest."""
    requests = [request(name, 5) for name in range(1, 13)]
    case = Case(requests, topology="P2/D1x2", block_count=40, max_seqs_per_batch=8, hang_timeout_ms=600_000)
    case.at(-5.0, lambda: case.cluster.simulation.stall(node))
    ended: dict[str, float] = {}

    def look(_: Envelope) -> None:
        for one in requests:
            if one.is_over and one.name not in ended:
                ended[one.name] = case.cluster.simulation.now_ns / 1e6

    case.on_handled.append(look)
    case.at(20_000.0, lambda: case.cluster.simulation.resume(node))
    case.run()
    assert case.states == ["finished"] * 12
    began = min(one.submitted_ns for one in requests) / 1e6
    quick = [name for name, at_ms in ended.items() if at_ms - began < 1_000.0]
    assert len(quick) >= 8, ended
    assert max(ended.values()) - began < 15_000.0, ended


def test_offline_requests_come_after_online_ones_and_still_finish() -> None:
    """C26."""
    order: list[str] = []
    offline = [request(index, 17, priority="offline") for index in (1, 2, 3)]
    online = [request(index, 17) for index in range(4, 10)]
    case = Case([*offline, *online], block_count=14, max_seqs_per_batch=2)

    def look(_: Envelope) -> None:
        for one in (*offline, *online):
            if one.is_over and one.name not in order:
                order.append(one.name)

    case.on_handled.append(look)
    case.run(arrivals_ms=[0.0, 0.0, 0.0, *(float(index) for index in range(6))])
    assert case.states == ["finished"] * 9
    assert order[-1] in ("r1", "r2", "r3")
    assert len({"r1", "r2", "r3"} & set(order[:6])) <= 1, order


def test_a_restarted_prefill_instance_serves_at_once() -> None:
    """C38."""
    requests = [request(1, 17), request(2, 17)]
    case = Case(requests)
    case.at(1.5, lambda: case.cluster.simulation.crash("p0.ctl"))
    case.run(arrivals_ms=[0.0, 1_500.0])
    assert case.states == ["finished"] * 2


def test_a_full_decode_instance_preempts_and_the_tokens_do_not_change() -> None:
    requests = [request(name, 9, max_tokens=30) for name in range(1, 5)]
    case = Case(requests, block_count=16, max_seqs_per_batch=4)
    case.run()
    assert case.states == ["finished"] * 4
    batcher = case.scheduler("d0").batcher
    assert batcher is not None and batcher.preempted_count > 0


@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_a_stream_goes_on_step_by_step_as_before_when_its_decode_instance_dies(
    speculative_tokens: int, mode: str
) -> None:
    """C29: the client's tokens are those of the undisturbed steps, and no prefill samples what was delivered."""
    requests = [request(name, 4 + name, max_tokens=24) for name in range(1, 5)]
    for nth in (8, 13, 18):
        case = Case(
            [replace(one) for one in requests],
            topology="P2/D1x2",
            num_speculative_tokens=speculative_tokens,
            kv_cache_transfer_mode=mode,
        )
        case.crash_at("d0.ctl", "Generation", nth)
        resumed: list[bool] = []

        def look(envelope: Envelope, resumed: list[bool] = resumed) -> None:
            if isinstance(envelope.message, ExecuteBatch) and envelope.to == "p0.ctl/engine":
                resumed += [row.samples for row in envelope.message.rows if row.resumes]

        case.on_handled.append(look)
        case.run()
        assert case.states == ["finished"] * 4
        assert resumed and not any(resumed)


def test_staging_that_is_full_is_a_refusal_and_a_retry() -> None:
    case = Case(three(), faults="refuse type=OpenReceive times=10").run()
    assert case.states == ["finished"] * 3
    assert case.count("RequestRefused", "p0") >= 10
