"""The supervisor's shell: a node named ``supervisor`` inside the process that started the tree.

It has two actors: ``root`` (the machine, with the executor that owns the processes) and ``console``, through which the
rest of the process hears of the tree. Unlike other nodes it is not started from a file, so its factory is made here
with what the starting process holds: the plan, the run directory and the console.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.runtime.context import ActorSpec, NodeContext
from actors.runtime.log import WriteLine
from actors.supervisor.console import Console
from actors.supervisor.machine import CONSOLE, SupervisorMachine
from actors.supervisor.processes import ProcessExecutor
from actors.supervisor.run_dir import RunDir
from actors.supervisor.units import TreePlan
from messages.base import SUPERVISOR, actor_of


def make_build(
    plan: TreePlan, run_dir: RunDir, console: Console, write_line: WriteLine
) -> Callable[[NodeContext], tuple[ActorSpec, ...]]:
    """The factory of the supervisor's node. Nothing is started before the node starts."""

    def build(context: NodeContext) -> tuple[ActorSpec, ...]:
        executor = ProcessExecutor(run_dir, write_line)
        return (
            ActorSpec(actor_of(CONSOLE), console),
            ActorSpec(actor_of(SUPERVISOR), SupervisorMachine(plan), executor),
        )

    return build
