"""The simulation kernel: order, determinism, timers, jobs, crashes and link faults, shown with a toy machine."""

from __future__ import annotations

import hashlib

import pytest

from actors.runtime.context import Done, Emit
from actors.runtime.machine import Effect, Fail, Job, Run, Send, StartTimer, StopTimer
from actors.runtime.simulated_links import LinkSettings
from actors.runtime.simulated_nodes import SimulatedContext
from actors.runtime.simulation import Simulation, SimulationError
from messages.base import Message
from messages.lifecycle import Drained, PeerLost, Stop
from messages.timers import RequestTimer
from messages.transfer import ClosePush


class Sleep(Job, frozen=True):
    ms: float


class Scripted:
    """Records what it handles; answers with the effects that ``script`` holds for a message type."""

    def __init__(self, script: dict[type[Message], list[Effect]] | None = None, start: list[Effect] | None = None):
        self.script = script or {}
        self.first = start or []
        self.seen: list[tuple[int, str, Message]] = []

    def start(self, now_ns: int) -> list[Effect]:
        return self.first

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        self.seen.append((now_ns, sender, message))
        return self.script.get(type(message), [])

    def status(self, now_ns: int) -> tuple[tuple[()], tuple[()]]:
        return (), ()


class SleepExecutor:
    def __init__(self, context: SimulatedContext) -> None:
        self.context = context

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        assert isinstance(job, Sleep)
        emit("b/x", Drained(node="emitted", actor=""))
        self.context.call_later(job.ms, lambda: done(Drained(node="slept", actor="")))

    def close(self) -> None:
        pass


def timer(purpose: str) -> RequestTimer:
    return RequestTimer(request_id="r", epoch=0, purpose=purpose)


def close(number: int) -> ClosePush:
    return ClosePush(request_id=f"r{number}", epoch=0)


def test_a_link_keeps_the_order_of_its_messages() -> None:
    simulation = Simulation(3)
    receiver = Scripted()
    simulation.add_machine("b/x", receiver)
    for number in range(50):
        simulation.post("a/x", "b/x", close(number))
    simulation.run()
    assert [message for _, _, message in receiver.seen] == [close(number) for number in range(50)]


def test_a_reordered_message_arrives_right_after_the_next_one_of_its_link() -> None:
    simulation = Simulation(3, LinkSettings(reorder=1.0, reorder_ms=7.0))
    receiver = Scripted()
    simulation.add_machine("b/x", receiver)
    simulation.post("a/x", "b/x", close(1))
    simulation.links.change(LinkSettings())
    simulation.post("c/x", "b/x", close(2))
    simulation.run(for_ms=2.0)
    assert [message for _, _, message in receiver.seen] == [close(2)], "another link does not release it"
    simulation.post("a/x", "b/x", close(3))
    simulation.post("a/x", "b/x", close(4))
    simulation.run()
    assert [message for _, _, message in receiver.seen[1:]] == [close(3), close(1), close(4)]


def test_a_reordered_message_that_nothing_follows_arrives_late() -> None:
    simulation = Simulation(3, LinkSettings(reorder=1.0, reorder_ms=7.0))
    receiver = Scripted()
    simulation.add_machine("b/x", receiver)
    simulation.post("a/x", "b/x", close(1))
    began_ns = simulation.now_ns
    simulation.run()
    assert [now_ns - began_ns for now_ns, _, _ in receiver.seen] == [7_000_000]


def test_what_came_of_an_older_epoch_comes_again_when_a_newer_one_is_here() -> None:
    simulation = Simulation(3, LinkSettings(echo=1.0))
    receiver = Scripted()
    simulation.add_machine("b/x", receiver)
    for request, epoch in (("r1", 0), ("r2", 0), ("r1", 0), ("r1", 1)):
        simulation.post("a/x", "b/x", ClosePush(request_id=request, epoch=epoch))
    simulation.run()
    seen = [(message.request_id, message.epoch) for _, _, message in receiver.seen]  # type: ignore[attr-defined]
    assert seen == [("r1", 0), ("r2", 0), ("r1", 0), ("r1", 1), ("r1", 0), ("r1", 0)]


def test_reordering_and_duplication_disturb_the_order_only_when_asked_for() -> None:
    simulation = Simulation(3, LinkSettings(reorder=0.5, duplicate=0.3))
    receiver = Scripted()
    simulation.add_machine("b/x", receiver)
    for number in range(50):
        simulation.post("a/x", "b/x", close(number))
    simulation.run()
    numbers = [message for _, _, message in receiver.seen]
    assert len(numbers) > 50
    assert numbers != sorted(numbers, key=lambda message: int(message.request_id[1:]))  # type: ignore[attr-defined]


def test_dropped_messages_never_arrive() -> None:
    simulation = Simulation(3, LinkSettings(drop=0.5))
    receiver = Scripted()
    simulation.add_machine("b/x", receiver)
    for number in range(100):
        simulation.post("a/x", "b/x", close(number))
    simulation.run()
    assert len(receiver.seen) == 100 - simulation.links.dropped_count
    assert 20 < len(receiver.seen) < 80


def test_a_restarted_timer_fires_once_and_a_stopped_one_never() -> None:
    machine = Scripted(
        start=[
            StartTimer(("a",), 5.0, timer("first")),
            StartTimer(("a",), 9.0, timer("second")),
            StartTimer(("b",), 5.0, timer("stopped")),
            StopTimer(("b",)),
            StopTimer(("unknown",)),
        ]
    )
    simulation = Simulation()
    simulation.add_machine("a/x", machine)
    simulation.run()
    assert [message for _, _, message in machine.seen] == [timer("second")]
    assert machine.seen[0][1] == "a/x"


def test_a_job_takes_virtual_time_and_its_result_comes_from_the_actor_itself() -> None:
    peer = Scripted()
    simulation = Simulation()
    simulation.add_machine("b/x", peer)
    machine = Scripted({ClosePush: [Run(Sleep(ms=1000.0))]})
    node = simulation.add_machine("a/y", Scripted()).node
    assert node.context is not None
    simulation.add_machine("a/x", machine, SleepExecutor(node.context))
    begin_ns = simulation.now_ns
    simulation.post("a/y", "a/x", close(0))
    simulation.run()
    assert machine.seen[-1][1:] == ("a/x", Drained(node="slept", actor=""))
    assert simulation.now_ns - begin_ns >= 1_000_000_000
    assert peer.seen[0][2] == Drained(node="emitted", actor="")


def test_a_crash_ends_timers_and_jobs_and_tells_peers_that_had_sent_there() -> None:
    simulation = Simulation()
    doomed = Scripted(start=[StartTimer(("t",), 10.0, timer("late"))])
    simulation.add_machine("b/x", doomed)
    friend, stranger = Scripted(), Scripted()
    simulation.add_machine("a/friend", friend)
    simulation.add_machine("a/stranger", stranger)
    simulation.post("a/friend", "b/x", close(1))
    simulation.run(for_ms=1)
    simulation.crash("b")
    simulation.run()
    assert [type(message) for _, _, message in doomed.seen] == [ClosePush]
    assert [message for _, _, message in friend.seen] == [PeerLost(node="b", reason="link to b broke")]
    assert stranger.seen == []


def test_messages_of_a_dead_incarnation_are_dropped_after_the_new_one_spoke() -> None:
    simulation = Simulation(0, LinkSettings(delay=1.0, delay_ms=500.0))
    receiver = Scripted()
    simulation.add_machine("a/x", receiver)
    simulation.add_machine("b/x", Scripted())
    for number in range(40):
        simulation.post("b/x", "a/x", close(number))
    simulation.run(for_ms=100)
    simulation.crash("b")
    simulation.links.change(LinkSettings())
    simulation.add_machine("b/x", Scripted(start=[Send("a/x", Stop(reason="new"))]), incarnation=2)
    simulation.run()
    kinds = [type(message) for _, _, message in receiver.seen]
    assert kinds[-1] is Stop
    assert simulation.office.stale_count > 0
    assert len(kinds) - 1 + simulation.office.stale_count == 40


def test_a_partition_holds_or_loses_messages_until_it_heals() -> None:
    for hold, expected in ((True, 1), (False, 0)):
        simulation = Simulation()
        receiver = Scripted()
        simulation.add_machine("b/x", receiver)
        simulation.partition("a", "b", hold=hold)
        simulation.post("a/x", "b/x", close(1))
        simulation.run()
        assert receiver.seen == []
        simulation.heal()
        simulation.run()
        assert len(receiver.seen) == expected


def test_a_stalled_node_handles_what_piled_up_when_it_goes_on() -> None:
    simulation = Simulation()
    receiver = Scripted(start=[StartTimer(("t",), 1.0, timer("due"))])
    simulation.add_machine("b/x", receiver)
    simulation.stall("b")
    simulation.post("a/x", "b/x", close(1))
    simulation.run(for_ms=100)
    assert receiver.seen == []
    simulation.resume("b")
    simulation.run()
    assert len(receiver.seen) == 2


def test_a_failing_machine_takes_its_node_down_and_one_that_raises_stops_the_simulation() -> None:
    simulation = Simulation()
    actor = simulation.add_machine("b/x", Scripted({ClosePush: [Fail("cannot go on")]}))
    simulation.post("a/x", "b/x", close(1))
    simulation.run()
    assert not actor.node.alive

    class Raising(Scripted):
        def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
            raise KeyError("bug")

    simulation = Simulation(9)
    simulation.add_machine("b/x", Raising())
    simulation.post("a/x", "b/x", close(1))
    with pytest.raises(SimulationError, match=r"seed 9.*b/x raised KeyError"):
        simulation.run()


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    def digest(seed: int) -> str:
        log = hashlib.sha256()
        faults = LinkSettings(drop=0.1, duplicate=0.1, reorder=0.1, delay=0.1)
        simulation = Simulation(
            seed, faults, on_step=lambda actor, envelope, effects: log.update(repr(envelope).encode())
        )
        simulation.add_machine(
            "a/x", Scripted({ClosePush: [Send("b/x", Stop(reason="1")), Send("b/y", Stop(reason="2"))]})
        )
        simulation.add_machine("b/x", Scripted({Stop: [Send("b/y", Stop(reason="local"))]}))
        simulation.add_machine("b/y", Scripted({Stop: [StartTimer(("t",), 3.0, timer("x"))]}))
        for number in range(100):
            simulation.post("c/x", "a/x", close(number))
        simulation.run()
        return log.hexdigest()

    assert digest(7) == digest(7)
    assert digest(7) != digest(8)
