"""Asking actors how they are, from a process that takes part in a cluster's run."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from actors.runtime.config import ConfigError, NodeConfig
from actors.runtime.context import ActorSpec
from actors.runtime.node import Node
from actors.supervisor.console import Console
from actors.supervisor.run_dir import OWNER_FILE, PREFIX, is_alive
from actors.supervisor.units import FRONT
from messages.base import SUPERVISOR, Message
from messages.lifecycle import StatusReport, StatusRequest, Stop

STATUS_TIMEOUT_S = 5.0
STOP_MARGIN_S = 15.0
VISITORS_MAX = 8
CONSOLE_ACTOR = "console"
RANK_ACTORS = ("worker", "transfer", "staging")


class NoAnswerError(RuntimeError):
    """An actor did not answer in time."""


class Observer:
    """Sends ``StatusRequest`` from the console of ``node`` and waits for the answers, with a bound."""

    def __init__(self, node: Node, console: Console) -> None:
        self._node = node
        self._console = console
        self._address = f"{node.config.node}/{CONSOLE_ACTOR}"

    def tell(self, to: str, message: Message) -> None:
        """Send a message from the console."""
        self._node.post(CONSOLE_ACTOR, to, message)

    def reports(self, addresses: Sequence[str], timeout_s: float = STATUS_TIMEOUT_S) -> list[StatusReport]:
        """Status of several actors; those that do not answer in time are missing."""
        tag = secrets.token_hex(4)

        def ask() -> None:
            for address in addresses:
                self.tell(address, StatusRequest(reply_to=self._address, tag=tag))

        return self._console.gather(tag, len(addresses), ask, timeout_s)

    def report(self, address: str, timeout_s: float = STATUS_TIMEOUT_S) -> StatusReport:
        """One actor's own status. Raises ``NoAnswerError``."""
        reports = self.reports([address], timeout_s)
        if not reports:
            raise NoAnswerError(f"{address} did not answer within {timeout_s:g} s")
        return reports[0]

    def status(self) -> dict[str, Any]:
        """The tree as the supervisor sees it: ``phase``, ``url``, …, ``units`` by name and ``nodes`` by name."""
        status: dict[str, Any] = {"units": {}, "nodes": {}}
        for key, value in self.report(SUPERVISOR).values:
            kind, _, rest = key.partition(".")
            if kind in ("unit", "node") and rest:
                name, _, figure = rest.rpartition(".")
                status[kind + "s"].setdefault(name, {})[figure] = value
            else:
                status[key] = value
        return status


def actors_of(status: dict[str, Any]) -> list[str]:
    """Addresses of every actor of the tree that ``Observer.status`` described, by the roles' own names."""
    addresses = []
    for node in status["nodes"]:
        kind = node.rpartition(".")[2]
        names = {FRONT: ("gateway", "registry"), "ctl": ("scheduler", "engine")}.get(kind, RANK_ACTORS)
        addresses += [f"{node}/{name}" for name in names]
    return addresses


class Visitor:
    """Takes part in a running cluster of this host for a moment: a context manager that gives an ``Observer``.

    Visitors use a few fixed node names, one process each, so that a cluster that is asked ten thousand times does not
    get to know ten thousand nodes.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known = msgspec.json.decode((run_dir / f"{FRONT}.json").read_bytes(), type=NodeConfig)
        self.options = self._known.options
        self._lock = -1
        self._node: Node | None = None

    def __enter__(self) -> Observer:
        known = self._known
        options = msgspec.structs.replace(known.options, trace_dir="", faults="", log_level="error")
        config = NodeConfig(
            node=self._take_name(),
            incarnation=time.time_ns() // 1_000_000,  # larger than that of any earlier visitor of this name
            run_id=known.run_id,
            run_dir=known.run_dir,
            options=options,
            factories=(),
        )
        console = Console(lambda message: None)
        self._node = Node(config, (lambda context: (ActorSpec(CONSOLE_ACTOR, console),),))
        try:
            self._node.start()
        except BaseException:
            self._leave()
            raise
        return Observer(self._node, console)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _take_name(self) -> str:
        for number in range(VISITORS_MAX):
            self._lock = os.open(self._run_dir / f"visitor{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return f"visitor{number}"
            except BlockingIOError:
                os.close(self._lock)
        raise ConfigError(f"{VISITORS_MAX} other processes are looking at {self._run_dir}; try again later")

    def _leave(self) -> None:
        if self._node is not None:
            self._node.close()
        os.close(self._lock)


def find_run_dir(configured: str = "") -> Path:
    """The run directory of the one cluster that runs here, or of ``configured``. Raises ``ConfigError``."""
    if configured:
        path = Path(configured).expanduser().absolute()
        if not is_alive(path):
            raise ConfigError(f"no kvferry runs in {path} (--run-dir)")
        return path
    alive = [path for path in sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*")) if is_alive(path)]
    if not alive:
        raise ConfigError(
            "no kvferry cluster runs here; start one with kvferry serve, or name the --run-dir it was started with"
        )
    if len(alive) > 1:
        names = ", ".join(str(path) for path in alive)
        raise ConfigError(f"several kvferry clusters run on this host; name one with --run-dir: {names}")
    return alive[0]


def request_stop(run_dir: Path, timeout_s: float = 0.0) -> bool:
    """Ask a running cluster to drain and stop; whether it ended in time (0: its drain deadline and a margin)."""
    visitor = Visitor(run_dir)
    timeout_s = timeout_s or visitor.options.drain_timeout_ms / 1000 + STOP_MARGIN_S
    with visitor as observer:
        observer.tell(SUPERVISOR, Stop(reason="kvferry stop"))
        observer.reports([SUPERVISOR], 1.0)  # it has read the Stop before it answers this
    return wait_ended(run_dir, timeout_s)


def wait_ended(run_dir: Path, timeout_s: float) -> bool:
    """Wait until the supervisor of ``run_dir`` has ended, that is, until nobody holds its lock."""
    deadline = time.monotonic() + timeout_s
    while is_alive(run_dir):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return not (run_dir / OWNER_FILE).exists()
