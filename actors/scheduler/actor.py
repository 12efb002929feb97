"""The scheduler's shell: one machine without jobs, on its instance's control node."""

from __future__ import annotations

from actors.runtime.context import ActorSpec, NodeContext
from actors.scheduler.machine import SchedulerMachine
from actors.scheduler.settings import SchedulerSettings


def build(context: NodeContext) -> tuple[ActorSpec, ...]:
    """The scheduler of one instance."""
    return (ActorSpec("scheduler", SchedulerMachine(SchedulerSettings.from_node(context.config))),)
