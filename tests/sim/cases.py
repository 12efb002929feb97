"""One hand-written situation in a simulated cluster: requests, faults, what happens when, then rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from actors.runtime.fault_plan import FaultPlan, parse_line
from actors.runtime.hooks import Delivery
from actors.runtime.machine import Effect
from actors.runtime.simulated_nodes import SimulatedActor
from actors.scheduler.machine import SchedulerMachine
from messages.base import control_address
from messages.envelope import Envelope
from messages.requests import SamplingParams
from scripts.simulated_checks import Checks
from scripts.simulated_client import Request
from scripts.simulated_cluster import SimulatedCluster, with_options
from scripts.simulated_model import EOS
from tests.scheduler.invariants import check_scheduler

WARM_MS = 400.0
"""By then the cluster is up."""


def request(
    number: int, prompt: int = 9, *, cancel_after_ms: float = -1.0, priority: Any = "online", **sampling: Any
) -> Request:
    """Request ``r<number>`` with ``prompt`` tokens, which differ between numbers."""
    tokens = tuple(1 + (number * 7 + 3 * index) % 45 for index in range(prompt))
    values = {"max_tokens": 5, "eos_token_ids": (EOS,), "ignore_eos": True, "seed": number, **sampling}
    return Request(f"r{number}", tokens, SamplingParams(**values), priority, cancel_after_ms)


class Case:
    """A cluster that runs one situation. ``handled`` counts messages by (type, receiving instance)."""

    def __init__(self, requests: Sequence[Request], *, faults: str = "", **options: Any) -> None:
        plan = parse_line(faults) if faults else FaultPlan()
        self.cluster = SimulatedCluster(7, list(requests), options=with_options(**options), plan=plan)
        checks = Checks(self.cluster)
        self.handled: Counter[tuple[str, str]] = Counter()
        self.on_handled: list[Callable[[Envelope], None]] = []
        self.crashed: list[str] = []
        self.disturbed = 0
        self._count_disturbed()

        def on_step(actor: SimulatedActor, envelope: Envelope, effects: list[Effect]) -> None:
            self.handled[(type(envelope.message).__name__, actor.node.config.instance)] += 1
            if actor.name == "scheduler" and isinstance(actor.machine, SchedulerMachine):
                check_scheduler(actor.machine)
            for hook in self.on_handled:
                hook(envelope)

        self.cluster.simulation.on_step = on_step
        self.checks = checks

    def _count_disturbed(self) -> None:
        """See that a fault plan strikes at all: count envelopes that are not simply delivered."""
        injector = self.cluster.injector
        if injector is None:
            return
        inner = injector.on_send

        def on_send(now_ns: int, envelope: Envelope) -> tuple[Delivery, ...]:
            deliveries = inner(now_ns, envelope)
            self.disturbed += deliveries != (Delivery(0.0, envelope),)
            return deliveries

        injector.on_send = on_send  # type: ignore[method-assign]

    def at(self, ms: float, function: Callable[[], None]) -> None:
        """Do something ``ms`` after the requests begin to come."""
        self.cluster.simulation.call_at(WARM_MS + ms, function)

    def crash_at(self, node: str, kind: str, nth: int = 1) -> None:
        """Kill ``node`` right after the ``nth`` message of type ``kind`` was handled, by whomever."""
        seen = 0

        def look(envelope: Envelope) -> None:
            nonlocal seen
            if type(envelope.message).__name__ == kind:
                seen += 1
                if seen == nth:
                    self.crashed.append(node)
                    self.cluster.simulation.call_at(0.0, lambda: self.cluster.simulation.crash(node))

        self.on_handled.append(look)

    def run(self, arrivals_ms: Sequence[float] = (), *, converge_ms: float = 60_000.0) -> Case:
        """Until every request is over and everything is free; raises ``AssertionError`` when that does not come."""
        cluster, simulation = self.cluster, self.cluster.simulation
        cluster.begin()
        for index, one in enumerate(cluster.clients.requests):
            delay_ms = arrivals_ms[index] if index < len(arrivals_ms) else 0.0
            simulation.call_at(WARM_MS + delay_ms, lambda one=one: cluster.clients.submit(one))  # type: ignore[misc]
        simulation.run(for_ms=converge_ms, until=lambda: cluster.clients.open_count == 0)
        states = {one.name: (one.state, one.error) for one in cluster.clients.requests}
        assert cluster.clients.open_count == 0, states
        for _ in range(120):
            if not self.checks.at_rest():
                break
            simulation.run(for_ms=250.0)
        assert self.checks.at_rest() == "", states
        return self

    @property
    def states(self) -> list[str]:
        """How each request ended."""
        return [one.state for one in self.cluster.clients.requests]

    def count(self, kind: str, instance: str) -> int:
        """How many messages of this type ``instance`` handled."""
        return self.handled[(kind, instance)]

    def scheduler(self, instance: str) -> SchedulerMachine:
        """The live scheduler of an instance."""
        actor = self.cluster.actor(control_address(instance, "scheduler"))
        assert actor is not None and isinstance(actor.machine, SchedulerMachine)
        return actor.machine


class FirstChunks:
    """Counts the prefills that begin on each instance: rows that start at token 0."""

    def __init__(self, case: Case) -> None:
        self.by_instance: Counter[str] = Counter()
        case.on_handled.append(self._look)

    def _look(self, envelope: Envelope) -> None:
        if envelope.to.endswith(".ctl/engine") and type(envelope.message).__name__ == "ExecuteBatch":
            rows = envelope.message.rows  # type: ignore[attr-defined]
            started = sum(row.is_prefill and row.start == 0 for row in rows)
            self.by_instance[envelope.to.partition(".")[0]] += started
