"""What the supervisor's machine asks of the operating system; ``processes.py`` does it."""

from __future__ import annotations

from typing import Literal

from actors.runtime.config import NodeConfig
from actors.runtime.machine import Job


class StartProcess(Job, frozen=True, kw_only=True):
    """Start a node. Emits ``ProcessStarted``; its result, ``ProcessExited``, comes when the process has ended.

    ``forked``: from a process that has loaded what such nodes need. All forked nodes of a tree have the same factories.
    """

    config: NodeConfig
    forked: bool = False


class SignalProcess(Job, frozen=True, kw_only=True):
    """Send a signal to a node's process, if that life of it still runs. Result: ``ProcessSignalled``."""

    node: str
    incarnation: int
    signal: Literal["KILL", "TERM"]


class CleanUnit(Job, frozen=True, kw_only=True):
    """Remove sockets and shared memory that dead processes left; ``unit`` "" means of the whole run.

    Result: ``UnitCleaned``.
    """

    unit: str
    nodes: tuple[str, ...] = ()
