"""A whole cluster as one Python object: what the commands, the benchmarks and the fault tests use.

    with Cluster(Options(topology="P2/D1", port=0)) as cluster:
        requests.post(f"{cluster.url}/v1/completions", json=…)

The supervisor's node runs in this process; everything else is a process of its own. Nothing is started before the
options have been checked against the checkpoint.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from actors.runtime.config import CommandFailed, ConfigError, NodeConfig, Options
from actors.runtime.node import Node
from actors.runtime.option_ranges import check_ranges
from actors.supervisor.actor import make_build
from actors.supervisor.console import Console
from actors.supervisor.machine import CONSOLE
from actors.supervisor.run_dir import RunDir, clean_dead_runs, make_run_dir
from actors.supervisor.topology import CheckTp, Topology, parse_topology
from actors.supervisor.units import FACTORIES, Kind, TreePlan
from actors.worker.model.config import check_tp, load_config
from messages.base import SUPERVISOR, Message, actor_of, node_of
from messages.lifecycle import NodeProgress, Stop, TreeEnded, TreeReady
from scripts.models import resolve_model
from scripts.observe import Observer
from scripts.start_display import StartDisplay
from transport.keys import FILE_NAME, make_keys, write_keys

_CLOSED = "closed"


class ClusterError(CommandFailed):
    """The cluster ended, or never came up; its text is the supervisor's reason."""


class Event(NamedTuple):
    """Something that whoever waits on the cluster must see: ``kind`` is "ready", "ended" or "signal"."""

    kind: str
    text: str
    failed: bool = False


def check_options(options: Options) -> tuple[Options, Topology]:
    """Options with the model's directory and served name filled in, and the topology. Raises ``ConfigError``."""
    check_ranges(options)
    _check_trace_dir(options)
    folder = resolve_model(options.model)
    config = load_config(folder)
    topology = parse_topology(options.topology, partial(check_tp, config))
    _check_speculation(options, topology)
    name = options.served_model_name or Path(options.model).name
    return msgspec.structs.replace(options, model=str(folder), served_model_name=name), topology


def _check_speculation(options: Options, topology: Topology) -> None:
    """Draft depths that no link could serve are refused before anything starts."""
    depths = {plan.role: options.speculative_tokens_of(plan.role) for plan in topology.instances}
    if depths.get("DECODE") and depths.get("PREFILL") == 0:
        raise ConfigError(
            f"prefill_num_speculative_tokens 0 with num_speculative_tokens {options.num_speculative_tokens}: decode "
            "instances draft from a cache that prefill instances must fill; set prefill_num_speculative_tokens to at "
            "least 1 (-1: the same depth), or num_speculative_tokens to 0"
        )


def _check_trace_dir(options: Options) -> None:
    """A trace is of one run: two in one directory would be read as one."""
    if options.trace_dir and any(Path(options.trace_dir).glob("*.trace")):
        raise ConfigError(
            f"--trace-dir {options.trace_dir} holds another run's trace; name another directory, or remove its files"
        )


def available_cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


class Cluster:
    """See the module. ``factories`` replaces what the nodes are made of and skips the model (tests of the tree)."""

    def __init__(
        self,
        options: Options,
        *,
        factories: dict[Kind, tuple[str, ...]] | None = None,
        display: StartDisplay | None = None,
    ) -> None:
        if factories is None:
            self.options, self.topology = check_options(options)
        else:
            anything: CheckTp = lambda tp_size: None  # noqa: E731
            self.options, self.topology = options, parse_topology(options.topology, anything)
        self._factories = factories or FACTORIES
        self._display = display
        self._console = Console(self._on_message)
        self._node: Node | None = None
        self.run_dir: RunDir | None = None
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._url = ""
        self._ended: Event | None = None

    @property
    def url(self) -> str:
        """Where the front listens; empty before the cluster is ready."""
        return self._url

    # -- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def begin(self) -> None:
        """Start the supervisor and return at once; ``events`` tells the rest."""
        for path in clean_dead_runs():
            self._write_line(f"cleaned up after a dead run: {path}")
        run_dir = self.run_dir = make_run_dir(self.options.run_dir)
        try:
            if self.options.data_plane == "tcp" and not self.options.keys_file:
                write_keys(run_dir.path / FILE_NAME, make_keys())
            plan = TreePlan(
                run_id=run_dir.run_id,
                run_dir=str(run_dir.path),
                options=self.options,
                topology=self.topology,
                cpu_count=available_cpu_count(),
                factories=self._factories,
            )
            config = NodeConfig(
                node=node_of(SUPERVISOR),
                incarnation=1,
                run_id=run_dir.run_id,
                run_dir=str(run_dir.path),
                options=self.options,
                factories=(),
            )
            build = make_build(plan, run_dir, self._console, self._write_line)
            node = self._node = Node(config, (build,), self._write_line)
            node.start()
            threading.Thread(target=self._watch, args=(node,), name="cluster", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def start(self) -> str:
        """Start everything and wait until it serves; returns the URL. Raises ``ClusterError`` with the reason."""
        self.begin()
        try:
            event = self.events.get()
        except BaseException:
            self.close()
            raise
        if event.kind != "ready":
            self.close()
            raise ClusterError(event.text)
        return self._url

    def request_stop(self, reason: str) -> None:
        """Begin to drain and stop; asked a second time, stop without draining. Any thread; returns at once."""
        if self._node is not None:
            self._node.post(actor_of(CONSOLE), SUPERVISOR, Stop(reason=reason))

    def stop(self, reason: str = "asked to stop") -> None:
        """Drain, stop every process, leave nothing behind. Raises nothing; may be called again."""
        try:
            if self._node is not None and self._ended is None:
                self.request_stop(reason)
                while self.events.get().kind != "ended":
                    pass
        finally:
            self.close()

    def close(self) -> None:
        """Release the supervisor's node, killing what still runs. ``stop`` is the polite way."""
        node, self._node = self._node, None
        if node is not None:
            node.stop(_CLOSED)
            node.close()
        if self.run_dir is not None:
            self.run_dir.remove()
        if self._display is not None:
            self._display.close()

    # -- looking and breaking ----------------------------------------------------------------------------------------

    @property
    def observer(self) -> Observer:
        """Asks actors how they are. Raises ``ClusterError`` while nothing runs."""
        if self._node is None:
            raise ClusterError("the cluster is not running")
        return Observer(self._node, self._console)

    def status(self) -> dict[str, Any]:
        """See ``Observer.status``."""
        return self.observer.status()

    def pid(self, node: str) -> int:
        """Process id of a node's current life."""
        return int(self.status()["nodes"][node]["pid"])

    def kill(self, node: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a node, for fault tests; returns the pid."""
        pid = self.pid(node)
        os.kill(pid, number)
        return pid

    def wait_for(self, unit: str, incarnation: int, timeout_s: float) -> dict[str, Any]:
        """Wait until ``unit`` runs under at least that incarnation; returns its status. Raises ``ClusterError``."""
        deadline = time.monotonic() + timeout_s
        pause: queue.SimpleQueue[None] = queue.SimpleQueue()
        while True:
            found: dict[str, Any] = self.status()["units"][unit]
            if found["state"] == "running" and found["incarnation"] >= incarnation:
                return found
            if time.monotonic() > deadline:
                raise ClusterError(f"{unit} is not running under incarnation {incarnation}: {found}")
            try:
                pause.get(timeout=0.05)
            except queue.Empty:
                continue

    def _watch(self, node: Node) -> None:
        """The supervisor's own actors must not fail; should one, nobody waits for an end that never comes."""
        reason = node.wait()
        if reason != _CLOSED:
            self._ended = Event("ended", f"the supervisor failed: {reason}", True)
            self.events.put(self._ended)

    # -- from the console's thread -----------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        match message:
            case NodeProgress() if self._display is not None:
                self._display.show(message)
            case TreeReady(url=url):
                self._url = url
                self.events.put(Event("ready", url))
            case TreeEnded(reason=reason, failed=failed):
                self._ended = Event("ended", reason, failed)
                self.events.put(self._ended)

    def _write_line(self, line: str) -> None:
        if self._display is not None:
            self._display.write_line(line)
        else:
            os.write(2, (line + "\n").encode(errors="replace"))
