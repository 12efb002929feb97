"""Every test leaves the machine as it found it: no thread, process, socket file or shared-memory segment of ours."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

GRACE_S = 5.0
"""What a test's own clean-up may still take after the test has returned."""

FOREIGN_THREADS = ("pytest_timeout", "AnyIO worker", "asyncio_", "tqdm", "Thread-auto_conversion")
"""Threads of libraries that keep pools for later use, by the beginning of their names."""

SHM = Path("/dev/shm")
RUN_FOLDERS = ("kvferry", "kvf-")


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(FOREIGN_THREADS)}


def _children() -> set[int]:
    """Process ids of this process's children, without a walk through all processes."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:
            continue  # a thread that has just ended
    return pids


def _segments() -> set[Path]:
    return {SHM / entry.name for entry in os.scandir(SHM) if entry.name.startswith("kvferry-")}


def _sockets() -> set[Path]:
    found: set[Path] = set()
    for folder in os.scandir(tempfile.gettempdir()):
        if folder.name.startswith(RUN_FOLDERS):
            try:
                found.update(Path(entry.path) for entry in os.scandir(folder.path) if entry.name.endswith(".sock"))
            except OSError:
                continue  # gone, or not a folder
    return found


def _other_runs() -> bool:
    """Whether somebody else runs kvferry or its tests on this host right now: new files may then be theirs."""
    own = {os.getpid(), os.getppid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in own:
            continue
        try:
            command = (process / "cmdline").read_text()
        except OSError:
            continue
        if any(word in command for word in ("kvferry", "actors.runtime.", "pytest", "scripts.")):
            return True
    return False


def _leftovers(paths: set[Path]) -> list[Path]:
    """Those of the files that appeared during a test that stay."""
    if not paths or _other_runs():
        return []
    return sorted(path for path in paths if path.exists())


def nothing_left() -> Iterator[None]:
    """The body of a fixture: fails whatever it surrounds if something is left that was not there before."""
    threads, children, segments, sockets = _threads(), _children(), _segments(), _sockets()
    yield
    left: list[str] = []
    for thread in _threads() - threads:
        thread.join(GRACE_S)
        if thread.is_alive():
            left.append(f"thread {thread.name}")
    started = [psutil.Process(pid) for pid in _children() - children if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(started, GRACE_S)
    left += [f"process {process.pid} {' '.join(process.cmdline())}" for process in alive if process.is_running()]
    left += [f"segment {path.name}" for path in _leftovers(_segments() - segments)]
    left += [f"socket {path}" for path in _leftovers(_sockets() - sockets)]
    assert not left, f"the test leaves behind: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """For each test. A folder whose tests share what grows while they run has one of its own, of wider scope."""
    yield from nothing_left()
