"""What a simulated cluster is made of: one life of a process, its actors, and what its factories see."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.runtime.config import NodeConfig
from actors.runtime.context import ActorSpec, JobExecutor
from actors.runtime.faults import FaultRecorder
from actors.runtime.hooks import Recorder
from actors.runtime.machine import Effect, Machine, Note
from messages.base import Message
from transport.dataplane import DataPlane

if TYPE_CHECKING:
    from actors.runtime.simulation import Simulation


class SimulatedActor:
    """One machine and its mailbox."""

    __slots__ = ("address", "executor", "free_ns", "handle", "machine", "name", "node", "timers")

    def __init__(self, node: SimulatedNode, spec: ActorSpec) -> None:
        self.node = node
        self.name = spec.name
        self.address = f"{node.name}/{spec.name}"
        self.machine: Machine = spec.machine
        self.handle: Callable[[int, str, Message], list[Effect]] = spec.machine.handle
        self.executor: JobExecutor | None = spec.executor
        self.free_ns = 0
        self.timers: dict[tuple[str | int, ...], int] = {}


class SimulatedNode:
    """One life of one process."""

    __slots__ = (
        "actors",
        "alive",
        "backlog",
        "by_address",
        "config",
        "context",
        "count",
        "dead",
        "id_prefix",
        "incarnation",
        "name",
        "newest",
        "record_fault",
        "recorder",
        "running",
        "sent_to",
        "slow_ns",
    )

    def __init__(self, config: NodeConfig, recorder: Recorder | None) -> None:
        self.name = config.node
        self.incarnation = config.incarnation
        self.config = config
        self.id_prefix = f"{config.node}#{config.incarnation}."
        self.count = 0
        self.alive = True
        self.running = True  # alive and not stalled
        self.slow_ns = 0
        self.backlog: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        self.actors: dict[str, SimulatedActor] = {}
        self.by_address: dict[str, SimulatedActor] = {}  # the same actors
        self.sent_to: dict[str, dict[str, None]] = {}
        self.newest: dict[str, int] = {}  # peer node → newest incarnation that spoke to this life
        self.dead: dict[str, int] = {}  # instance → newest incarnation that this life knows to be dead
        self.recorder = recorder
        self.record_fault: FaultRecorder | None = getattr(recorder, "fault", None)
        self.context: SimulatedContext | None = None

    def add(self, spec: ActorSpec) -> SimulatedActor:
        """One more actor of this life."""
        actor = self.actors[spec.name] = SimulatedActor(self, spec)
        self.by_address[actor.address] = actor
        return actor

    @property
    def stalled(self) -> bool:
        """Stopped as by SIGSTOP: alive, but nothing of it runs."""
        return self.alive and not self.running


class SimulatedContext:
    """``NodeContext`` of a simulated node; factories of simulated roles also use ``call_later`` and ``simulation``."""

    def __init__(self, simulation: Simulation, node: SimulatedNode) -> None:
        self.simulation = simulation
        self.node = node
        self.config = node.config
        self.closers: list[Callable[[], None]] = []

    @property
    def data_plane(self) -> DataPlane:
        """Simulated roles have memory of their own (``scripts/simulated_memory.py``)."""
        raise NotImplementedError("a simulated node has no data plane")

    def ready_detail(self, text: str) -> None:
        """Nobody reads it here."""

    def post(self, sender_actor: str, to: str, message: Message) -> None:
        """Send as local actor ``sender_actor``."""
        if self.node.alive:
            self.simulation.send_from(self.node, f"{self.node.name}/{sender_actor}", to, message, "")

    def log(self, actor: str, level: str, event: str, **fields: str | int | float) -> None:
        """Kept by the simulation (``notes``)."""
        self.simulation.note(f"{self.node.name}/{actor}", Note(level, event, tuple(fields.items())))

    def on_close(self, function: Callable[[], None]) -> None:
        """Run when this life ends."""
        self.closers.append(function)

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> None:
        """Run ``function`` after ``delay_ms`` of virtual time, unless this life has ended by then."""
        simulation, node = self.simulation, self.node
        due = simulation.now_ns + int(delay_ms * 1e6) + node.slow_ns
        simulation.push(due, node, call_function, function, None)


def call_function(function: Callable[[], None], _: None) -> None:
    function()
