"""One conformance suite over every kind of links."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from messages.base import PROTOCOL_VERSION
from tests.transport.fabric import KINDS, Fabric, TestNode, parcel
from transport.links import Alone


@pytest.fixture(params=KINDS)
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    made = Fabric(request.param)
    yield made
    made.close()


def pair(fabric: Fabric, **settings: int) -> tuple[TestNode, TestNode]:
    return fabric.node("one", **settings), fabric.node("other", **settings)


def test_envelopes_arrive_once_each_in_order(fabric: Fabric) -> None:
    one, other = pair(fabric)
    texts = [str(index) for index in range(5000)]
    for start in range(0, 5000, 50):
        one.say("other", *texts[start : start + 50])
    other.hears(*texts)
    assert one.links.counters()["frames_sent"] < 5000  # several per frame


def test_both_directions_work_at_once(fabric: Fabric) -> None:
    one, other = pair(fabric)
    texts = [str(index) for index in range(300)]
    for text in texts:
        one.say("other", text)
        other.say("one", text)
    one.hears(*texts)
    other.hears(*texts)


def test_a_peer_that_starts_later_gets_what_was_queued(fabric: Fabric) -> None:
    one = fabric.node("one")
    one.say("other", "early")
    fabric.node("other").hears("early")
    assert one.lost == []


def test_each_side_learns_the_others_incarnation(fabric: Fabric) -> None:
    one, other = fabric.node("one", 3), fabric.node("other", 5)
    one.say("other", "x")
    other.hears("x")
    one.wait(lambda: one.known == {"other": 5}, "knew the other")
    assert other.known == {"one": 3}


def test_a_large_envelope_arrives_whole(fabric: Fabric) -> None:
    one, other = pair(fabric)
    large = "x" * (5 << 20)
    one.say("other", "before", large, "after")
    other.hears("before", large, "after")


def test_an_envelope_over_the_limit_is_reported_with_the_limit(fabric: Fabric) -> None:
    one, other = pair(fabric, frame_bytes_max=1000)
    one.say("other", "x" * 2000)
    one.loses("other", "at most 1000 are allowed")
    one.say("other", "small")
    other.hears("small")


def test_send_after_close_is_counted_and_does_nothing(fabric: Fabric) -> None:
    one, other = pair(fabric)
    one.say("other", "before")
    other.hears("before")
    one.links.close()
    one.links.close()
    one.say("other", "after", "after")
    assert one.links.counters()["dropped_closed"] == 2
    assert other.texts == ["before"]


def test_what_was_sent_before_close_still_arrives(fabric: Fabric) -> None:
    one, other = pair(fabric)
    texts = [str(index) for index in range(1000)]
    one.say("other", *texts)
    one.links.close()
    other.hears(*texts)


def test_a_receiver_that_consumes_nothing_gets_one_window_and_then_the_rest_in_order(fabric: Fabric) -> None:
    one = fabric.node("one", window_envelopes=64)
    slow = fabric.node("slow", consume=False, window_envelopes=64)
    other = fabric.node("other")
    texts = [str(index) for index in range(500)]
    one.say("slow", *texts)
    slow.wait(lambda: len(slow.texts) >= 64, "got its window")
    one.say("other", "meanwhile")
    other.hears("meanwhile")  # a slow peer delays nobody else
    assert slow.texts == texts[:64]
    slow.release()
    slow.hears(*texts)
    assert one.lost == []


def test_a_full_outbox_is_reported_and_later_envelopes_pass(fabric: Fabric) -> None:
    one = fabric.node("one", window_envelopes=16, outbox_envelopes_max=100)
    slow = fabric.node("slow", consume=False, window_envelopes=16)
    one.say("slow", *["first"] * 16)
    slow.wait(lambda: len(slow.texts) == 16, "got its window")
    for _ in range(101):
        one.say("slow", "lost")
    one.loses("slow", "at most 100")
    slow.release()
    one.say("slow", "later")
    slow.wait(lambda: slow.texts[-1] == "later", "heard what was sent later")


def test_a_peer_that_is_not_there_is_a_bounded_wait_and_delays_nobody(fabric: Fabric) -> None:
    one, other = pair(fabric, handshake_timeout_ms=300)
    one.say("nobody", "x")
    one.say("other", "y")
    other.hears("y")
    one.loses("nobody", "no answer to the greeting within 300 ms")
    one.say("nobody", "again")
    one.wait(lambda: len(one.lost) == 2, "was told again")
    assert {node for node, _ in one.lost} == {"nobody"}


def test_a_restarted_peer_works_at_once_and_gets_nothing_meant_for_its_old_life(fabric: Fabric) -> None:
    one = fabric.node("one", window_envelopes=8)
    old = fabric.node("other", 1, consume=False, window_envelopes=8)
    one.say("other", *[f"old {index}" for index in range(100)])
    old.wait(lambda: len(old.texts) == 8, "got its window")
    old.links.close()
    one.loses("other", "link broke")
    new = fabric.node("other", 2)
    one.say("other", "new")
    new.hears("new")


def test_what_was_queued_for_a_known_life_is_not_given_to_the_next(fabric: Fabric) -> None:
    one = fabric.node("one", incarnations=[("other", 1)])
    one.say("other", "for life 1")
    new = fabric.node("other", 2)
    one.loses("other", "restarted as incarnation 2")
    one.say("other", "for life 2")
    new.hears("for life 2")


def test_a_peer_that_greets_from_its_new_life_ends_the_link_to_its_old_one(fabric: Fabric) -> None:
    one = fabric.node("one")
    old = fabric.node("other", 1)
    one.say("other", "old")
    old.hears("old")
    old.links.close()
    new = fabric.node("other", 2)
    new.say("one", "hello")
    one.hears("hello")
    one.wait(lambda: one.known["other"] == 2, "learned of the new life")
    one.say("other", "new")
    new.hears("new")


def test_a_dead_incarnation_is_neither_heard_nor_spoken_to(fabric: Fabric) -> None:
    one = fabric.node("one", handshake_timeout_ms=300)
    dead = fabric.node("d0.r0", 1)
    one.links.require("d0", 2)
    dead.say("one", "from the dead")
    dead.loses("one", "is dead; 2 is expected")
    one.say("d0.r0", "to the dead")
    one.loses("d0.r0", "no answer")
    assert one.texts == dead.texts == []


def test_requiring_a_new_incarnation_ends_a_session_that_was_open(fabric: Fabric) -> None:
    one = fabric.node("one")
    dead = fabric.node("d0.r0", 1)
    dead.say("one", "alive")
    one.hears("alive")
    one.links.require("d0", 2)
    one.say("one", "in order")  # to itself: the requirement has been carried out when this is heard
    one.hears("alive", "in order")
    dead.say("one", "from the dead")
    dead.loses("one", "the peer knows nothing of this link")
    assert one.texts == ["alive", "in order"]


def test_require_drops_what_is_queued_and_not_what_comes_after(fabric: Fabric) -> None:
    one = fabric.node("one")
    one.say("d0.r0", "for the dead")
    one.links.require("d0", 2)
    one.say("d0.r0", "for the living")
    fabric.node("d0.r0", 2).hears("for the living")
    assert one.lost == []


@pytest.mark.parametrize("before", [(), ("for the dead",)], ids=["first of all", "after words for the dead"])
def test_what_is_sent_after_require_reaches_the_new_life_of_a_peer_that_never_answered(
    fabric: Fabric, before: tuple[str, ...]
) -> None:
    one = fabric.node("one", incarnations=[("d0.r0", 1)])
    if before:
        one.say("d0.r0", *before)
    one.links.require("d0", 2)
    one.links.call(lambda: one.say("other", "required"))
    fabric.node("other").hears("required")
    one.say("d0.r0", "for the living")
    fabric.node("d0.r0", 2).hears("for the living")
    assert one.lost == []


@pytest.mark.parametrize("in_a_call", [False, True])
def test_what_is_sent_after_require_is_for_the_new_life_though_the_old_one_still_listens(
    fabric: Fabric, in_a_call: bool
) -> None:
    one, old = fabric.node("one"), fabric.node("d0.r0", 1)
    one.say("d0.r0", "for the old")
    old.hears("for the old")

    def turn() -> None:
        one.links.require("d0", 2)
        one.say("d0.r0", "for the new")

    if in_a_call:
        one.links.call(turn)
    else:
        turn()
    one.links.call(lambda: one.say("other", "turn is over"))
    fabric.node("other").hears("turn is over")
    old.links.close()
    fabric.node("d0.r0", 2).hears("for the new")
    old.hears("for the old")
    assert one.lost == []


def test_another_protocol_version_is_refused_with_both_numbers(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair(fabric)
    monkeypatch.setattr("transport.inbox.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    one.say("other", "x")
    one.loses("other", f"speaks protocol version {PROTOCOL_VERSION}, other speaks {PROTOCOL_VERSION + 1}")
    assert other.texts == []
    assert other.links.counters()["refused"] == 1
    assert [event for event, _ in other.notes] == ["greeting_refused"]


def test_a_damaged_envelope_is_counted_said_once_and_takes_no_neighbour_along(fabric: Fabric) -> None:
    one, other = pair(fabric, window_envelopes=8)
    for index in range(20):  # more than a window: damaged ones give their credit back too
        one.links.send("other", [parcel(f"{index}"), Alone(b"\xc1garbage"), parcel(f"{index}'")])
    other.hears(*[text for index in range(20) for text in (f"{index}", f"{index}'")])
    assert other.links.counters()["malformed"] == 20
    assert [(event, fields["peer"]) for event, fields in other.notes] == [("malformed_frame", "one")]
    assert one.lost == []


def test_two_nodes_cannot_listen_at_one_endpoint(fabric: Fabric) -> None:
    if fabric.kind == "ipc":
        pytest.skip("a Unix socket is taken over: a killed node leaves its file behind")
    fabric.node("one")
    with pytest.raises(OSError, match="cannot listen"):
        fabric.node("one")


def test_calls_are_made_in_order_on_the_links_thread_and_what_they_send_leaves(fabric: Fabric) -> None:
    one, other = fabric.node("one"), fabric.node("other")
    threads: list[threading.Thread] = []

    def call(index: int) -> None:
        threads.append(threading.current_thread())
        one.say("other", str(index))
        if index < 200:
            one.links.call(lambda: call(index + 1))

    one.links.call(lambda: call(0))
    other.hears(*map(str, range(201)))
    assert len(set(threads)) == 1 and threading.current_thread() not in threads


def test_calls_that_were_asked_for_before_close_are_made(fabric: Fabric) -> None:
    one = fabric.node("one")
    made: list[int] = []
    for index in range(1000):
        one.links.call(lambda index=index: made.append(index))  # type: ignore[misc]
    one.links.close()
    assert made == list(range(1000))


def test_after_close_whoever_asks_for_a_call_makes_it(fabric: Fabric) -> None:
    one = fabric.node("one")
    one.links.close()
    threads: list[threading.Thread] = []

    def call(again: bool) -> None:
        threads.append(threading.current_thread())
        if again:
            one.links.call(lambda: call(False))

    one.links.call(lambda: call(True))
    assert threads == [threading.current_thread()] * 2
