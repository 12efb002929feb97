"""The engine's shell: one machine without jobs, on its instance's control node."""

from __future__ import annotations

from actors.engine.machine import EngineMachine, EngineSettings
from actors.runtime.context import ActorSpec, NodeContext


def build(context: NodeContext) -> tuple[ActorSpec, ...]:
    """The engine of one instance."""
    return (ActorSpec("engine", EngineMachine(EngineSettings.from_node(context.config))),)
