"""A whole cluster in one thread: real gateway, registry, supervisor, schedulers, engines, workers, transfers, staging.

Every machine is the one that runs in production, built as its role's factory builds it; only what their jobs do is
simulated (``simulated_jobs.py``, ``simulated_worker.py``, ``simulated_client.py``, ``simulated_processes.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from actors.runtime.config import NodeConfig, Options
from actors.runtime.context import ActorSpec, JobExecutor
from actors.runtime.fault_plan import FaultPlan
from actors.runtime.hooks import Recorder
from actors.runtime.machine import Fail
from actors.runtime.simulated_faults import ClusterInjector
from actors.runtime.simulated_links import LinkSettings
from actors.runtime.simulated_nodes import SimulatedActor, SimulatedContext, SimulatedNode
from actors.runtime.simulation import Factory, Simulation
from actors.supervisor.machine import SupervisorMachine
from actors.supervisor.topology import parse_topology
from actors.supervisor.units import TreePlan
from actors.transfer.executor import LinkBook
from actors.worker.layout import check_shards
from messages.base import Message
from scripts.simulated_client import ClientExecutor, Clients, Request
from scripts.simulated_jobs import Copier, SimulatedMergeExecutor, SimulatedTransferExecutor, Speed
from scripts.simulated_memory import Memory, NodeMemory
from scripts.simulated_model import GEOMETRY
from scripts.simulated_processes import SimulatedProcesses
from scripts.simulated_worker import Group, SimulatedWorkerExecutor
from scripts.trace_machines import make_machine

if TYPE_CHECKING:
    from scripts.simulated_checks import Checks

OPTIONS = Options(
    model="simulated",
    topology="P2/D1",
    block_size=4,
    block_count=24,
    max_model_len=64,
    max_tokens_per_batch=24,
    max_seqs_per_batch=6,
    max_tokens_per_chunk_for_prefill=8,
    offer_backoff_ms=20.0,
    offer_backoff_max_ms=500.0,
    offer_attempts_max=1000,
    reservation_timeout_ms=4_000,
    handoff_timeout_ms=4_000,
    request_attempts_max=100,
    request_timeout_ms=120_000,
    staging_leases=2,
    heartbeat_ms=1_000,
    hang_timeout_ms=4_000,
    collective_timeout_ms=1_000,
    start_timeout_ms=15_000,
    restarts_max=10_000,
    restart_backoff_ms=50.0,
)
"""Small caches and short waits: every limit is met, and every timeout is reached, within a short run."""

CheckFactory = Callable[["SimulatedCluster"], "Checks"]


class _Console:
    """Stands in for the supervisor's console: says nothing."""

    def start(self, now_ns: int) -> list[object]:
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[object]:
        return []

    def status(self, now_ns: int) -> tuple[tuple[()], tuple[()]]:
        return (), ()


class SimulatedCluster:
    """One cluster, its clients and its faults. ``machines`` finds the live machine at an address."""

    def __init__(
        self,
        seed: int,
        requests: list[Request],
        *,
        options: Options = OPTIONS,
        links: LinkSettings | None = None,
        speed: Speed | None = None,
        plan: FaultPlan | None = None,
        deadline_ms: float = 150_000.0,
        recorder_for: Callable[[NodeConfig], Recorder] | None = None,
        notes_max: int = 0,
    ) -> None:
        self.options = options
        self.memory = Memory()
        self.speed = speed or Speed()
        self.simulation = Simulation(seed, links, recorder_for=recorder_for, on_fail=self._on_fail, notes_max=notes_max)
        self.clients = Clients(self.simulation, requests, deadline_ms, options.num_speculative_tokens)
        self.injector: ClusterInjector | None = None
        if plan is not None and plan.rules:
            self.injector = ClusterInjector(plan)
            self.injector.attach(self.simulation)
        self.checks: Checks | None = None
        self._groups: dict[tuple[str, int], Group] = {}
        self._tree = TreePlan(
            run_id=f"sim{seed}",
            run_dir="",
            options=options,
            topology=parse_topology(options.topology, lambda size: check_shards(GEOMETRY, size)),
            cpu_count=1,
        )
        self.processes = SimulatedProcesses(self.simulation, self.memory, self._start)
        self.simulation.on_crash = self._on_crash

    def begin(self) -> None:
        """Start the supervisor, which starts everything else."""
        config = NodeConfig(
            node="supervisor", incarnation=1, run_id="sim", run_dir="", options=self.options, factories=()
        )
        self.simulation.start_node(config, (self._build_supervisor,))

    @property
    def instances(self) -> list[str]:
        """Names of all instances."""
        return [instance.name for instance in self._tree.topology.instances]

    def nodes_of(self, instance: str) -> list[str]:
        """The nodes of an instance that are alive."""
        return [
            name for name, node in self.simulation.nodes.items() if node.alive and name.partition(".")[0] == instance
        ]

    def actor(self, address: str) -> SimulatedActor | None:
        """The live actor at an address."""
        name, _, actor = address.partition("/")
        node = self.simulation.nodes.get(name)
        return node.actors.get(actor) if node is not None and node.alive else None

    # -- what a process runs ------------------------------------------------------------------------------------------

    def _start(self, config: NodeConfig) -> SimulatedNode:
        factory: Factory
        if config.node == "front":
            factory = self._build_front
        else:
            factory = self._build_control if config.node.endswith(".ctl") else self._build_rank
        node = self.simulation.start_node(config, (factory,))
        if self.checks is not None:
            self.checks.on_start(node)
        if self.injector is not None:
            self.injector.begin(config.node)
        return node

    def _build_supervisor(self, context: SimulatedContext) -> tuple[ActorSpec, ...]:
        return (
            ActorSpec("console", _Console()),  # type: ignore[arg-type]
            ActorSpec("root", SupervisorMachine(self._tree), self.processes),
        )

    def _build_front(self, context: SimulatedContext) -> tuple[ActorSpec, ...]:
        gateway = make_machine(context.config, "gateway")
        return (
            ActorSpec("registry", make_machine(context.config, "registry")),
            ActorSpec("gateway", gateway, ClientExecutor(self.clients, context)),
        )

    def _build_control(self, context: SimulatedContext) -> tuple[ActorSpec, ...]:
        return tuple(ActorSpec(name, make_machine(context.config, name)) for name in ("engine", "scheduler"))

    def _build_rank(self, context: SimulatedContext) -> tuple[ActorSpec, ...]:
        config = context.config
        memory = NodeMemory(self.memory)
        group = self._groups.setdefault((config.instance, config.incarnation), Group(config.tp_size))
        checks = self.checks
        injector = self.injector
        fault = injector.write_delay_ms if injector is not None and injector.strikes_writes else None
        copier = Copier(context, memory, self.speed, checks.on_copy if checks is not None else None, fault)
        book = LinkBook()
        executors: dict[str, JobExecutor] = {
            "transfer": SimulatedTransferExecutor(copier, book, config.rank),
            "staging": SimulatedMergeExecutor(copier, book, config.rank),
            "worker": SimulatedWorkerExecutor(
                context, memory, self.speed, group, checks.on_execute if checks is not None else None
            ),
        }
        return tuple(ActorSpec(name, make_machine(config, name), executor) for name, executor in executors.items())

    # -- deaths -------------------------------------------------------------------------------------------------------

    def _on_fail(self, actor: SimulatedActor, effect: Fail) -> None:
        self.processes.failed(actor.node, actor.name, effect.reason, effect.fatal)

    def _on_crash(self, node: SimulatedNode) -> None:
        if node.name == "front":
            self.clients.front_died()
        self.processes.on_crash(node)


def with_options(**changes: object) -> Options:
    """The simulation's options with changes."""
    return msgspec.structs.replace(OPTIONS, **changes)
