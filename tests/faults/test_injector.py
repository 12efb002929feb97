"""What an injector does with envelopes, points and writes; and that a simulated cluster follows the same plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.runtime.config import ConfigError, NodeConfig, Options
from actors.runtime.fault_plan import FaultPlan, parse_line
from actors.runtime.faults import NodeInjector, TornWrite, make_injector
from actors.runtime.hooks import NoInjector
from actors.runtime.machine import Effect
from actors.runtime.simulated_faults import ClusterInjector
from actors.runtime.simulation import Simulation
from messages.base import Message
from messages.envelope import Envelope
from messages.transfer import ClosePush, FreeLease, GrantLease, LeaseRefused
from transport.dataplane import DataPlaneError


class FakeActions:
    def __init__(self) -> None:
        self.done: list[tuple[str, float]] = []
        self.functions: list[Callable[[], None]] = []

    def kill(self) -> None:
        self.done.append(("kill", 0))

    def hang(self, for_ms: float) -> None:
        self.done.append(("hang", for_ms))

    def pause(self, ms: float) -> None:
        self.done.append(("pause", ms))

    def later(self, delay_ms: float, function: Callable[[], None]) -> None:
        self.done.append(("later", delay_ms))
        self.functions.append(function)


class Keeper:
    """Remembers what it handled."""

    def __init__(self) -> None:
        self.seen: list[Message] = []

    def start(self, now_ns: int) -> list[Effect]:
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        self.seen.append(message)
        return []

    def status(self, now_ns: int) -> tuple[tuple[()], tuple[()]]:
        return (), ()


def injector(text: str, node: str = "p0.r0", incarnation: int = 1) -> tuple[NodeInjector, FakeActions]:
    actions = FakeActions()
    return NodeInjector(parse_line(text), node, incarnation, actions), actions


def envelope(request: str = "r1", to: str = "d0.r0/transfer", message: Message | None = None) -> Envelope:
    message = message or ClosePush(request_id=request, epoch=0)
    return Envelope(message_id="m", sender="p0.r0/transfer", to=to, sent_ns=1, message=message, trace_id=request)


def test_only_the_nth_matching_message_is_dropped() -> None:
    rules, _ = injector("drop type=ClosePush request=r1 nth=2")
    assert len(rules.on_send(0, envelope("r2"))) == 1
    assert len(rules.on_send(0, envelope())) == 1
    assert rules.on_send(0, envelope()) == ()
    assert len(rules.on_send(0, envelope())) == 1


def test_times_from_nth_and_probability_limit_a_rule() -> None:
    rules, _ = injector("drop type=ClosePush from_nth=3 times=2")
    assert [len(rules.on_send(0, envelope())) for _ in range(6)] == [1, 1, 0, 0, 1, 1]
    rules, _ = injector("seed=3; drop type=ClosePush probability=0.5")
    first = [len(rules.on_send(0, envelope())) for _ in range(50)]
    rules, _ = injector("seed=3; drop type=ClosePush probability=0.5")
    assert first == [len(rules.on_send(0, envelope())) for _ in range(50)]
    assert 10 < sum(first) < 40


def test_delay_duplicate_reorder_and_corrupt_say_what_is_delivered() -> None:
    def deliveries(text: str) -> list[tuple[float, bool, bool]]:
        return [(one.delay_ms, one.corrupt, one.swap) for one in injector(text)[0].on_send(0, envelope())]

    assert deliveries("delay ms=7") == [(7.0, False, False)]
    assert deliveries("duplicate ms=9") == [(0.0, False, False), (9.0, False, False)]
    assert deliveries("corrupt") == [(0.0, True, False)]
    assert deliveries("reorder ms=4") == [(4.0, False, True)]
    assert deliveries("reorder") == [(20.0, False, True)]


def swapped_by(seed: int) -> list[int]:
    """The order in which a simulated receiver sees 0, 1, 2, … when a plan reorders three in ten."""
    simulation = Simulation(1)
    plan = ClusterInjector(parse_line(f"seed={seed}; reorder type=ClosePush probability=0.3 ms=9"))
    plan.attach(simulation)
    receiver = Keeper()
    simulation.add_machine("d0.r0/transfer", receiver)
    for number in range(40):
        simulation.post("p0.r0/transfer", "d0.r0/transfer", ClosePush(request_id="r", epoch=number))
    simulation.run()
    return [message.epoch for message in receiver.seen]  # type: ignore[attr-defined]


def test_reordering_swaps_neighbours_and_the_seed_says_which() -> None:
    order = swapped_by(seed=5)
    assert sorted(order) == list(range(40))
    moved = [(place, number) for place, number in enumerate(order) if place != number]
    assert 6 <= len(moved) <= 30
    assert {abs(place - number) for place, number in moved} == {1}, "each changed places with its neighbour only"
    assert order == swapped_by(seed=5)
    assert order != swapped_by(seed=6)


def test_inside_a_node_nothing_is_lost_but_room_can_be_refused() -> None:
    rules, _ = injector("refuse type=GrantLease; drop type=*", node="d0.r0")
    local = envelope(to="p0.r0/worker")
    rules_of_sender, _ = injector("drop type=*")
    assert len(rules_of_sender.on_send(0, local)) == 1
    grant = GrantLease(
        request_id="r1",
        epoch=3,
        source_instance="p0",
        source_incarnation=1,
        source_ranks=(0,),
        window_bytes=1,
        window_count=2,
    )
    asked = Envelope(message_id="m", sender="d0.r0/transfer", to="d0.r0/staging", sent_ns=1, message=grant)
    (delivery,) = rules.on_send(0, asked)
    assert isinstance(delivery.envelope.message, LeaseRefused)
    assert (delivery.envelope.sender, delivery.envelope.to) == ("d0.r0/staging", "d0.r0/transfer")
    assert delivery.envelope.message.epoch == 3


def test_a_point_kills_hangs_or_slows_the_node_where_it_is_reached() -> None:
    rules, actions = injector("kill handled=ClosePush node=d0.* nth=2", node="d0.r0")
    rules.on_handled(0, envelope())
    assert actions.done == []
    rules.on_handled(0, envelope())
    assert actions.done == [("kill", 0)]
    rules, actions = injector("hang sent=ClosePush for_ms=30")
    rules.on_send(0, envelope())
    assert actions.done == [("hang", 30.0)]
    rules, actions = injector("slow handled=ClosePush ms=3", node="d0.r0")
    for _ in range(2):
        rules.on_handled(0, envelope())
    assert actions.done == [("pause", 3.0), ("pause", 3.0)]


def test_another_node_or_a_later_life_is_not_struck() -> None:
    for node, incarnation in (("d1.r0", 1), ("d0.r0", 2)):
        rules, actions = injector("kill handled=ClosePush node=d0.*", node, incarnation)
        rules.on_handled(0, envelope())
        assert actions.done == []


def test_a_partition_cuts_both_ways_or_one_and_ends() -> None:
    for ways, answered in (("both", 0), ("forward", 1)):
        text = f"partition after_ms=5 between=p0.*,d0.* ways={ways} for_ms=50"
        sender, actions = injector(text, "p0.r0")
        receiver, receiver_actions = injector(text, "d0.r0")
        actions.functions[0]()
        receiver_actions.functions[0]()
        assert sender.on_send(0, envelope()) == ()
        assert len(sender.on_send(0, envelope(to="front/gateway"))) == 1
        assert len(receiver.on_send(0, envelope(to="p0.r0/transfer"))) == answered
        actions.functions[1]()
        assert len(sender.on_send(0, envelope())) == 1


def test_writes_fail_tear_or_take_longer() -> None:
    rules, actions = injector("fail write region=d0.* nth=2; slow write operation=read ms=8")
    rules.on_write("write", "d0.r0.1.caches", 10)
    with pytest.raises(DataPlaneError, match="injected"):
        rules.on_write("write", "d0.r0.1.caches", 10)
    rules.on_write("read", "p0.r0.1.caches", 10)
    assert actions.done == [("pause", 8.0)]
    with pytest.raises(TornWrite):
        injector("tear operation=write")[0].on_write("write", "x", 10)


def test_every_fault_is_recorded_with_the_envelope_it_struck() -> None:
    seen: list[tuple[int, str, str]] = []
    rules = NodeInjector(
        parse_line("drop type=ClosePush"),
        "p0.r0",
        1,
        FakeActions(),
        lambda now, struck, text: seen.append((now, struck.message_id if struck else "", text)),
    )
    rules.on_send(77, envelope())
    assert seen == [(77, "m", "rule 1: drop")]


def test_a_bad_plan_is_a_refused_configuration() -> None:
    def config(faults: str) -> NodeConfig:
        return NodeConfig(node="n", incarnation=1, run_id="x", run_dir="", options=Options(faults=faults), factories=())

    assert isinstance(make_injector(config("")), NoInjector)
    assert isinstance(make_injector(config("drop type=Stop")), NodeInjector)
    with pytest.raises(ConfigError, match="--faults"):
        make_injector(config("drop type=Stopp"))


def cluster(plan: FaultPlan) -> tuple[Simulation, Keeper, ClusterInjector]:
    simulation = Simulation(1)
    faults = ClusterInjector(plan)
    faults.attach(simulation)
    keeper = Keeper()
    simulation.add_machine("d0.r0/transfer", keeper)
    faults.begin("d0.r0")
    return simulation, keeper, faults


def test_a_simulated_cluster_follows_the_plan() -> None:
    simulation, keeper, _ = cluster(parse_line("drop type=ClosePush nth=1; duplicate type=FreeLease"))
    close, free = ClosePush(request_id="r", epoch=0), FreeLease(request_id="r", epoch=0, generation=1)
    for message in (close, free, close):
        simulation.post("p0.r0/transfer", "d0.r0/transfer", message)
    simulation.run()
    assert sorted(type(message).__name__ for message in keeper.seen) == ["ClosePush", "FreeLease", "FreeLease"]


def test_a_simulated_node_is_killed_at_its_point_and_pauses_in_virtual_time() -> None:
    simulation, keeper, _ = cluster(parse_line("kill handled=ClosePush nth=2 node=d0.r0"))
    for _ in range(3):
        simulation.post("p0.r0/transfer", "d0.r0/transfer", ClosePush(request_id="r", epoch=0))
    simulation.run()
    assert len(keeper.seen) == 1
    assert not simulation.nodes["d0.r0"].alive
    simulation, keeper, _ = cluster(parse_line("slow handled=ClosePush node=d0.r0 ms=5"))
    begin_ns = simulation.now_ns
    for _ in range(3):
        simulation.post("p0.r0/transfer", "d0.r0/transfer", ClosePush(request_id="r", epoch=0))
    simulation.run()
    assert len(keeper.seen) == 3
    assert simulation.now_ns - begin_ns > 15_000_000
    simulation, keeper, faults = cluster(parse_line("hang after_ms=1 node=d0.r0 for_ms=100; slow write ms=6"))
    simulation.run(for_ms=2)
    simulation.post("p0.r0/transfer", "d0.r0/transfer", ClosePush(request_id="r", epoch=0))
    simulation.run(for_ms=50)
    assert keeper.seen == []
    simulation.run()
    assert len(keeper.seen) == 1
    assert faults.write_delay_ms("d0.r0", "write", "x", 1) == 6.0
