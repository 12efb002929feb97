"""The supervisor's hands: starts node processes, sees them end, signals them, removes what they left.

One thread does all of it. It starts every process, because the kernel ties a child's parent-death signal to the thread
that made it; it alone reaps them, so that a signal can never reach a reused pid; and it reads what they write to
stderr, passes it on line by line and keeps the end of it as last words.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from actors.runtime.config import NodeConfig
from actors.runtime.context import Done, Emit
from actors.runtime.log import WriteLine, write_to_stderr
from actors.runtime.machine import Job
from actors.runtime.process import EXIT_CONFIG
from actors.supervisor.jobs import CleanUnit, SignalProcess, StartProcess
from actors.supervisor.run_dir import NODE_MODULE, RunDir
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


@dataclass
class _Process:
    """One child that has not been reaped yet."""

    config: NodeConfig
    child: subprocess.Popen[bytes]
    pidfd: int
    done: Done
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
                process: _Process | None = key.data
                if process is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                elif key.fd == process.pidfd:
                    self._reap(process)
                else:
                    self._read(process)
            while not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    self._end()
                    return
                self._carry_out(order)

    def _carry_out(self, order: _Order) -> None:
        match order.job:
            case StartProcess(config=config):
                self._start(config, order.emit, order.done)
            case SignalProcess() as job:
                process = self._processes.get(job.node)
                if process is not None and process.config.incarnation == job.incarnation:
                    process.child.send_signal(_SIGNALS[job.signal])
                order.done(ProcessSignalled(node=job.node, incarnation=job.incarnation))
            case CleanUnit() as job:
                order.done(UnitCleaned(unit=job.unit, removed=self._clean(job)))
            case _:
                raise TypeError(f"the supervisor has no job {type(order.job).__name__}")

    def _start(self, config: NodeConfig, emit: Emit, done: Done) -> None:
        path = self._run_dir.path / f"{config.node}.json"
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(config))
            child = subprocess.Popen(
                [sys.executable, "-m", NODE_MODULE, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=self._environment(config),
                start_new_session=True,  # a Ctrl-C at the terminal is the supervisor's to handle
            )
        except OSError as error:
            done(ProcessExited(node=config.node, incarnation=config.incarnation, last_words=str(error)))
            return
        assert child.stderr is not None
        os.set_blocking(child.stderr.fileno(), False)
        process = _Process(config, child, os.pidfd_open(child.pid), done)
        self._processes[config.node] = process
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self._selector.register(child.stderr.fileno(), selectors.EVENT_READ, process)
        emit(SUPERVISOR, ProcessStarted(node=config.node, incarnation=config.incarnation, pid=child.pid))

    @staticmethod
    def _environment(config: NodeConfig) -> dict[str, str]:
        """This process's own; threads and their spinning as configured; on ranks that hand caches over, what makes long
        copies fast."""
        copying = dict(COPY_ENVIRONMENT) if config.role in ("PREFILL", "DECODE") else {}
        return _SPIN_VARIABLES | copying | dict(os.environ) | dict.fromkeys(_THREAD_VARIABLES, str(config.threads))

    def _read(self, process: _Process) -> bool:
        """Pass on what is there; False at the end of the stream or when there is nothing."""
        assert process.child.stderr is not None
        try:
            data = os.read(process.child.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.child.stderr.fileno())
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
        """The process has ended: read its last words, and say so."""
        exit_code = process.child.wait()
        while self._read(process):
            pass
        self._pass_on(process, process.unfinished)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        assert process.child.stderr is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.child.stderr.fileno())
        process.child.stderr.close()
        config = process.config
        del self._processes[config.node]
        words = " | ".join(process.last_lines)[-LAST_WORDS_MAX:] if exit_code > 0 else ""
        process.done(
            ProcessExited(
                node=config.node,
                incarnation=config.incarnation,
                exit_code=exit_code,
                fatal=exit_code == EXIT_CONFIG,
                last_words=words,
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
            process.child.kill()
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
