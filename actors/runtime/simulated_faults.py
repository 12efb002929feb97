"""A fault plan in a simulated cluster: the same rules and injectors as in real nodes, acting on virtual nodes."""

from __future__ import annotations

from collections.abc import Callable

from actors.runtime.fault_plan import FaultPlan
from actors.runtime.faults import NodeInjector, matcher
from actors.runtime.hooks import Delivery
from actors.runtime.simulation import Simulation
from messages.base import Message
from messages.envelope import MESSAGE_TYPES, Envelope


class SimulatedActions:
    """What a fault does to one life of a simulated node."""

    def __init__(self, simulation: Simulation, node: str) -> None:
        self._simulation = simulation
        self._node = node
        self._life = simulation.nodes[node]
        self.paused_ms = 0.0

    def kill(self) -> None:
        """End this life, unless it ended already."""
        if self._life.alive:
            self._simulation.crash(self._node)

    def hang(self, for_ms: float) -> None:
        """Stall the node; 0: until somebody resumes or restarts it."""
        if not self._life.alive:
            return
        self._simulation.stall(self._node)
        if for_ms:
            self._simulation.call_at(for_ms, self._resume)

    def _resume(self) -> None:
        if self._life.alive and self._life.stalled:
            self._simulation.resume(self._node)

    def pause(self, ms: float) -> None:
        """Remember how long; whoever asked takes it from ``paused_ms``."""
        self.paused_ms += ms

    def later(self, delay_ms: float, function: Callable[[], None]) -> None:
        """Call ``function`` later in this life."""
        assert self._life.context is not None
        self._life.context.call_later(delay_ms, function)


def watched_types(plan: FaultPlan) -> frozenset[type[Message]]:
    """Message types that some rule of a plan may strike, or be struck at."""
    patterns: list[str] = []
    for rule in plan.rules:
        if rule.match is not None:
            patterns.append(rule.match.type)
        elif rule.at is not None:
            lasts = rule.do in ("slow", "partition")  # from then on it concerns every message
            patterns.append("*" if lasts else rule.at.sent or rule.at.handled)
    matchers = [matcher(pattern) for pattern in patterns]
    return frozenset(
        kind for kind in MESSAGE_TYPES if any(matches is None or matches(kind.__name__) for matches in matchers)
    )


class ClusterInjector:
    """The injectors of all nodes of a simulated cluster, one per life."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self.strikes_writes = any(rule.write is not None for rule in plan.rules)
        self._simulation: Simulation | None = None
        self._lives: dict[str, tuple[int, NodeInjector, SimulatedActions]] = {}

    def attach(self, simulation: Simulation) -> None:
        """Take part in ``simulation``."""
        self._simulation = simulation
        simulation.injector = self
        simulation.watched = watched_types(self._plan)

    def begin(self, node: str) -> None:
        """A life of ``node`` begins; rules ``after_ms`` count from here. Called for every life, before it speaks."""
        self._of(node)

    def heal(self) -> None:
        """No rule strikes any more."""
        self._plan = FaultPlan()
        if self._simulation is not None:
            self._simulation.injector, self._simulation.watched = None, ()
        self._lives.clear()

    def _of(self, node: str) -> tuple[int, NodeInjector, SimulatedActions] | None:
        assert self._simulation is not None
        life = self._simulation.nodes.get(node)
        if life is None:
            return None
        found = self._lives.get(node)
        if found is None or found[0] != life.incarnation:
            actions = SimulatedActions(self._simulation, node)
            injector = NodeInjector(self._plan, node, life.incarnation, actions, life.record_fault)
            found = self._lives[node] = (life.incarnation, injector, actions)
        return found

    def on_send(self, now_ns: int, envelope: Envelope) -> tuple[Delivery, ...]:
        """The sending node's rules."""
        found = self._of(envelope.sender.partition("/")[0])
        return (Delivery(0.0, envelope),) if found is None else found[1].on_send(now_ns, envelope)

    def on_handled(self, now_ns: int, envelope: Envelope) -> None:
        """The handling node's rules. A pause stalls the node for that long."""
        found = self._of(envelope.to.partition("/")[0])
        if found is None:
            return
        found[1].on_handled(now_ns, envelope)
        actions = found[2]
        if actions.paused_ms:
            pause_ms, actions.paused_ms = actions.paused_ms, 0.0
            actions.hang(pause_ms)

    def on_write(self, operation: str, region_id: str, size_bytes: int) -> None:
        """Simulated executors call ``write_delay_ms`` instead, which knows the node."""
        raise NotImplementedError("a simulated data plane asks write_delay_ms")

    def write_delay_ms(self, node: str, operation: str, region_id: str, size_bytes: int) -> float:
        """How much longer this operation takes; raises ``DataPlaneError`` or ``TornWrite`` when it is to fail."""
        found = self._of(node)
        if found is None:
            return 0.0
        found[1].on_write(operation, region_id, size_bytes)
        pause_ms, found[2].paused_ms = found[2].paused_ms, 0.0
        return pause_ms
