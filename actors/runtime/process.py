"""What a node process owes to the process that started it: to end with it, to end when told, and never to linger."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable

EXIT_OK = 0
EXIT_FAILED = 70  # sysexits.h EX_SOFTWARE: an actor died, or something outside this node's configuration was missing
EXIT_CONFIG = 78  # sysexits.h EX_CONFIG: starting again cannot help

RING_SIGNAL = signal.SIGUSR2
"""Asks a node process to write its ring of envelopes into its run directory."""

_PR_SET_PDEATHSIG = 1


class OrphanedError(RuntimeError):
    """The parent was gone before this process could ask to be told."""


def end_with_parent(parent_pid: int) -> int:
    """Have the kernel send SIGTERM when the parent ends; returns the parent's process id, to check for as well.

    ``parent_pid`` 0 means whoever started this process. The kernel's signal follows the *thread* that started this
    process, so a supervisor must start its nodes from a thread that lives as long as it does. Raises ``OrphanedError``.
    """
    expected = parent_pid or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != expected:
        raise OrphanedError(f"parent process {expected} is gone")
    return expected


def is_orphan(parent_pid: int) -> bool:
    """Whether the parent has ended."""
    return os.getppid() != parent_pid


def on_termination(function: Callable[[str], None]) -> None:
    """Call ``function`` on SIGTERM. SIGINT is left to the supervisor: a terminal sends it to all nodes at once."""
    signal.signal(signal.SIGTERM, lambda number, frame: function("SIGTERM"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def on_ring_request(function: Callable[[], None]) -> None:
    """Call ``function`` on ``RING_SIGNAL``: somebody wants to see the newest messages of this process."""
    signal.signal(RING_SIGNAL, lambda number, frame: function())


def settle_down() -> None:
    """Tune the interpreter for a process that has loaded everything and from now on mostly passes messages.

    What lives by now lives for good: the collector need not look at it again. And a thread that waits for the
    interpreter (the links' thread, with a peer waiting behind it) gets it after a millisecond instead of five.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    sys.setswitchinterval(0.001)


def exit_within(timeout_s: float, code: int) -> None:
    """End the process with ``code`` after ``timeout_s`` seconds if it is still there, whatever hangs."""
    timer = threading.Timer(timeout_s, os._exit, (code,))
    timer.daemon = True
    timer.start()
