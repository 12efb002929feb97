"""Machines find a message's handler by its type: every type of message has somebody who takes it."""

from __future__ import annotations

from actors.runtime.machine import Handlers
from messages.base import Message
from messages.envelope import MESSAGE_TYPES
from messages.lifecycle import ProcessSignalled, StatusRequest, TreeEnded, TreeReady
from messages.transfer import PeerUnmapped
from scripts.simulated_cluster import SimulatedCluster, with_options

NOT_OF_MACHINES = {
    StatusRequest: "answered by the shell",
    TreeReady: "for the console",
    TreeEnded: "for the console",
    PeerUnmapped: "the result of a job for which nobody waits",
    ProcessSignalled: "the result of a job for which nobody waits",
}


def handled_types(topology: str) -> set[type[Message]]:
    """What the machines of a cluster that is up understand."""
    cluster = SimulatedCluster(1, [], options=with_options(topology=topology))
    cluster.begin()
    cluster.simulation.run(for_ms=2_000)
    tables = [
        value
        for node in cluster.simulation.nodes.values()
        for actor in node.actors.values()
        for value in vars(actor.machine).values()
        if isinstance(value, Handlers)
    ]
    return set().union(*tables)


def test_every_type_of_message_is_handled_by_some_machine_or_it_is_known_who_else_takes_it() -> None:
    handled = handled_types("P2/D1") | handled_types("TP1")
    assert {kind.__name__ for kind in MESSAGE_TYPES} - {kind.__name__ for kind in handled} == {
        kind.__name__ for kind in NOT_OF_MACHINES
    }
