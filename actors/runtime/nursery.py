"""Where rank processes come from: a process that has loaded what every rank needs, and forks one per request.

Loading torch takes seconds of CPU, most of a rank's start. Here it is paid once per cluster: ranks start from what is
loaded, share its memory, and one that restarts after a failure is back that much sooner.

    python -m actors.runtime.nursery RUN_DIR/nursery SOCKET PARENT_PID MODULE…

``SOCKET`` is an inherited descriptor of packets. In: the path of a ``NodeConfig``, with the descriptor that becomes the
node's stderr. Out, in the order asked: ``Born`` with a descriptor of the new process (``pidfd``), or ``NotBorn``; and
``Ended``. This process runs no thread of ours and reads no configuration, so a fork is like a fresh interpreter with
modules loaded. It ends when its socket does, or with the thread that started it; its children then end as those of any
parent do.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.runtime.config import NodeConfig
from actors.runtime.node import run
from actors.runtime.process import EXIT_FAILED, EXIT_OK, OrphanedError, end_with_parent

NODE_MODULE = "actors.runtime.node"
NURSERY_MODULE = "actors.runtime.nursery"
PACKET_BYTES_MAX = 4096


class Born(msgspec.Struct, frozen=True, tag=True):
    """The process asked for runs. The packet carries its pidfd."""

    pid: int


class NotBorn(msgspec.Struct, frozen=True, tag=True):
    """The process asked for could not be made; what runs already runs on."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """It was reaped; ``exit_code`` is negative for a signal, as in ``subprocess``."""

    pid: int
    exit_code: int


class Nursery:
    """The loop of the process. One thread; ``serve`` returns in the parent only."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._pids: dict[int, int] = {}  # pidfd → pid
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork and reap until the other end of the channel is closed."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._pids:
                    self._reap(key.fd)
                    continue
                request, descriptors, _, _ = socket.recv_fds(self._channel, PACKET_BYTES_MAX, 1)
                if not request:
                    return
                try:
                    pid, pidfd = self._fork(Path(os.fsdecode(request)), descriptors)
                except OSError as error:  # no room for another process, or another descriptor
                    self._channel.send(msgspec.json.encode(NotBorn(f"no process could be forked: {error}")))
                    continue
                self._pids[pidfd] = pid
                self._selector.register(pidfd, selectors.EVENT_READ)
                socket.send_fds(self._channel, [msgspec.json.encode(Born(pid))], [pidfd])

    def _fork(self, path: Path, descriptors: Sequence[int]) -> tuple[int, int]:
        """pid and pidfd of a new node process. Raises ``OSError`` when there is none."""
        if not descriptors:
            raise OSError("its stderr did not come with the request (too many open files?)")
        nursery_pid, (stderr, *_) = os.getpid(), descriptors
        try:
            pid = os.fork()
            if pid == 0:
                self._become(path, stderr, nursery_pid)
        finally:
            os.close(stderr)
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid, status = os.waitpid(self._pids.pop(pidfd), 0)
        self._channel.send(msgspec.json.encode(Ended(pid, os.waitstatus_to_exitcode(status))))

    def _become(self, path: Path, stderr: int, parent_pid: int) -> None:
        """In the child: a node like one that was started by itself. Never returns."""
        code = EXIT_FAILED
        try:
            os.setsid()  # a Ctrl-C at the terminal is the supervisor's to handle
            os.dup2(stderr, 2)
            os.close(stderr)
            self._selector.close()
            self._channel.close()
            for pidfd in self._pids:
                os.close(pidfd)
            show_command([sys.executable, "-m", NODE_MODULE, str(path)])
            config = msgspec.json.decode(path.read_bytes(), type=NodeConfig)
            code = run(msgspec.structs.replace(config, parent_pid=parent_pid))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def show_command(words: Sequence[str]) -> None:
    """Have ``ps`` (and whoever looks for the nodes of a run) see this command line, if it is not longer than ours."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end in proc(5)
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if start and len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    _, descriptor, parent_pid, *modules = arguments
    channel = socket.socket(fileno=int(descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        end_with_parent(int(parent_pid))
    except OrphanedError:
        return EXIT_OK
    for module in modules:
        with contextlib.suppress(Exception):  # a node that needs it says what is wrong, to those who wait for it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in the children leave the shared pages alone
    Nursery(channel).serve()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
