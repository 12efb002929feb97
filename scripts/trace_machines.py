"""Machines by role: a fresh one for an actor of a node, as that role's factory makes it, from the node's configuration.

What replays a recorded actor, and what a simulated cluster is built from.
"""

from __future__ import annotations

from actors.engine.machine import EngineMachine, EngineSettings
from actors.gateway.machine import GatewayMachine
from actors.registry.machine import RegistryMachine
from actors.runtime.config import NodeConfig
from actors.runtime.machine import Machine
from actors.scheduler.machine import SchedulerMachine
from actors.scheduler.settings import SchedulerSettings
from actors.supervisor.machine import SupervisorMachine
from actors.supervisor.topology import parse_topology
from actors.supervisor.units import TreePlan
from actors.transfer.machine import TransferMachine
from actors.transfer.staging_machine import StagingMachine
from actors.worker.machine import WorkerMachine
from messages.base import GATEWAY

ROLES = ("supervisor root", "registry", "gateway", "scheduler", "engine", "worker", "transfer", "staging")


def make_machine(config: NodeConfig, actor: str) -> Machine:
    """A machine that has seen nothing yet. Raises ``LookupError`` for an actor that is none of ours."""
    instance, incarnation, rank = config.instance, config.incarnation, config.rank
    match actor:
        case "root":
            return SupervisorMachine(tree_plan(config))
        case "registry":
            return RegistryMachine(node=config.node, incarnation=incarnation, heartbeat_ms=config.options.heartbeat_ms)
        case "gateway":
            return GatewayMachine(node=config.node, incarnation=incarnation, options=config.options, address=GATEWAY)
        case "scheduler":
            return SchedulerMachine(SchedulerSettings.from_node(config))
        case "engine":
            return EngineMachine(EngineSettings.from_node(config))
        case "worker":
            return WorkerMachine(instance, rank, incarnation)
        case "transfer":
            return TransferMachine(instance, rank, incarnation, config.role, config.options)
        case "staging":
            return StagingMachine(rank)
        case _:
            raise LookupError(f"{config.node} has no machine {actor!r}; machines are: {', '.join(ROLES)}")


def tree_plan(config: NodeConfig) -> TreePlan:
    """The plan of a supervisor whose model nobody checks any more."""
    return TreePlan(
        run_id=config.run_id,
        run_dir=config.run_dir,
        options=config.options,
        topology=parse_topology(config.options.topology, lambda size: None),
        cpu_count=1,
    )
