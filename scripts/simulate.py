"""``kvferry simulate``: runs of a simulated cluster under faults, one per seed, every invariant checked.

A run has two phases. First safety: requests come, faults strike, I1 to I6 hold after every step. Then everything heals,
and the cluster must converge (I7): every request finishes or fails clearly, then every block, slot and lease is free
(I4). A run that breaks an invariant is run again with tracing on; the trace is what ``kvferry trace`` reads.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from actors.runtime.config import ConfigError, NodeConfig, Options
from actors.runtime.hooks import Recorder
from actors.runtime.simulated_nodes import SimulatedNode
from actors.runtime.simulation import SimulationError
from actors.runtime.trace import FileRecorder
from scripts.simulated_checks import Checks
from scripts.simulated_cluster import SimulatedCluster
from scripts.simulated_memory import Violation
from scripts.simulated_scenario import FAULTS, Incident, Scenario, draw, make_requests

CONVERGE_MS: Final = 60_000.0
"""After healing every request must be over within this much virtual time."""
SETTLE_MS: Final = 30_000.0
"""… and everything be free within this much more."""
SETTLE_STEP_MS: Final = 250.0
RUNS_PER_COLLECTION: Final = 50


@dataclass
class Outcome:
    """What one run did. ``violation`` is empty when every invariant held."""

    seed: int
    violation: str = ""
    states: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    steps: int = 0
    virtual_ms: float = 0.0


def parse_faults(text: str) -> frozenset[str]:
    """``all``, ``none``, or kinds separated by commas; raises ``ConfigError``."""
    if text in ("all", ""):
        return frozenset(FAULTS)
    if text == "none":
        return frozenset()
    kinds = frozenset(part.strip() for part in text.split(",") if part.strip())
    unknown = sorted(kinds - set(FAULTS))
    if unknown:
        raise ConfigError(f"--faults {unknown[0]!r} is unknown; allowed: all, none, {', '.join(FAULTS)}")
    return kinds


class Run:
    """One seed's run."""

    def __init__(
        self,
        seed: int,
        request_count: int,
        faults: frozenset[str],
        *,
        topology: str = "",
        trace_dir: Path | None = None,
    ) -> None:
        self.scenario: Scenario = draw(seed, request_count, faults, topology)
        self._trace_dir = trace_dir
        requests = make_requests(seed, request_count, faults)
        scenario = self.scenario
        self.cluster = SimulatedCluster(
            seed,
            requests,
            options=scenario.options,
            links=scenario.links,
            speed=scenario.speed,
            plan=scenario.plan,
            recorder_for=self._recorder if trace_dir is not None else None,
        )
        self.checks = Checks(self.cluster)

    def _recorder(self, config: NodeConfig) -> Recorder:
        assert self._trace_dir is not None
        return FileRecorder(config, self._trace_dir)

    def go(self) -> Outcome:
        """Run to the end; a broken invariant is in the outcome, not raised."""
        outcome = Outcome(self.scenario.seed)
        try:
            self._safety()
            self._convergence()
        except (Violation, SimulationError) as error:
            cause = error.__cause__
            inner = str(cause if isinstance(cause, Violation) else error)
            outcome.violation = f"{inner} (at {self.cluster.simulation.now_ns / 1e6:.3f} ms)"
        simulation, clients = self.cluster.simulation, self.cluster.clients
        outcome.states.update(request.state for request in clients.requests)
        outcome.errors = [f"{request.name}: {request.error}" for request in clients.requests if request.error]
        outcome.steps = simulation.step_count
        outcome.virtual_ms = simulation.now_ns / 1e6
        for node in simulation.nodes.values():
            if node.alive and node.recorder is not None:
                node.recorder.close()
        return outcome

    def _safety(self) -> None:
        scenario, cluster = self.scenario, self.cluster
        simulation = cluster.simulation
        cluster.begin()
        for request, at_ms in zip(cluster.clients.requests, scenario.arrivals_ms, strict=True):
            simulation.call_at(at_ms, lambda request=request: cluster.clients.submit(request))  # type: ignore[misc]
        for incident in scenario.incidents:
            simulation.call_at(incident.at_ms, lambda incident=incident: self._strike(incident))  # type: ignore[misc]
        simulation.run(for_ms=scenario.heal_ms)

    def _strike(self, incident: Incident) -> None:
        simulation = self.cluster.simulation
        node = simulation.nodes.get(incident.node)
        if node is None or not node.alive:
            return
        match incident.kind:
            case "crash":
                simulation.crash(incident.node)
            case "partition":
                simulation.partition(incident.node, incident.other, both=incident.both, hold=incident.hold)
                simulation.call_at(incident.for_ms, lambda: simulation.mend(incident.node, incident.other))
            case "break":
                simulation.break_links(incident.node, incident.other)
            case "hang":
                simulation.stall(incident.node)
                simulation.call_at(incident.for_ms, lambda: self._wake(node))
            case _:
                simulation.slow(incident.node, incident.ms)
                simulation.call_at(incident.for_ms, lambda: setattr(node, "slow_ns", 0))

    def _wake(self, node: SimulatedNode) -> None:
        if node.alive and node.stalled:
            self.cluster.simulation.resume(node.name)

    def _convergence(self) -> None:
        cluster, simulation = self.cluster, self.cluster.simulation
        if cluster.injector is not None:
            cluster.injector.heal()
        simulation.heal()
        clients = cluster.clients
        simulation.run(for_ms=CONVERGE_MS, until=lambda: clients.open_count == 0)
        if clients.open_count:
            request = next(request for request in clients.requests if not request.is_over)
            raise Violation(
                f"I7: {clients.open_count} requests are not over {CONVERGE_MS:.0f} ms after healing, for example"
                f" {request.name} ({request.state}, {len(request.tokens)} of {len(request.expected)} tokens)"
            )
        for request in clients.requests:
            if request.state == "error":  # attempts and time are plenty in every scenario
                raise Violation(f"I7: {request.name} failed although the cluster healed: {request.error}")
        why = self.checks.at_rest()
        waited_ms = 0.0
        while why and waited_ms < SETTLE_MS:
            simulation.run(for_ms=SETTLE_STEP_MS)
            waited_ms += SETTLE_STEP_MS
            why = self.checks.at_rest()
        if why:
            raise Violation(f"I4: {SETTLE_MS:.0f} ms after the last request was over, {why}")


def run_seed(
    seed: int, request_count: int, faults: frozenset[str], *, topology: str = "", trace_dir: Path | None = None
) -> Outcome:
    """One run."""
    run = Run(seed, request_count, faults, topology=topology, trace_dir=trace_dir)
    outcome = run.go()
    run.cluster.simulation.close()
    return outcome


def replay_command(seed: int, request_count: int, faults: str, topology: str = "") -> str:
    """The command that runs this seed again."""
    extra = f" --topology {topology}" if topology else ""
    return f"kvferry simulate --seed {seed} --requests {request_count} --faults {faults}{extra}"


@dataclass
class Summary:
    """All runs of one command."""

    runs: int = 0
    requests: int = 0
    steps: int = 0
    wall_s: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome, request_count: int) -> None:
        """One more run, of ``request_count`` requests."""
        self.runs += 1
        self.requests += request_count
        self.steps += outcome.steps
        self.states += outcome.states
        if outcome.violation:
            self.failures.append(outcome)

    @property
    def text(self) -> str:
        """All of it as one line."""
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        return (
            f"{self.runs} runs, {self.requests} requests ({states}), {self.steps} steps in {self.wall_s:.1f} s:"
            f" {self.requests_per_s:.0f} requests/s"
        )

    @property
    def requests_per_s(self) -> float:
        """Simulated requests per second of real time."""
        return self.requests / self.wall_s if self.wall_s else 0.0


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A run makes many small objects and few cycles: these are looked for now and then only, see ``simulate``."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def simulate(
    seeds: Iterable[int],
    request_count: int,
    faults_text: str,
    *,
    topology: str = "",
    time_limit_s: float = 0.0,
    failures_max: int = 1,
    on_outcome: Callable[[Outcome], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Summary:
    """Run seeds until they end, ``time_limit_s`` passed (0: never) or ``failures_max`` runs broke an invariant."""
    faults = parse_faults(faults_text)
    summary = Summary()
    began = clock()
    with _collector_at_rest():
        for seed in seeds:
            outcome = run_seed(seed, request_count, faults, topology=topology)
            summary.add(outcome, request_count)
            if on_outcome is not None:
                on_outcome(outcome)
            if len(summary.failures) >= failures_max or (time_limit_s and clock() - began > time_limit_s):
                break
            if summary.runs % RUNS_PER_COLLECTION == 0:
                gc.collect()
    summary.wall_s = clock() - began
    return summary


def explain(summary: Summary, request_count: int, faults: str, *, topology: str, trace_dir: Path) -> Iterator[str]:
    """Lines about every run that broke an invariant: each is run again, and leaves its trace in ``trace_dir``."""
    for outcome in summary.failures:
        run_seed(outcome.seed, request_count, parse_faults(faults), topology=topology, trace_dir=trace_dir)
        yield f"trace: kvferry trace stuck --trace-dir {trace_dir}"
        yield f"again: {replay_command(outcome.seed, request_count, faults, topology)}"
        yield f"violation in seed {outcome.seed}: {outcome.violation}"


__all__ = ["Options", "Outcome", "Run", "Summary", "explain", "parse_faults", "replay_command", "run_seed", "simulate"]
