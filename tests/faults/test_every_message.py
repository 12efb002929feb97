"""One message of every type dropped, doubled, delayed or damaged: invariants hold, every request finishes (C39)."""

from __future__ import annotations

import pytest

from actors.runtime.fault_plan import FaultPlan, MessageMatch, Rule
from actors.runtime.machine import Effect
from actors.runtime.simulated_nodes import SimulatedActor
from messages.envelope import Envelope
from messages.requests import SamplingParams
from scripts.simulated_checks import Checks
from scripts.simulated_client import Request
from scripts.simulated_cluster import SimulatedCluster, with_options
from scripts.simulated_model import EOS

OPTIONS = with_options(topology="P2/D1x2", num_speculative_tokens=1, block_count=20)


def requests() -> list[Request]:
    sampling = SamplingParams(max_tokens=5, eos_token_ids=(EOS,), ignore_eos=True)
    made = [Request(f"r{number}", tuple(range(1, 3 + 5 * number)), sampling, "online") for number in range(1, 6)]
    made[1].cancel_after_ms = 2.0
    return made


def run(rules: tuple[Rule, ...]) -> tuple[SimulatedCluster, dict[str, int]]:
    """The cluster at rest after the run, and how often each type travelled between nodes."""
    cluster = SimulatedCluster(2, requests(), options=OPTIONS, plan=FaultPlan(rules=rules))
    checks = Checks(cluster)
    seen: dict[str, int] = {}

    def on_step(actor: SimulatedActor, envelope: Envelope, effects: list[Effect]) -> None:
        if envelope.sender.partition("/")[0] != actor.node.name:
            name = type(envelope.message).__name__
            seen[name] = seen.get(name, 0) + 1

    cluster.simulation.on_step = on_step
    cluster.begin()
    clients = cluster.clients
    for number, request in enumerate(clients.requests):
        cluster.simulation.call_at(300.0 + number, lambda request=request: clients.submit(request))  # type: ignore[misc]
    cluster.simulation.run(for_ms=90_000, until=lambda: clients.open_count == 0)
    waited_ms = 0
    while why := checks.at_rest():
        cluster.simulation.run(for_ms=500)
        waited_ms += 500
        assert waited_ms < 40_000, f"{rules}: {why}"
    return cluster, seen


@pytest.fixture(scope="module")
def types() -> list[str]:
    _, seen = run(())
    assert {"AddNewRequest", "ChunkArrived", "FirstGeneration", "HandoffComplete", "CancelRequest"} <= set(seen)
    return sorted(seen)


@pytest.mark.parametrize(
    ("fault", "ms", "nth"),
    [
        *(("drop", None, nth) for nth in (1, 3)),
        *(("duplicate", ms, nth) for ms in (0.5, 900.0) for nth in (1, 3)),
        *(("delay", ms, nth) for ms in (3.0, 1500.0) for nth in (1, 3)),
        ("corrupt", None, 2),
    ],
)
def test_one_fault_on_one_message_of_every_type_costs_no_token(
    types: list[str], fault: str, ms: float | None, nth: int
) -> None:
    for name in types:
        rule = Rule(do=fault, match=MessageMatch(type=name, nth=nth, incarnation=1), ms=ms)
        cluster, _ = run((rule,))
        clients = cluster.clients.requests
        states = [request.state for request in clients]
        states[1] = "finished" if states[1] == "cancelled" else states[1]
        assert states == ["finished"] * 5, f"{fault} of {name} {nth}: {states} {[r.error for r in clients]}"
