"""What a role's factory gets from the node it is built in, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from actors.runtime.config import NodeConfig
from actors.runtime.machine import Job, Machine
from messages.base import Message
from transport.dataplane import DataPlane

Emit = Callable[[str, Message], None]
"""``emit(to, message)``: send from the actor whose job is running; the cause is the message that asked for the job."""

Done = Callable[[Message], None]
"""``done(result)``: deliver a job's result to the actor that asked for it. Exactly once per job, from any thread."""


class JobExecutor(Protocol):
    """Carries out a machine's jobs. Failures become result messages; ``submit`` itself never raises for a bad job."""

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Start (or at once finish) ``job``. Called on the thread that all actors of the node share: never blocks."""
        ...

    def close(self) -> None:
        """Wait for running jobs and release threads and buffers."""
        ...


@dataclass(frozen=True)
class ActorSpec:
    """One actor of a node: its name within the node, its machine, and who carries out its jobs (None: it has none)."""

    name: str
    machine: Machine
    executor: JobExecutor | None = None


class NodeContext(Protocol):
    """The node as a factory ``build(context) -> tuple[ActorSpec, ...]`` sees it."""

    config: NodeConfig

    @property
    def data_plane(self) -> DataPlane:
        """The node's data plane, made at its first use (so control nodes never load it). Any thread."""
        ...

    def ready_detail(self, text: str) -> None:
        """What ``NodeReady.detail`` should say (the front: the URL it listens on). Call it while actors start."""
        ...

    def post(self, sender_actor: str, to: str, message: Message) -> None:
        """Send as local actor ``sender_actor`` from outside its mailbox (HTTP handlers, start-up). Any thread."""
        ...

    def log(self, actor: str, level: str, event: str, **fields: str | int | float) -> None:
        """One line for people. Any thread."""
        ...

    def on_close(self, function: Callable[[], None]) -> None:
        """Run ``function`` when the node stops, after its actors, in reverse order of registration."""
        ...
