"""The failure units of a tree: the front, and each instance with its ranks. Records only; ``machine.py`` decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import msgspec

from actors.runtime.config import NodeConfig, Options
from actors.supervisor.topology import Role, Topology
from messages.base import node_of
from messages.lifecycle import NodeHealth, ProcessExited

FRONT = "front"

Kind = Literal["front", "ctl", "rank"]

FACTORIES: dict[Kind, tuple[str, ...]] = {
    "front": ("actors.registry.actor:build", "actors.gateway.actor:build"),
    "ctl": ("actors.engine.actor:build", "actors.scheduler.actor:build"),
    "rank": ("actors.transfer.actor:build", "actors.worker.actor:build"),
}
"""Which actors live in which kind of node."""


@dataclass(frozen=True)
class TreePlan:
    """Everything the supervisor must know before it starts anything. ``factories`` are replaced by tests."""

    run_id: str
    run_dir: str
    options: Options
    topology: Topology
    cpu_count: int
    factories: dict[Kind, tuple[str, ...]] = field(default_factory=lambda: dict(FACTORIES))

    @property
    def threads_per_rank(self) -> int:
        """Compute threads of one rank: as configured, or the host's cores shared evenly, at least one."""
        return self.options.threads_per_rank or max(1, self.cpu_count // self.topology.rank_count)


class UnitState(Enum):
    """Where a unit stands. ``machine.py`` has the picture."""

    STARTING = "starting"
    RUNNING = "running"
    FAILING = "failing"  # its processes are being killed
    CLEANING = "cleaning"  # all are gone, their sockets and memory are being removed
    WAITING = "waiting"  # for the backoff before its next life
    DOWN = "down"  # will not come back: the tree stops


@dataclass
class Node:
    """One process of one life of a unit."""

    name: str
    kind: Kind
    rank: int = 0
    pid: int = 0
    alive: bool = True
    ready: bool = False
    health: NodeHealth | None = None
    heard_ns: int = 0  # of its last sign of life

    def hang(self, now_ns: int, limit_ms: int) -> str:
        """Why this process counts as hanging, "" when it does not. A machine stuck in one message silences its node."""
        silent_ms = (now_ns - self.heard_ns) // 1_000_000
        if silent_ms > limit_ms:
            return f"{self.name} hangs: no sign of life for {silent_ms} ms"
        return ""


@dataclass
class Unit:
    """Processes that live and die together, under one incarnation."""

    name: str
    role: Role | Literal[""] = ""  # "" for the front
    tp_size: int = 1
    incarnation: int = 0
    state: UnitState = UnitState.DOWN
    nodes: dict[str, Node] = field(default_factory=dict)
    reason: str = ""  # of its last death
    fatal: bool = False
    registered: bool = False  # the registry's view names this incarnation
    failures_ns: list[int] = field(default_factory=list)  # within the restart window

    def excuse(self, now_ns: int, deaf_ns: int) -> None:
        """The supervisor itself heard nothing for so long: its nodes' silence does not count."""
        for node in self.nodes.values():
            node.heard_ns = min(now_ns, node.heard_ns + deaf_ns)

    def begin_life(self, now_ns: int) -> None:
        """The next incarnation, with new processes of which nothing is known yet."""
        self.incarnation += 1
        self.nodes = self._fresh_nodes()
        self.state, self.registered, self.fatal = UnitState.STARTING, False, False
        for node in self.nodes.values():
            node.heard_ns = now_ns

    def count_failure(self, now_ns: int, window_ms: int) -> int:
        """Remember a failure now; returns how many there were within the window, this one included."""
        oldest_ns = now_ns - window_ms * 1_000_000
        self.failures_ns = [*(at_ns for at_ns in self.failures_ns if at_ns >= oldest_ns), now_ns]
        return len(self.failures_ns)

    def status(self, now_ns: int) -> list[tuple[str, float | int | str]]:
        """Flat values for a ``StatusReport``: of the unit and of each of its processes."""
        values: list[tuple[str, float | int | str]] = [
            (f"unit.{self.name}.role", self.role or FRONT),
            (f"unit.{self.name}.state", self.state.value),
            (f"unit.{self.name}.incarnation", self.incarnation),
            (f"unit.{self.name}.last_failure", self.reason),
        ]
        for node in self.nodes.values():
            health = node.health
            figures: dict[str, float | int] = {
                "pid": node.pid,
                "alive": int(node.alive),
                "ready": int(node.ready),
                "rss_bytes": health.rss_bytes if health else 0,
                "cpu_percent": health.cpu_percent if health else 0.0,
                "threads": health.threads if health else 0,
                "heard_ms_ago": (now_ns - node.heard_ns) // 1_000_000,
            }
            values += [(f"node.{node.name}.{key}", value) for key, value in figures.items()]
        return values

    def _fresh_nodes(self) -> dict[str, Node]:
        """Ranks first: they take longest to start."""
        if self.role == "":
            return {FRONT: Node(FRONT, "front")}
        ranks = [Node(f"{self.name}.r{rank}", "rank", rank) for rank in range(self.tp_size)]
        return {node.name: node for node in (*ranks, Node(f"{self.name}.ctl", "ctl"))}

    def alive_nodes(self) -> list[Node]:
        """Those whose process was not yet seen to end."""
        return [node for node in self.nodes.values() if node.alive]


def make_units(topology: Topology) -> dict[str, Unit]:
    """The front first, then the instances as written."""
    units = {FRONT: Unit(FRONT)}
    units |= {plan.name: Unit(plan.name, plan.role, plan.tp_size) for plan in topology.instances}
    return units


def unit_of(node: str) -> str:
    """``d0.r1`` → ``d0``; ``front`` → ``front``."""
    return node_of(node).partition(".")[0]


def node_config(
    plan: TreePlan, unit: Unit, node: Node, incarnations: tuple[tuple[str, int], ...], url: str
) -> NodeConfig:
    """What the process of ``node`` is told when it starts.

    ``url`` is where the front listened before, if it did: a front that chose a free port keeps it in its next life.
    """
    options = plan.options
    if node.kind == "front" and url:
        options = msgspec.structs.replace(options, port=int(url.rpartition(":")[2].strip("/")))
    return NodeConfig(
        node=node.name,
        incarnation=unit.incarnation,
        run_id=plan.run_id,
        run_dir=plan.run_dir,
        options=options,
        factories=plan.factories[node.kind],
        instance=unit.name if unit.role else "",
        role=unit.role,
        rank=node.rank,
        tp_size=unit.tp_size,
        threads=plan.threads_per_rank if node.kind == "rank" else 1,
        incarnations=incarnations,
    )


def describe_exit(message: ProcessExited) -> str:
    """For people: how a process ended, and its last words."""
    words = f": {message.last_words}" if message.last_words else ""
    if message.exit_code is None:
        return f"could not be started{words}"
    if message.exit_code < 0:
        return f"was killed by signal {-message.exit_code}{words}"
    return f"ended with exit code {message.exit_code}{words}"
