"""What a link does with what was sent after ``require``, whatever the links' thread hears first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from messages.base import PROTOCOL_VERSION
from transport.frames import Hello, Refused, Welcome, control_frame, split
from transport.link_core import LinkCore
from transport.links import LinkSettings

NEW = b"\x91\x01"
"""Stands for an encoded envelope."""


class Wire:
    """A carrier that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.replies: list[bytes] = []

    def connect(self, node: str) -> None: ...

    def disconnect(self, node: str) -> None: ...

    def transmit(self, node: str, frame: bytes) -> bool:
        self.sent.append(frame)
        return True

    def await_reply(self, node: str) -> None: ...

    def reply(self, peer: bytes, frame: bytes) -> None:
        self.replies.append(frame)

    def is_there(self, node: str) -> bool:
        return True


def welcome(incarnation: int) -> bytes:
    return control_frame(Welcome(protocol_version=PROTOCOL_VERSION, node="d0.r0", incarnation=incarnation, limit=100))


def greeted_from_the_new_life(core: LinkCore) -> None:
    core.on_frame(
        b"peer",
        control_frame(Hello(protocol_version=PROTOCOL_VERSION, node="d0.r0", incarnation=2, target_node="one")),
    )


def broken(core: LinkCore) -> None:
    core.on_broken("d0.r0", 1)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "greeting"])
@pytest.mark.parametrize("heard", [greeted_from_the_new_life, broken], ids=["a greeting", "a broken connection"])
def test_what_was_sent_after_require_waits_for_the_new_life_whatever_is_heard_before_it_is_met(
    heard: Callable[[LinkCore], None], is_open: bool
) -> None:
    wire = Wire()
    core = LinkCore("one", 1, LinkSettings(), wire, lambda: None, incarnations=[("d0.r0", 1)])
    core.send("d0.r0", [b"\x91\x00"])
    core.service(1)
    if is_open:
        core.on_reply("d0.r0", welcome(1), 1)
    core.require("d0", 2)
    core.send("d0.r0", [NEW])
    heard(core)
    core.service(60_000_000)
    core.on_reply("d0.r0", welcome(2), 60_000_000)
    core.service(60_000_000)
    assert NEW in wire.sent[-1]
    assert core.counts["dropped_lost"] == 0


def test_a_life_that_was_given_up_is_refused_though_the_links_thread_has_not_been_told_yet() -> None:
    wire = Wire()
    core = LinkCore("one", 1, LinkSettings(), wire, lambda: None)
    core.require("d0", 2)
    core.on_frame(
        b"peer",
        control_frame(Hello(protocol_version=PROTOCOL_VERSION, node="d0.r0", incarnation=1, target_node="one")),
    )
    (answer,) = wire.replies
    assert isinstance(split(answer), Refused)


def test_nothing_sent_after_require_leaves_on_the_link_to_the_old_life_however_late_the_links_thread_is_told() -> None:
    wire = Wire()
    core = LinkCore("one", 1, LinkSettings(), wire, lambda: None, incarnations=[("d0.r0", 1)])
    core.send("d0.r0", [b"\x91\x00"])
    core.service(1)
    core.on_reply("d0.r0", welcome(1), 1)
    before = len(wire.sent)
    core.require("d0", 2)
    core.send("d0.r0", [NEW])
    core.on_writable("d0.r0", 1)  # the old link would take it
    assert len(wire.sent) == before
    core.service(1)
    core.on_reply("d0.r0", welcome(2), 1)
    assert NEW in wire.sent[-1]


def test_the_welcome_of_a_life_that_was_given_up_meanwhile_opens_nothing() -> None:
    wire = Wire()
    core = LinkCore("one", 1, LinkSettings(), wire, lambda: None, incarnations=[("d0.r0", 1)])
    core.send("d0.r0", [b"\x91\x00"])
    core.service(1)
    core.require("d0", 2)
    core.send("d0.r0", [NEW])
    core.on_reply("d0.r0", welcome(1), 1)
    assert not any(NEW in frame for frame in wire.sent)
    core.service(60_000_000)
    core.on_reply("d0.r0", welcome(2), 60_000_000)
    assert NEW in wire.sent[-1]
