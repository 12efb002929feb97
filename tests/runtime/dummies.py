"""Machines, executors and nodes that runtime tests are made of."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.runtime.config import ConfigError, NodeConfig, Options
from actors.runtime.context import ActorSpec, Done, Emit, NodeContext
from actors.runtime.machine import Effect, Fail, Job, Send
from actors.runtime.node import Node
from messages.base import Message
from messages.lifecycle import Stop
from messages.requests import CancelRequest, Generation

WAIT_S = 20.0

Status = tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]
React = Callable[[str, Message], Sequence[Effect]]


def text(words: str) -> Stop:
    """A message that carries words."""
    return Stop(reason=words)


class Scripted:
    """A machine that does what a test's function says, and writes down what it was given."""

    def __init__(self, react: React = lambda sender, message: (), begin: Sequence[Effect] = ()) -> None:
        self.react = react
        self.begin = list(begin)
        self.changed = threading.Condition()
        self.seen: list[tuple[str, Message]] = []
        self.times_ns: list[int] = []

    def start(self, now_ns: int) -> list[Effect]:
        return self.begin

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        with self.changed:
            self.seen.append((sender, message))
            self.times_ns.append(now_ns)
            self.changed.notify_all()
        return list(self.react(sender, message))

    def status(self, now_ns: int) -> Status:
        return (("seen", len(self.seen)),), (("r1", 1, "decoding", "d0", 5),)

    def wait_for(self, count: int) -> list[tuple[str, Message]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.seen) >= count, WAIT_S), f"only {self.seen}"
            return list(self.seen)


class Work(Job, frozen=True, kw_only=True):
    """A job: emit ``emits``, then end with ``result``."""

    result: str
    emits: str = ""
    raises: bool = False


class Pool:
    """Carries out ``Work`` on a thread of its own per job, or inline."""

    def __init__(self, inline: bool = False) -> None:
        self.inline = inline
        self.threads: list[threading.Thread] = []
        self.closed = 0

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        assert isinstance(job, Work)
        if job.raises:
            raise RuntimeError("the executor itself is broken")

        def work() -> None:
            if job.emits:
                emit(job.emits, text("emitted"))
            done(text(job.result))

        if self.inline:
            work()
        else:
            self.threads.append(threading.Thread(target=work))
            self.threads[-1].start()

    def close(self) -> None:
        self.closed += 1
        for thread in self.threads:
            thread.join()


def node_config(run_dir: Path, node: str, *factories: str, incarnation: int = 1, **options: object) -> NodeConfig:
    """A node of a run that lives in ``run_dir``."""
    options.setdefault("log_level", "error")
    return NodeConfig(
        node=node,
        incarnation=incarnation,
        run_id=f"t{run_dir.name}",
        run_dir=str(run_dir),
        options=Options(**options),  # type: ignore[arg-type]
        factories=factories,
    )


def start_node(run_dir: Path, name: str, *specs: ActorSpec, **options: object) -> Node:
    """An in-process node with these actors."""
    node = Node(node_config(run_dir, name, **options), (lambda context: specs,))
    node.start()
    return node


# -- factories of node processes ---------------------------------------------------------------------------------------


def build_echo(context: NodeContext) -> tuple[ActorSpec, ...]:
    """An actor that answers, hangs, fails or crashes as it is told."""

    def react(sender: str, message: Message) -> Sequence[Effect]:
        match message:
            case Stop(reason="raise"):
                raise ValueError("told to")
            case Stop(reason="fail"):
                return [Fail("gave up")]
            case Stop(reason="fatal"):
                return [Fail("cannot work", fatal=True)]
            case Stop(reason="hang"):
                threading.Event().wait()
            case Stop(reason="exit"):
                os._exit(3)
            case Stop() | Generation() | CancelRequest():
                return [Send(sender, message)]
        return []

    context.ready_detail("echoing")
    return (ActorSpec("echo", Scripted(react)),)


def build_region(context: NodeContext) -> tuple[ActorSpec, ...]:
    """A node with a region of shared memory."""
    descriptor = context.data_plane.create_region(f"{context.config.node}.1.caches", 4096)
    specs = build_echo(context)
    context.ready_detail(descriptor.location)
    return specs


def build_refused(context: NodeContext) -> tuple[ActorSpec, ...]:
    """A configuration that cannot work."""
    raise ConfigError("block_size 3 is not a power of two (option block_size)")


def build_broken(context: NodeContext) -> tuple[ActorSpec, ...]:
    """A factory with a mistake."""
    raise KeyError("weights")
