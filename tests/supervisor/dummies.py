"""Roles that do nothing but exist: real node processes for tests of the tree, without a model."""

from __future__ import annotations

import os
from pathlib import Path

from actors.registry.actor import build as build_registry
from actors.runtime.config import ConfigError, NodeConfig
from actors.runtime.context import ActorSpec, NodeContext
from actors.runtime.machine import Effect, Send, StartTimer
from actors.supervisor.units import Kind
from messages.base import REGISTRY, SUPERVISOR, Message, instance_of
from messages.cluster import Heartbeat, InstanceInfo, LinkReport, RegisterInstance
from messages.lifecycle import Drain, Drained, NodeProgress
from messages.timers import InstanceTimer

LOADED_IN = os.getpid()
"""The process that imported this module: of a forked node not the one that it runs in."""

URL = "http://127.0.0.1:1"
HERE = "tests.supervisor.dummies"
FACTORIES: dict[Kind, tuple[str, ...]] = {
    "front": (f"{HERE}:build_front",),
    "ctl": (f"{HERE}:build_control",),
    "rank": (f"{HERE}:build_rank",),
}


class Dummy:
    """Says what it is told to at its start; afterwards it only drains."""

    def __init__(self, node: str, actor: str, first: tuple[Effect, ...] = ()) -> None:
        self._node, self._actor, self._first = node, actor, first

    def start(self, now_ns: int) -> list[Effect]:
        return list(self._first)

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        return [Send(sender, Drained(node=self._node, actor=self._actor))] if isinstance(message, Drain) else []

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        return (("pid", os.getpid()), ("loaded_in", LOADED_IN)), ()


class DummyScheduler(Dummy):
    """Registers its instance and says at every heartbeat that it lives, as a real one does."""

    def __init__(self, config: NodeConfig, register: Message, beat: Message) -> None:
        super().__init__(config.node, "scheduler", (Send(REGISTRY, register),))
        due = InstanceTimer(purpose="heartbeat", instance=config.instance, incarnation=config.incarnation)
        self._beat = [Send(REGISTRY, beat), StartTimer(("heartbeat",), float(config.options.heartbeat_ms), due)]

    def start(self, now_ns: int) -> list[Effect]:
        return [*super().start(now_ns), *self._beat]

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        return list(self._beat) if isinstance(message, InstanceTimer) else super().handle(now_ns, sender, message)


def build_front(context: NodeContext) -> tuple[ActorSpec, ...]:
    context.ready_detail(URL)
    return (*build_registry(context), ActorSpec("gateway", Dummy(context.config.node, "gateway")))


def build_control(context: NodeContext) -> tuple[ActorSpec, ...]:
    config = context.config
    assert config.role
    info = InstanceInfo(
        instance=config.instance,
        incarnation=config.incarnation,
        role=config.role,
        tp_size=config.tp_size,
        max_model_len=100,
        block_count=10,
        slot_count=2,
    )
    links = tuple(
        LinkReport(instance=instance_of(node), incarnation=incarnation)
        for node, incarnation in config.incarnations
        if node.endswith(".ctl") and instance_of(node) != config.instance
    )
    beat = Heartbeat(
        instance=config.instance,
        incarnation=config.incarnation,
        running=0,
        waiting=0,
        blocks_free=10,
        blocks_total=10,
        slots_free=2,
        slots_total=2,
        links=links,
    )
    return (
        ActorSpec("engine", Dummy(config.node, "engine")),
        ActorSpec("scheduler", DummyScheduler(config, RegisterInstance(info=info), beat)),
    )


def build_rank(context: NodeContext) -> tuple[ActorSpec, ...]:
    config = context.config
    context.data_plane.create_region(f"{config.node}.{config.incarnation}.caches", 4096)
    progress = NodeProgress(node=config.node, incarnation=config.incarnation, what="weights", done=2, total=2)
    return (
        ActorSpec("transfer", Dummy(config.node, "transfer")),
        ActorSpec("staging", Dummy(config.node, "staging")),
        ActorSpec("worker", Dummy(config.node, "worker", (Send(SUPERVISOR, progress),))),
    )


def build_rank_that_refuses(context: NodeContext) -> tuple[ActorSpec, ...]:
    raise ConfigError("staging_mb 1 holds no lease; raise staging_mb")


def build_rank_that_crashes(context: NodeContext) -> tuple[ActorSpec, ...]:
    with (Path(context.config.options.trace_dir) / "starts").open("a") as file:
        file.write(f"{context.config.incarnation}\n")
    os._exit(3)
