"""The contract between a machine (decides) and its shell (does).

A machine takes one message and the time, changes its own state and returns effects. It imports no pykka, no zmq, no
torch, no clock and no random source. Whatever a machine ever sees arrives as a message: what peers send, timers that
are due, and the results of jobs it asked for. So a recorded inbox replays it exactly, and a simulation drives it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from messages.base import Message


class TableKey(Enum):
    """Base of states and events that a machine's table is indexed by: hashed by identity, which costs nothing."""

    __hash__ = object.__hash__


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to the actor at ``to``. Within a node it is a tell, between nodes a frame: no machine knows."""

    to: str
    message: Message


class StartTimer(msgspec.Struct, frozen=True):
    """Deliver ``message`` to this actor after ``delay_ms``. A running timer with the same ``key`` is replaced."""

    key: tuple[str | int, ...]
    delay_ms: float
    message: Message


class StopTimer(msgspec.Struct, frozen=True):
    """Forget the timer ``key``; unknown keys are ignored."""

    key: tuple[str | int, ...]


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Work that is not a decision (a forward pass, a copy). Its shell runs it and delivers the result as a message."""


class Run(msgspec.Struct, frozen=True):
    """Have the shell run ``job``; its result comes back as a message from this actor to itself."""

    job: Job


class Note(msgspec.Struct, frozen=True):
    """One line for people and logs: an event and its fields. ``level``: "debug", "info", "warning" or "error"."""

    level: str
    event: str
    fields: tuple[tuple[str, str | int | float], ...] = ()


class Fail(msgspec.Struct, frozen=True):
    """This actor cannot go on: its node reports ``reason`` to the supervisor and exits."""

    reason: str
    fatal: bool = False  # a configuration error: restarting cannot help


Effect = Send | StartTimer | StopTimer | Run | Note | Fail


StatusValues = tuple[tuple[str, float | int | str], ...]
"""Counters and gauges of a ``StatusReport``."""

StatusRequests = tuple[tuple[str, int, str, str, int], ...]
"""One row per live request of a ``StatusReport``: id, epoch, state, what it waits for, since when (ns)."""


class Machine(Protocol):
    """One actor's decisions."""

    def start(self, now_ns: int) -> list[Effect]:
        """Effects at the very beginning (first timers, first messages)."""
        ...

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """React to one message. A message this machine does not understand, or one that is late, changes nothing."""
        ...

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        """(values, requests) of a ``StatusReport``."""
        ...


M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Handlers(dict[type[Message], Callable[[int, str, Any], R]], Generic[R]):
    """What a machine, or a part of one, does with each type of message that it understands.

    A handler takes ``(now_ns, sender, message)``. It is found by the message's type at once: a ``match`` would ask one
    class after the other, which for 25 types costs more than most of what is handled.
    """

    def on(self, kind: type[M], handler: Callable[[int, str, M], R]) -> None:
        """Handle messages of type ``kind`` with ``handler``; they have no other."""
        assert kind not in self, f"{kind.__name__} has two handlers"
        self[kind] = handler

    def take(self, others: Handlers[R]) -> None:
        """All handlers of a part of the machine."""
        for kind, handler in others.items():
            self.on(kind, handler)
