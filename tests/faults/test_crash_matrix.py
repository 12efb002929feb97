"""Every kind of node killed at every step of the protocol, in the simulated cluster: streams are complete and right.

The simulation checks I1 to I6 after every step and that everything is free at the end; here it is made to happen at
each step of ``docs/protocol.md``, for push and pull, equal and unequal TP, with and without speculation.
"""

from __future__ import annotations

import pytest

from actors.runtime.machine import Effect
from actors.runtime.simulated_nodes import SimulatedActor
from messages.batch import ExecuteBatch
from messages.envelope import Envelope
from messages.handoff import HandoffComplete
from messages.requests import SamplingParams
from scripts.simulated_checks import Checks
from scripts.simulated_client import Request
from scripts.simulated_cluster import SimulatedCluster, with_options
from scripts.simulated_model import EOS

STEPS = {
    "1 SubmitRequest": ("SubmitRequest", "scheduler"),
    "2 AddNewRequest": ("AddNewRequest", "scheduler"),
    "2 OpenReceive": ("OpenReceive", "transfer"),
    "3 RequestAccepted": ("RequestAccepted", "scheduler"),
    "4 ExecuteBatch": ("ExecuteBatch", "worker"),
    "4 LayerReady": ("LayerReady", "transfer"),
    "4 BatchResult": ("BatchResult", "scheduler"),
    "5 ChunkArrived": ("ChunkArrived", "transfer"),
    "6 FirstGeneration": ("FirstGeneration", "scheduler"),
    "7 PullKVCache": ("PullKVCache", "transfer"),
    "7 PullDone": ("PullDone", "transfer"),
    "8 Restore": ("Restore", "staging"),
    "8 Merged": ("Merged", "transfer"),
    "8 Restored": ("Restored", "engine"),
    "9 HandoffComplete": ("HandoffComplete", "scheduler"),
    "10 Generation": ("Generation", "gateway"),
    "11 Finished": ("Finished", "gateway"),
}
VICTIMS = ("p0.r1", "p0.ctl", "d0.r0", "d0.ctl", "front")


class Killer:
    """Kills a node right after a step of the protocol was taken for the second time; counts who prefilled what."""

    def __init__(self, cluster: SimulatedCluster, step: tuple[str, str], victim: str) -> None:
        self.cluster = cluster
        self.checks = Checks(cluster)
        self.step = step
        self.victim = victim
        self.seen = 0
        self.killed = False
        self.completed: set[str] = set()
        self.prefilled: set[str] = set()
        self.again: list[str] = []  # prefilled twice although no decode instance had taken them over in between
        cluster.simulation.on_step = self.on_step

    def on_step(self, actor: SimulatedActor, envelope: Envelope, effects: list[Effect]) -> None:
        message = envelope.message
        if isinstance(message, ExecuteBatch) and actor.name == "engine" and actor.node.config.instance == "p0":
            self.count_prefills(message)
        if isinstance(message, HandoffComplete):
            self.completed.add(message.request_id)
        if (type(message).__name__, actor.name) == self.step:
            self.seen += 1
            if self.seen == 2:
                self.killed = True
                self.cluster.simulation.crash(self.victim)

    def count_prefills(self, batch: ExecuteBatch) -> None:
        for row in batch.rows:
            if row.is_prefill and row.samples:
                if row.request_id in self.prefilled and row.request_id not in self.completed:
                    self.again.append(row.request_id)
                self.prefilled.add(row.request_id)
                self.completed.discard(row.request_id)


def requests() -> list[Request]:
    sampling = SamplingParams(max_tokens=6, eos_token_ids=(EOS,), ignore_eos=True)
    return [Request(f"r{number}", tuple(range(1, 2 + 4 * number)), sampling, "online") for number in range(1, 6)]


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("step", STEPS, ids=[name.replace(" ", "-") for name in STEPS])
def test_a_node_killed_at_a_step_costs_no_token(step: str, victim: str) -> None:
    happened = False
    for topology in ("P2/D1", "P2/D2"):
        for mode in ("PUSH", "PULL"):
            for speculative in (0, 2):
                options = with_options(
                    topology=topology, kv_cache_transfer_mode=mode, num_speculative_tokens=speculative
                )
                happened |= _run(SimulatedCluster(3, requests(), options=options), step, victim)
    assert happened


def _run(cluster: SimulatedCluster, step: str, victim: str) -> bool:
    """Whether the step was reached (there is no push in PULL mode, no merge between equal TP sizes)."""
    killer = Killer(cluster, STEPS[step], victim)
    cluster.begin()
    clients = cluster.clients
    for number, request in enumerate(clients.requests):
        cluster.simulation.call_at(300.0 + number, lambda request=request: clients.submit(request))  # type: ignore[misc]
    cluster.simulation.run(for_ms=60_000, until=lambda: clients.open_count == 0)
    states = {request.name: request.state for request in clients.requests}
    lost_with_front = {"lost"} if victim == "front" else set()
    assert set(states.values()) <= {"finished"} | lost_with_front, [r.error for r in clients.requests]
    if victim.startswith("d0"):
        assert not killer.again, f"{killer.again} were prefilled again although only their decode instance died"
    waited_ms = 0
    while cluster.checks is not None and (why := cluster.checks.at_rest()):
        cluster.simulation.run(for_ms=500)
        waited_ms += 500
        assert waited_ms < 30_000, why
    return killer.killed
