"""The supervisor's hands: starts node processes, sees them end, signals them, removes what they left.

One thread does all of it. It starts every process, because the kernel ties a child's parent-death signal to the thread
that made it; it signals them through pidfds, so that a signal can never reach a reused pid; and it reads what they
write to stderr, passes it on line by line and keeps the end of it as last words.

A node is started as a program of its own or, where it would load much, forked by a nursery that has loaded that. The
nursery starts with the first such node; one that dies takes its children along, and the next node brings another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from actors.runtime.config import NodeConfig
from actors.runtime.context import Done, Emit
from actors.runtime.log import WriteLine, write_to_stderr
from actors.runtime.machine import Job
from actors.runtime.nursery import NODE_MODULE
from actors.runtime.process import EXIT_CONFIG
from actors.supervisor.jobs import CleanUnit, SignalProcess, StartProcess
from actors.supervisor.nurseries import Nursery, NurseryLostError
from actors.supervisor.run_dir import RunDir
from messages.base import SUPERVISOR
from messages.lifecycle import ProcessExited, ProcessSignalled, ProcessStarted, UnitCleaned
from transport.dataplane import COPY_ENVIRONMENT
from transport.shm_dataplane import SHM_FOLDER, run_prefix, run_segments

LAST_LINES = 5
LAST_WORDS_MAX = 600
_SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SPIN_VARIABLES = {"GOMP_SPINCOUNT": "10000"}
"""Compute threads wait for each other spinning for some 0.2 ms instead of 6: longer than any gap within a step, and
short enough that a rank leaves its cores to the other processes of the host while it waits for its next command."""


_NURSERY_VARIABLES = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Importing torch loads no device's extension: a device is first touched after the fork, by ``device.py``."""


@dataclass(eq=False)
class _Process:
    """A node asked for whose end was not told yet. ``pidfd`` is -1 as long as its nursery has not forked it."""

    config: NodeConfig
    emit: Emit
    done: Done
    stderr: int  # we read what it writes
    origin: subprocess.Popen[bytes] | Nursery | None = None
    pid: int = 0
    pidfd: int = -1
    condemned: int = 0  # a signal it gets as soon as it is there
    unfinished: bytes = b""  # of the line being read
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


@dataclass(frozen=True)
class _Order:
    job: Job
    emit: Emit
    done: Done


class ProcessExecutor:
    """``JobExecutor`` of the supervisor. ``write_line`` gets every line that a node writes to stderr."""

    def __init__(self, run_dir: RunDir, write_line: WriteLine = write_to_stderr) -> None:
        self._run_dir = run_dir
        self._write_line = write_line
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._processes: dict[str, _Process] = {}
        self._nursery: Nursery | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._work, name="processes", daemon=True)
        self._thread.start()

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """See ``JobExecutor``. Any thread."""
        self._order(_Order(job, emit, done))

    def close(self) -> None:
        """Kill and reap whatever still runs, and end the thread. May be called again; not from its own thread."""
        self._order(None)
        self._thread.join()

    def _order(self, order: _Order | None) -> None:
        self._orders.put(order)
        with contextlib.suppress(OSError):  # full: it is awake anyway; closed: nobody listens
            os.write(self._wake_write, b"\0")

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is not key:
                    continue  # closed meanwhile; its number may be another's by now
                match key.data:
                    case None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    case Nursery():
                        self._hear(key.data)
                    case _Process(pidfd=key.fd):
                        self._reap(key.data)
                    case _:
                        self._read(key.data)
            while not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    self._end()
                    return
                self._carry_out(order)

    def _carry_out(self, order: _Order) -> None:
        match order.job:
            case StartProcess() as job:
                self._start(job, order.emit, order.done)
            case SignalProcess() as job:
                process = self._processes.get(job.node)
                if process is not None and process.config.incarnation == job.incarnation:
                    self._signal(process, _SIGNALS[job.signal])
                order.done(ProcessSignalled(node=job.node, incarnation=job.incarnation))
            case CleanUnit() as job:
                order.done(UnitCleaned(unit=job.unit, removed=self._clean(job)))
            case _:
                raise TypeError(f"the supervisor has no job {type(order.job).__name__}")

    def _start(self, job: StartProcess, emit: Emit, done: Done) -> None:
        config = job.config
        path = self._run_dir.path / f"{config.node}.json"
        stderr, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(stderr, False)
        process = _Process(config, emit, done, stderr)
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(config))
            if job.forked:
                process.origin = self._nursery_for(config)
                process.origin.fork(path, theirs, partial(self._begin, process), partial(self._forget, process, None))
            else:
                process.origin = subprocess.Popen(
                    [sys.executable, "-m", NODE_MODULE, str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=theirs,
                    env=self._environment(config),
                    start_new_session=True,  # a Ctrl-C at the terminal is the supervisor's to handle
                )
        except OSError as error:
            os.close(stderr)
            done(ProcessExited(node=config.node, incarnation=config.incarnation, last_words=str(error)))
            return
        finally:
            os.close(theirs)
        self._processes[config.node] = process
        self._selector.register(stderr, selectors.EVENT_READ, process)
        if isinstance(process.origin, subprocess.Popen):
            self._begin(process, process.origin.pid, os.pidfd_open(process.origin.pid))

    def _begin(self, process: _Process, pid: int, pidfd: int) -> None:
        """The process is there."""
        process.pid, process.pidfd = pid, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, process)
        config = process.config
        process.emit(SUPERVISOR, ProcessStarted(node=config.node, incarnation=config.incarnation, pid=pid))
        if process.condemned:
            self._signal(process, process.condemned)

    def _signal(self, process: _Process, number: int) -> None:
        if process.pidfd < 0:
            process.condemned = number
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended, and we are about to hear of it
            signal.pidfd_send_signal(process.pidfd, number)

    def _nursery_for(self, config: NodeConfig) -> Nursery:
        """Where this node comes from. The forked nodes of a tree are of one kind and have one environment."""
        if self._nursery is None:
            modules = [factory.partition(":")[0] for factory in config.factories]
            environment = self._environment(config) | _NURSERY_VARIABLES
            self._nursery = Nursery(self._run_dir.path, modules, environment)
            self._selector.register(self._nursery, selectors.EVENT_READ, self._nursery)
        return self._nursery

    def _hear(self, nursery: Nursery) -> None:
        try:
            nursery.receive()
        except NurseryLostError as error:
            self._lose(nursery, str(error))

    def _lose(self, nursery: Nursery, reason: str) -> None:
        """End the nursery with everything that came from it: what runs is reaped in turn, what waits never starts."""
        self._selector.unregister(nursery)
        nursery.close()
        self._nursery = None
        for process in [found for found in self._processes.values() if found.origin is nursery]:
            self._signal(process, signal.SIGKILL)
            if process.pidfd < 0:
                self._forget(process, exit_code=None, last_words=reason)

    @staticmethod
    def _environment(config: NodeConfig) -> dict[str, str]:
        """This process's own; threads and their spinning as configured; on ranks that hand caches over, what makes long
        copies fast."""
        copying = dict(COPY_ENVIRONMENT) if config.role in ("PREFILL", "DECODE") else {}
        return _SPIN_VARIABLES | copying | dict(os.environ) | dict.fromkeys(_THREAD_VARIABLES, str(config.threads))

    def _read(self, process: _Process) -> bool:
        """Pass on what is there; False at the end of the stream or when there is nothing."""
        try:
            data = os.read(process.stderr, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.stderr)
            return False
        *lines, process.unfinished = (process.unfinished + data).split(b"\n")
        for line in lines:
            self._pass_on(process, line)
        return True

    def _pass_on(self, process: _Process, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            process.last_lines.append(text)
            self._write_line(text)

    def _reap(self, process: _Process) -> None:
        """The process has ended, or is about to: read its last words, and say so."""
        if isinstance(process.origin, Nursery):
            select.select([process.pidfd], [], [])
            exit_code = process.origin.exit_code(process.pid)
        else:
            assert process.origin is not None
            exit_code = process.origin.wait()
        while self._read(process):
            pass
        self._pass_on(process, process.unfinished)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        words = " | ".join(process.last_lines)[-LAST_WORDS_MAX:] if exit_code > 0 else ""
        self._forget(process, exit_code, words)

    def _forget(self, process: _Process, exit_code: int | None, last_words: str) -> None:
        """Tell the end of a process of which nothing is left to reap."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.stderr)
        os.close(process.stderr)
        config = process.config
        del self._processes[config.node]
        process.done(
            ProcessExited(
                node=config.node,
                incarnation=config.incarnation,
                exit_code=exit_code,
                fatal=exit_code == EXIT_CONFIG,
                last_words=last_words,
            )
        )

    def _clean(self, job: CleanUnit) -> int:
        if job.unit == "":
            count = len(run_segments(self._run_dir.run_id))
            self._run_dir.remove()
            return count
        removed = [self._run_dir.path / f"{node}.sock" for node in job.nodes]
        prefix = f"{run_prefix(self._run_dir.run_id)}{job.unit}."
        removed += [SHM_FOLDER / name for name in run_segments(self._run_dir.run_id) if name.startswith(prefix)]
        return sum(_unlink(path) for path in removed)

    def _end(self) -> None:
        for process in self._processes.values():
            self._signal(process, signal.SIGKILL)
        if self._nursery is not None:
            self._lose(self._nursery, "stopped")
        for process in tuple(self._processes.values()):
            self._reap(process)
        self._selector.close()
        os.close(self._wake_read)
        wake_write, self._wake_write = self._wake_write, -1
        os.close(wake_write)


def _unlink(path: Path) -> int:
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return 1
