"""The registry's shell: one machine without jobs, on the front node."""

from __future__ import annotations

from actors.registry.machine import RegistryMachine
from actors.runtime.context import ActorSpec, NodeContext


def build(context: NodeContext) -> tuple[ActorSpec, ...]:
    """The registry of a cluster."""
    config = context.config
    machine = RegistryMachine(
        node=config.node, incarnation=config.incarnation, heartbeat_ms=config.options.heartbeat_ms
    )
    return (ActorSpec("registry", machine),)
