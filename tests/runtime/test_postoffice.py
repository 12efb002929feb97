"""Post offices of several in-process nodes: links, death of peers, injected faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.runtime.context import ActorSpec
from actors.runtime.hooks import Delivery
from actors.runtime.machine import Effect, Send
from actors.runtime.node import Node
from messages.base import Message
from messages.cluster import ClusterView, InstanceInfo, InstanceLost, LinkPeer, UnlinkPeer
from messages.envelope import Envelope
from messages.lifecycle import NotSent, PeerLost
from messages.requests import CancelRequest, Failed
from tests.runtime.dummies import Scripted, node_config, start_node, text

Make = Callable[..., tuple[Node, Scripted]]


@pytest.fixture
def make(run_dir: Path) -> Iterator[Make]:
    """``make(node, incarnation)``: a node with one actor, ``main``."""
    started: list[Node] = []

    def start(name: str, incarnation: int = 1, machine: Scripted | None = None) -> tuple[Node, Scripted]:
        machine = machine or Scripted()
        started.append(start_node(run_dir, name, ActorSpec("main", machine), incarnation=incarnation))
        return started[-1], machine

    yield start
    for node in started:
        node.close()


def lost(instance: str, incarnation: int) -> InstanceLost:
    return InstanceLost(instance=instance, incarnation=incarnation, reason="killed")


def info(instance: str, incarnation: int) -> InstanceInfo:
    return InstanceInfo(
        instance=instance,
        incarnation=incarnation,
        role="DECODE",
        tp_size=1,
        max_model_len=1,
        block_count=1,
        slot_count=1,
    )


def test_envelopes_cross_nodes_with_their_sender_and_life(make: Make) -> None:
    one, _ = make("p0.ctl", 3)
    _, other = make("d0.ctl")
    one.post("main", "d0.ctl/main", text("x"))
    assert other.wait_for(1) == [("p0.ctl/main", text("x"))]


def test_what_comes_before_the_actors_are_built_is_held(run_dir: Path, make: Make) -> None:
    early, _ = make("early")
    machine = Scripted()

    def build(context: object) -> tuple[ActorSpec, ...]:
        early.post("main", "late/main", text("x"))
        early.post("main", "late/node", text("unheard"))  # not read as Stop before the node is there
        return (ActorSpec("main", machine),)

    late = Node(node_config(run_dir, "late"), (build,))
    late.start()
    try:
        assert machine.wait_for(1) == [("early/main", text("x"))]
    finally:
        late.close()


def test_actors_that_sent_to_a_lost_node_are_told_and_others_are_not(make: Make) -> None:
    one, machine = make("one")
    node, other = make("other")
    third_node, third = make("third")
    one.post("main", "other/main", text("x"))
    third_node.post("main", "one/main", text("y"))
    other.wait_for(1)
    machine.wait_for(1)
    node.close()
    seen = machine.wait_for(2)[1]
    assert seen == ("one/post", PeerLost(node="other", reason="the link broke"))
    assert third.seen == []


def test_nothing_of_a_dead_incarnation_is_delivered(make: Make) -> None:
    front, machine = make("front")
    dead, _ = make("d0.ctl", 1)
    dead.post("main", "front/main", text("alive"))
    machine.wait_for(1)
    front.post("main", "front/main", lost("d0", 1))
    machine.wait_for(2)
    dead.post("main", "front/main", text("from the dead"))
    living, _ = make("d1.ctl", 1)
    living.post("main", "front/main", text("living"))
    assert [message for _, message in machine.wait_for(3)] == [text("alive"), lost("d0", 1), text("living")]


def test_a_dead_life_in_a_frame_with_living_ones_is_left_out(make: Make) -> None:
    """What a link brought before the news is judged when it is delivered."""
    node, machine = make("front")
    envelopes = [
        node.office.stamp(f"{sender}.ctl/main", "front/main", message, None)
        for sender, message in [
            ("d1", text("a")),
            ("d0", text("before the news")),
            ("d1", lost("d0", 1)),
            ("d0", text("after the news")),
            ("d1", text("b")),
            ("d1", text("c")),
        ]
    ]
    node.office.on_envelopes(0, "d1.ctl", envelopes)
    assert [message for _, message in machine.wait_for(5)] == [
        text("a"),
        text("before the news"),
        lost("d0", 1),
        text("b"),
        text("c"),
    ]
    assert node.office.dropped_dead == 1


@pytest.mark.parametrize(
    "news",
    [
        lost("d0", 1),
        UnlinkPeer(instance="d0", incarnation=1),
        ClusterView(version=2, registry_incarnation=1, instances=(info("d0", 2),)),
        LinkPeer(peer=info("d0", 2)),
    ],
)
def test_news_of_a_death_frees_the_way_to_the_next_life(make: Make, news: Message) -> None:
    """What waited for the dead is dropped, what is sent after the news arrives, and nobody is told of a lost peer."""
    one, machine = make("p0.ctl")
    one.post("main", "d0.ctl/main", text("for the dead"))
    one.post("main", "p0.ctl/main", news)
    machine.wait_for(1)
    one.post("main", "d0.ctl/main", text("for the living"))
    _, new = make("d0.ctl", 2)
    assert [message for _, message in new.wait_for(1)] == [text("for the living")]
    assert len(machine.seen) == 1


def test_a_node_does_not_bury_itself(make: Make) -> None:
    one, machine = make("d0.ctl", 1)
    one.post("main", "d0.ctl/main", lost("d0", 1))
    one.post("main", "d0.ctl/main", text("still here"))
    assert len(machine.wait_for(2)) == 2


class Plan:
    """An injector that does to messages what their words say."""

    def on_send(self, now_ns: int, envelope: Envelope) -> tuple[Delivery, ...]:
        match getattr(envelope.message, "reason", ""):
            case "drop":
                return ()
            case "delay":
                return (Delivery(30.0, envelope),)
            case "twice":
                return (Delivery(0.0, envelope), Delivery(0.0, envelope))
            case "corrupt":
                return (Delivery(0.0, envelope, corrupt=True),)
            case "behind":
                return (Delivery(60_000.0, envelope, swap=True),)
            case "behind or soon":
                return (Delivery(20.0, envelope, swap=True),)
        return (Delivery(0.0, envelope),)

    def on_handled(self, now_ns: int, envelope: Envelope) -> None:
        pass

    def on_write(self, operation: str, region_id: str, size_bytes: int) -> None:
        pass


@pytest.mark.parametrize("to", ["one/main", "other/main"])
def test_injected_faults_strike_on_the_way(make: Make, to: str) -> None:
    one, local = make("one")
    _, remote = make("other")
    machine = local if to == "one/main" else remote
    one.office._injector = Plan()
    for words in ("drop", "delay", "corrupt", "twice", "plain"):
        one.post("main", to, text(words))
    assert [message for _, message in machine.wait_for(4)] == [
        text("twice"),
        text("twice"),
        text("plain"),
        text("delay"),
    ]


def test_a_reordered_message_goes_right_behind_the_next_one_of_its_link(make: Make) -> None:
    """Another link does not release it, nor does a message that is lost; its neighbours keep their order."""
    one, _ = make("one")
    _, remote = make("other")
    _, third = make("third")
    one.office._injector = Plan()
    for words in ("before", "behind", "drop"):
        one.post("main", "other/main", text(words))
    one.post("main", "third/main", text("elsewhere"))
    third.wait_for(1)
    one.post("main", "other/main", text("next"))
    one.post("main", "other/main", text("after"))
    seen = [message for _, message in remote.wait_for(4)]
    assert seen == [text("before"), text("next"), text("behind"), text("after")]


def test_messages_that_are_all_reordered_swap_in_pairs(make: Make) -> None:
    one, _ = make("one")
    _, remote = make("other")
    one.office._injector = Plan()
    one.office._injector.on_send = lambda now_ns, envelope: (Delivery(60_000.0, envelope, swap=True),)
    for number in range(6):
        one.post("main", "other/main", text(str(number)))
    assert [message.reason for _, message in remote.wait_for(6)] == list("103254")  # type: ignore[attr-defined]


def test_a_reordered_message_that_nothing_follows_goes_when_its_time_is_up(make: Make) -> None:
    one, _ = make("one")
    _, remote = make("other")
    one.office._injector = Plan()
    sent_ns = time.monotonic_ns()
    one.post("main", "other/main", text("behind or soon"))
    assert [message for _, message in remote.wait_for(1)] == [text("behind or soon")]
    assert remote.times_ns[0] - sent_ns >= 20_000_000
    one.post("main", "other/main", text("plain"))
    one.post("main", "other/main", text("plain"))
    assert [message for _, message in remote.wait_for(3)][1:] == [text("plain")] * 2, "it does not come twice"


def test_a_message_that_cannot_be_encoded_is_told_to_its_sender_and_nothing_else_is_lost(make: Make) -> None:
    bad = Failed(request_id="r1", epoch=3, code=500, message="half a pair: \ud800")

    def react(sender: str, message: Message) -> list[Effect]:
        if message != text("go"):
            return []
        return [
            Send("other/main", text("before")),
            Send("other/main", bad),
            Send("other/main", CancelRequest(request_id="r1", epoch=1 << 70)),
            Send("other/main", text("after")),
        ]

    one, machine = make("one", machine=Scripted(react))
    _, remote = make("other")
    one.post("main", "one/main", text("go"))
    told = [message for _, message in machine.wait_for(3)][1:]
    assert [(type(m), m.what, m.to, m.epoch) for m in told if isinstance(m, NotSent)] == [
        (NotSent, "Failed", "other/main", 3),
        (NotSent, "CancelRequest", "other/main", 1 << 70),
    ]
    assert machine.seen[1][0] == "one/post"
    assert [message for _, message in remote.wait_for(2)] == [text("before"), text("after")]
    assert one.exit_code == 0


def test_an_actor_whose_message_about_no_request_cannot_be_encoded_fails_with_the_reason(make: Make) -> None:
    one, _ = make("one", machine=Scripted(lambda sender, message: [Send("other/main", text("\ud800"))]))
    make("other")
    one.post("main", "one/main", text("go"))
    assert one.wait() == "main failed"
    assert one.exit_code != 0
