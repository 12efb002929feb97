"""One node: a process (``python -m actors.runtime.node CONFIG.json``) with a few actors, links and timers.

Life of a node: links are bound and may receive (what comes is held) → the factories build the actors → all actors begin
→ mail is delivered → ``NodeReady`` to the supervisor, then ``NodeHealth`` at every heartbeat → ``Stop``, SIGTERM, the
parent's death or an actor's death → actors stop, then what was registered with ``on_close`` (last first), the data
plane, timers and links. A node whose actor dies ends as a whole: its supervisor is told why and decides.

The same class serves in-process: the supervisor's own node, benchmarks and tests.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pykka

from actors.runtime.config import ConfigError, NodeConfig
from actors.runtime.context import ActorSpec, JobExecutor, NodeContext
from actors.runtime.faults import make_injector
from actors.runtime.hooks import NoInjector
from actors.runtime.log import Log, WriteLine, write_to_stderr
from actors.runtime.postoffice import PostOffice
from actors.runtime.process import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    OrphanedError,
    end_with_parent,
    exit_within,
    is_orphan,
    on_ring_request,
    on_termination,
    settle_down,
)
from actors.runtime.shell import Activity, Begin, MachineActor, mailbox
from actors.runtime.timers import Timers
from actors.runtime.trace import RINGS, make_recorder
from messages.base import SUPERVISOR, Message, node_of
from messages.envelope import Envelope
from messages.lifecycle import NodeFailed, NodeHealth, NodeReady, Stop
from transport.dataplane import DataPlane
from transport.keys import FILE_NAME, KeysError, RunKeys, read_keys
from transport.zmq_links import ZmqLinks

NODE_ACTOR = "node"
"""The address ``<node>/node`` takes ``Stop``."""

ACTOR_STOP_TIMEOUT_S = 5.0
IPC_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket on Linux."""


Factory = Callable[[NodeContext], Sequence[ActorSpec]]
"""Builds some of a node's actors."""


def endpoint_of(config: NodeConfig, node: str) -> str:
    """Where ``node`` listens, as this configuration says."""
    for name, endpoint in config.endpoints:
        if name == node:
            return endpoint
    return f"ipc://{config.run_dir}/{node}.sock"


def read_run_keys(config: NodeConfig) -> RunKeys | None:
    """The run's secrets, where this configuration needs them. Raises ``ConfigError``."""
    needed = config.options.data_plane == "tcp" or any(e.startswith("tcp://") for _, e in config.endpoints)
    if not needed:
        return None
    path = Path(config.options.keys_file or Path(config.run_dir) / FILE_NAME)
    try:
        return read_keys(path)
    except KeysError as error:
        raise ConfigError(f"tcp needs the run's keys: {error} (option keys_file)") from error


def _check(config: NodeConfig) -> None:
    endpoint = endpoint_of(config, config.node)
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and len(path.encode()) > IPC_PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path {path} has {len(path.encode())} bytes; at most {IPC_PATH_BYTES_MAX} are possible "
            "(option run_dir)"
        )
    if path != endpoint and not Path(path).parent.is_dir():
        raise ConfigError(f"run directory {Path(path).parent} does not exist (option run_dir)")


class Node:
    """One node of a cluster: ``NodeContext`` to its factories, ``Services`` to its shells.

    ``factories`` come besides those that the configuration names: an in-process node's actors may need more than can
    be written into a file. ``write_line`` takes the lines for people, instead of stderr.
    """

    def __init__(
        self, config: NodeConfig, factories: Sequence[Factory] = (), write_line: WriteLine = write_to_stderr
    ) -> None:
        """Raises ``ConfigError``. Nothing runs before ``start``."""
        _check(config)
        self.config = config
        self._factories = tuple(factories)
        self.log_writer = Log(config.node, config.options.log_level, write_line)
        self._keys = read_run_keys(config)
        self.recorder = make_recorder(config)
        self.injector = make_injector(config, self.recorder.fault)
        self.timers = Timers(config.node)
        self._links = ZmqLinks(
            config.node,
            config.incarnation,
            lambda node: endpoint_of(config, node),
            keys=self._keys,
            incarnations=config.incarnations,
        )
        self.office = PostOffice(
            config.node,
            config.incarnation,
            self._links,
            self.recorder,
            self.injector,
            self.timers,
            self.log_writer,
            lambda part, reason: self.actor_died(part, reason, False),
        )
        self._actors: list[tuple[str, pykka.ActorRef[MachineActor]]] = []
        self._executors: list[tuple[str, JobExecutor]] = []
        self._activities: dict[str, Activity] = {}
        self._starting: set[str] = set()
        self._lock = threading.Lock()
        self._data_plane: DataPlane | None = None
        self._on_close: list[Callable[[], None]] = []
        self._detail = ""
        self._ready = threading.Event()
        self._failed: NodeFailed | None = None
        self._stopping: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = psutil.Process()
        self.parent_pid = 0  # checked at every heartbeat when not 0

    # -- NodeContext -------------------------------------------------------------------------------------------------

    @property
    def data_plane(self) -> DataPlane:
        """See ``NodeContext``."""
        with self._lock:
            if self._data_plane is None:
                self._data_plane = self._make_data_plane()
            return self._data_plane

    def _make_data_plane(self) -> DataPlane:
        # Imported here: they load numpy, which a control node does not need.
        plane: DataPlane
        if self.config.options.data_plane == "tcp":
            from transport.tcp_dataplane import TcpDataPlane

            assert self._keys is not None
            endpoint = endpoint_of(self.config, self.config.node)
            host = endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else "127.0.0.1"
            plane = TcpDataPlane(host, bytes.fromhex(self._keys.data_secret))
        else:
            from transport.shm_dataplane import ShmDataPlane

            plane = ShmDataPlane(self.config.run_id)
        if isinstance(self.injector, NoInjector):
            return plane
        from actors.runtime.guarded_dataplane import GuardedDataPlane

        return GuardedDataPlane(plane, self.injector)

    def post(self, sender_actor: str, to: str, message: Message) -> None:
        """See ``NodeContext``."""
        self.office.post(f"{self.config.node}/{sender_actor}", to, message)

    def log(self, actor: str, level: str, event: str, **fields: str | int | float) -> None:
        """See ``NodeContext``."""
        self.log_writer.write(actor, level, event, fields)

    def on_close(self, function: Callable[[], None]) -> None:
        """See ``NodeContext``."""
        self._on_close.append(function)

    def ready_detail(self, text: str) -> None:
        """See ``NodeContext``."""
        self._detail = text

    # -- Services ------------------------------------------------------------------------------------------------------

    def actor_started(self, actor: str) -> None:
        """See ``Services``."""
        with self._lock:
            self._starting.discard(actor)
            if self._starting or self._ready.is_set():
                return
            self._ready.set()
        ready = NodeReady(
            node=self.config.node, incarnation=self.config.incarnation, pid=os.getpid(), detail=self._detail
        )
        self._tell_supervisor(ready)

    def actor_died(self, actor: str, reason: str, fatal: bool) -> None:
        """See ``Services``: the first death ends the node."""
        with self._lock:
            if self._failed is not None:
                return
            self._failed = NodeFailed(
                node=self.config.node,
                incarnation=self.config.incarnation,
                actor=actor,
                reason=reason,
                fatal=fatal,
            )
        self.log(actor, "error", "node_failed", reason=reason)
        self.dump_ring()
        self._tell_supervisor(self._failed)
        self.stop(f"{actor} failed")

    def dump_ring(self) -> None:
        """Write the newest envelopes into the run directory, for ``kvferry trace``. Any thread."""
        self._guarded("trace", lambda: self.recorder.dump(Path(self.config.run_dir) / RINGS))

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build and start everything. Raises what the factories raise, after ``close``."""
        try:
            self._links.start(self.office)
            self.office.register(NODE_ACTOR, self._accept)
            self._build()
        except Exception as error:
            if not isinstance(error, ConfigError):
                self.log(NODE_ACTOR, "error", "start_failed", trace=traceback.format_exc())
            self.actor_died(
                NODE_ACTOR, f"start refused: {type(error).__name__}: {error}", isinstance(error, ConfigError)
            )
            self.close()
            raise
        for _, actor in self._actors:
            actor.tell(Begin())
        self.office.open()
        self.timers.start(self.config.options.heartbeat_ms, self._beat)

    def _build(self) -> None:
        specs: list[ActorSpec] = []
        for factory in self.config.factories:
            module, _, function = factory.partition(":")
            specs.extend(getattr(importlib.import_module(module), function)(self))
        for build in self._factories:
            specs.extend(build(self))
        self._starting = {spec.name for spec in specs}
        if len(self._starting) != len(specs):
            raise ConfigError(f"{self.config.node}: two actors have one name: {[spec.name for spec in specs]}")
        for spec in specs:
            activity = self._activities[spec.name] = Activity()
            actor = MachineActor.start(spec, self, activity)
            self._actors.append((spec.name, actor))
            if spec.executor is not None:
                self._executors.append((spec.name, spec.executor))
            self.office.register(spec.name, mailbox(actor, self.office))

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether all actors have begun, waiting for it at most ``timeout_s`` seconds."""
        return self._ready.wait(timeout_s)

    def stop(self, reason: str) -> None:
        """Ask the node to end: ``wait`` returns. Any thread, signal handlers too."""
        self._stopping.put(reason)

    def wait(self) -> str:
        """Wait until somebody calls ``stop``; returns its reason."""
        return self._stopping.get()

    @property
    def exit_code(self) -> int:
        """What a process should exit with after ``wait``."""
        if self._failed is None:
            return EXIT_OK
        return EXIT_CONFIG if self._failed.fatal else EXIT_FAILED

    def close(self) -> None:
        """Stop actors and release everything, each in bounded time. Never raises."""
        for name, actor in reversed(self._actors):
            self._guarded(name, partial(actor.stop, timeout=ACTOR_STOP_TIMEOUT_S))
        self._actors.clear()
        for name, executor in reversed(self._executors):
            self._guarded(name, executor.close)
        self._executors.clear()
        while self._on_close:
            self._guarded(NODE_ACTOR, self._on_close.pop())
        with self._lock:
            plane, self._data_plane = self._data_plane, None
        if plane is not None:
            self._guarded("data_plane", plane.close)
        self._guarded("timers", self.timers.close)
        self._guarded("links", self._links.close)
        self._guarded("trace", self.recorder.close)

    def _guarded(self, part: str, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            self.log(part, "warning", "close_failed", error=f"{type(error).__name__}: {error}")

    # -- the node's own mail -------------------------------------------------------------------------------------

    def _accept(self, session: int, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            if isinstance(envelope.message, Stop):
                self.stop(envelope.message.reason)
        self.office.consumed(session, len(envelopes))

    def _tell_supervisor(self, message: Message) -> None:
        if self.config.node != node_of(SUPERVISOR):
            self.office.post(f"{self.config.node}/{NODE_ACTOR}", SUPERVISOR, message)

    def _beat(self) -> None:
        """One heartbeat, on the timers' thread."""
        if self.parent_pid and is_orphan(self.parent_pid):
            self.stop("the parent process is gone")
            return
        self.timers.start(self.config.options.heartbeat_ms, self._beat)
        now_ns = time.monotonic_ns()
        for name, activity in self._activities.items():
            busy_ms = (now_ns - activity.busy_since_ns) / 1e6 if activity.busy_since_ns else 0.0
            if busy_ms > self.config.options.heartbeat_ms:  # nothing leaves this node meanwhile, but this line does
                self.log(name, "warning", "stuck", message=activity.message, for_ms=round(busy_ms))
        with self._process.oneshot():
            health = NodeHealth(
                node=self.config.node,
                incarnation=self.config.incarnation,
                rss_bytes=self._process.memory_info().rss,
                cpu_percent=self._process.cpu_percent(),
                threads=self._process.num_threads(),
            )
        self._tell_supervisor(health)


def run(config: NodeConfig) -> int:
    """Run one node in this process until it ends; returns the exit code."""
    timeout_s = config.options.drain_timeout_ms / 1000 + 2 * ACTOR_STOP_TIMEOUT_S
    try:
        parent_pid = end_with_parent(config.parent_pid)
        node = Node(config)
    except (ConfigError, OrphanedError) as error:
        print(f"{config.node}: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_OK
    node.parent_pid = parent_pid
    on_termination(node.stop)
    on_ring_request(node.dump_ring)
    try:
        node.start()
    except Exception:  # reported and closed already
        exit_within(timeout_s, node.exit_code)
        return node.exit_code
    settle_down()
    node.log(NODE_ACTOR, "info", "stopping", reason=node.wait())
    exit_within(timeout_s, node.exit_code)
    node.close()
    return node.exit_code


def main(arguments: Sequence[str]) -> int:
    """Command line of a node process: one argument, the path of a ``NodeConfig`` as JSON."""
    if len(arguments) != 1:
        print("usage: python -m actors.runtime.node CONFIG.json", file=sys.stderr)
        return EXIT_CONFIG
    try:
        config = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=NodeConfig)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        print(f"{arguments[0]} is not a node configuration: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return run(config)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    # Everything is closed. Interpreter shutdown would only race native threads of torch and ZeroMQ that still wait for
    # the interpreter's lock (some processes then end with "terminate called"), and free what the kernel frees anyway.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
