"""The supervisor's end of the process that forks ranks (``actors/runtime/nursery.py``)."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from actors.runtime.nursery import NURSERY_MODULE, PACKET_BYTES_MAX, Born, Ended, NotBorn

TELL_S = 5.0
"""How long a nursery may take to tell the exit code of a process that the kernel says has ended."""

OnBorn = Callable[[int, int], None]
"""Called with the pid and the pidfd of a new process; the pidfd is the callee's to close."""

OnFailed = Callable[[str], None]
"""Called with the reason when there is no new process."""


class NurseryLostError(OSError):
    """The nursery has ended; so do its children."""


class Nursery:
    """One nursery process. All calls on one thread, which must live as long as the nursery shall."""

    def __init__(self, run_dir: Path, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it; it answers once ``modules`` are loaded. Raises ``OSError``."""
        self._asked: deque[tuple[OnBorn, OnFailed]] = deque()
        self._exit_codes: dict[int, int] = {}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", NURSERY_MODULE, str(run_dir / "nursery")]
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Readable when ``receive`` has something to do."""
        return self._channel.fileno()

    def fork(self, config: Path, stderr: int, on_born: OnBorn, on_failed: OnFailed) -> None:
        """Ask for the node of this file; ``receive`` will call one of the two. Raises ``OSError``."""
        socket.send_fds(self._channel, [os.fsencode(config)], [stderr])
        self._asked.append((on_born, on_failed))

    def receive(self, timeout_s: float = 0.0) -> bool:
        """Act on one answer; False if none has come after ``timeout_s`` seconds. Raises ``NurseryLostError``."""
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return False
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._channel, PACKET_BYTES_MAX, 1)
        except OSError as error:
            raise NurseryLostError(str(error)) from error
        if not packet:
            raise NurseryLostError("the process that forks ranks has ended")
        match msgspec.json.decode(packet, type=Born | NotBorn | Ended):
            case Born(pid=pid):
                if not descriptors:
                    raise NurseryLostError("a new process came without its descriptor (too many open files?)")
                self._asked.popleft()[0](pid, descriptors[0])
            case NotBorn(reason=reason):
                self._asked.popleft()[1](reason)
            case Ended(pid=pid, exit_code=exit_code):
                self._exit_codes[pid] = exit_code
        return True

    def exit_code(self, pid: int) -> int:
        """Of a child that has ended. A nursery that cannot tell was killed or stopped: so was the child, we say."""
        try:
            while pid not in self._exit_codes and self.receive(TELL_S):
                pass
        except (OSError, ValueError):  # it is gone; the descriptor of a closed channel is no value for select
            pass
        return self._exit_codes.pop(pid, -signal.SIGKILL)

    def close(self) -> None:
        """End it, and with it whatever it may still have. May be called again."""
        self._child.kill()
        self._child.wait()
        self._channel.close()
