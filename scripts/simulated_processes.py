"""The operating system of a simulated cluster: what the real supervisor's jobs do, and the health reports of nodes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from actors.runtime.config import NodeConfig
from actors.runtime.context import Done, Emit
from actors.runtime.machine import Job
from actors.runtime.simulated_nodes import SimulatedContext, SimulatedNode
from actors.runtime.simulation import Simulation
from actors.supervisor.jobs import CleanUnit, SignalProcess, StartProcess
from messages.base import SUPERVISOR
from messages.lifecycle import (
    NodeFailed,
    NodeHealth,
    NodeReady,
    ProcessExited,
    ProcessSignalled,
    ProcessStarted,
    UnitCleaned,
)
from scripts.simulated_memory import Memory

START_MS = (20.0, 120.0)
REAP_MS = (0.5, 5.0)

Life = tuple[str, int]
"""(node, incarnation)."""


class SimulatedProcesses:
    """Starts and ends simulated nodes as the supervisor asks, and tells it what became of them."""

    def __init__(self, simulation: Simulation, memory: Memory, start: Callable[[NodeConfig], SimulatedNode]) -> None:
        self._simulation = simulation
        self._memory = memory
        self._start = start
        self._random: Random = simulation.random
        self._running: dict[Life, Done] = {}
        self._incarnations: dict[str, int] = {}
        simulation.on_crash = self.on_crash

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Carry out one job of the supervisor."""
        simulation = self._simulation
        match job:
            case StartProcess():
                life = (job.config.node, job.config.incarnation)
                self._running[life] = done
                self._incarnations[job.config.instance or job.config.node] = job.config.incarnation
                simulation.call_at(self._between(START_MS), lambda: self._begin(job.config, emit))
            case SignalProcess():
                simulation.call_at(self._between(REAP_MS), lambda: self._kill(job, done))
            case CleanUnit():
                simulation.call_at(self._between(REAP_MS), lambda: self._clean(job, done))
            case _:
                raise TypeError(f"{type(job).__name__} is no job of a supervisor")

    def close(self) -> None:
        """The supervisor never dies here."""

    def on_crash(self, node: SimulatedNode) -> None:
        """A life ended: the supervisor reaps it a little later."""
        life = (node.name, node.incarnation)
        done = self._running.pop(life, None)
        if done is not None:
            message = ProcessExited(node=node.name, incarnation=node.incarnation, exit_code=-9)
            self._simulation.call_at(self._between(REAP_MS), lambda: done(message))

    def failed(self, node: SimulatedNode, actor: str, reason: str, fatal: bool) -> None:
        """A machine said ``Fail``: its node tells the supervisor and exits."""
        message = NodeFailed(node=node.name, incarnation=node.incarnation, actor=actor, reason=reason, fatal=fatal)
        self._simulation.send_from(node, f"{node.name}/node", SUPERVISOR, message, "")
        self._simulation.call_at(0.2, lambda: self._end(node))

    def _end(self, node: SimulatedNode) -> None:
        if node.alive:
            self._simulation.crash(node.name)

    def _begin(self, config: NodeConfig, emit: Emit) -> None:
        if (config.node, config.incarnation) not in self._running:
            return  # killed before it ran
        emit(SUPERVISOR, ProcessStarted(node=config.node, incarnation=config.incarnation, pid=1))
        node = self._start(config)
        context = node.context
        assert context is not None
        ready = NodeReady(node=config.node, incarnation=config.incarnation, pid=1, detail="http://127.0.0.1:8000")
        context.post("node", SUPERVISOR, ready)
        self._report_health(context)

    def _report_health(self, context: SimulatedContext) -> None:
        config = context.config
        health = NodeHealth(node=config.node, incarnation=config.incarnation, rss_bytes=0, cpu_percent=0.0, threads=1)
        context.post("node", SUPERVISOR, health)
        context.call_later(float(config.options.heartbeat_ms), lambda: self._report_health(context))

    def _kill(self, job: SignalProcess, done: Done) -> None:
        life = (job.node, job.incarnation)
        node = self._simulation.nodes.get(job.node)
        if node is not None and node.alive and node.incarnation == job.incarnation:
            self._simulation.crash(job.node)
        elif (ended := self._running.pop(life, None)) is not None:
            ended(ProcessExited(node=job.node, incarnation=job.incarnation, exit_code=-9))
        done(ProcessSignalled(node=job.node, incarnation=job.incarnation))

    def _clean(self, job: CleanUnit, done: Done) -> None:
        if job.unit:
            self._memory.remove_of(job.unit, self._incarnations.get(job.unit, 0))
        done(UnitCleaned(unit=job.unit))

    def _between(self, range_ms: tuple[float, float]) -> float:
        return range_ms[0] + self._random.random() * (range_ms[1] - range_ms[0])
