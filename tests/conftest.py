"""Every test leaves the machine as it found it: no thread, process, socket file or shared-memory segment of ours.

``make test`` has two processes run tests (pytest-xdist), one group of tests each at a time. All tests that make socket
files or shared memory are one group, so that whatever appears while one of them runs is its own. The others must make
none: one that does fails, and says where to name its folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

GRACE_S = 5.0
"""What a test's own clean-up may still take after the test has returned."""

FOREIGN_THREADS = ("pytest_timeout", "AnyIO worker", "asyncio_", "tqdm", "Thread-auto_conversion")
"""Threads of libraries that keep pools for later use, by the beginning of their names."""

SHM = Path("/dev/shm")
SEGMENTS = "kvferry-"
TEST_SEGMENTS = "kvferry-test-"
OWN_SEGMENTS = f"{TEST_SEGMENTS}{os.getpid()}-"
"""What tests call segments that they make themselves: it says which process of tests made them."""

RUN_FOLDERS = ("kvferry", "kvf-")

HOST_TEST_NAMES = (
    "e2e",
    "faults/test_readiness.py",
    "faults/test_real_processes.py",
    "supervisor",
    "docs",
    "transfer",
    "transport",
    "runtime",
    "gateway",
    "scripts",
    "worker/test_actor.py",
)
"""Folders and files of tests that make socket files or shared memory."""


HERE = Path(__file__).parent
LONGEST = ("sim", "worker", "faults")
"""Of the others, those with most to do begin."""


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


def makes_host_files(path: Path) -> bool:
    """Whether a test of this file may make socket files and shared memory."""
    hosts = {HERE / name for name in HOST_TEST_NAMES}
    return path in hosts or not hosts.isdisjoint(path.parents)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """One group of all tests with files on the host, one per file of the others. (Marks for ``--dist loadgroup`` would
    say the same, but pytest 9.2 hides them from xdist 3.8.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "host" if makes_host_files(HERE.parent / file) else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes those tests come first that take longest."""
    if hasattr(config, "workerinput"):
        places = {HERE / folder: place for place, folder in enumerate(LONGEST)}
        items.sort(key=lambda item: (not makes_host_files(item.path), places.get(item.path.parent, len(places))))


_watching = False  # while a test runs that must make no files on the host
_made: list[str] = []


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event in ("open", "os.mkdir") and isinstance(arguments[0], str | os.PathLike):
        path = Path(os.fspath(arguments[0]))
        is_segment = path.parent == SHM and path.name.startswith(SEGMENTS) and not path.name.startswith(OWN_SEGMENTS)
        if is_segment or (event == "os.mkdir" and path.name.startswith(RUN_FOLDERS)):
            _made.append(str(path))


sys.addaudithook(_watch)


def _segments(begin: str = SEGMENTS) -> set[Path]:
    """Segments by the beginning of their names, without those that other processes of tests say are theirs."""
    names = [entry.name for entry in os.scandir(SHM) if entry.name.startswith(begin)]
    return {SHM / name for name in names if name.startswith(OWN_SEGMENTS) or not name.startswith(TEST_SEGMENTS)}


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
    mine = psutil.Process()
    ancestors = mine.parents()
    top = ancestors[0] if "PYTEST_XDIST_WORKER" in os.environ else mine  # above all processes of these tests
    own = {mine.pid, *(process.pid for process in (*ancestors, *top.children(recursive=True)))}
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


def _left(threads: set[threading.Thread], children: set[int]) -> list[str]:
    """Threads and processes that are not among these and do not end within their grace."""
    left: list[str] = []
    for thread in _threads() - threads:
        thread.join(GRACE_S)
        if thread.is_alive():
            left.append(f"thread {thread.name}")
    started = [psutil.Process(pid) for pid in _children() - children if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(started, GRACE_S)
    return left + [f"process {process.pid} {' '.join(process.cmdline())}" for process in alive if process.is_running()]


def nothing_left() -> Iterator[None]:
    """The body of a fixture: fails whatever it surrounds if something is left that was not there before."""
    threads, children, segments, sockets = _threads(), _children(), _segments(), _sockets()
    yield
    left = _left(threads, children)
    left += [f"segment {path.name}" for path in _leftovers(_segments() - segments)]
    left += [f"socket {path}" for path in _leftovers(_sockets() - sockets)]
    assert not left, f"the test leaves behind: {'; '.join(left)}"


def nothing_made() -> Iterator[None]:
    """As ``nothing_left``, for tests that make no files on the host but segments under the name of this process: other
    tests may be making some right now."""
    global _watching
    threads, children = _threads(), _children()
    _made.clear()
    _watching = True
    yield
    _watching = False
    left = _left(threads, children)
    left += [f"segment {path.name}" for path in _segments(OWN_SEGMENTS)]
    assert not left, f"the test leaves behind: {'; '.join(left)}"
    assert not _made, f"the test made {_made}: name its folder in HOST_TEST_NAMES of {__file__}"


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """For each test. A folder whose tests share what grows while they run has one of its own, of wider scope."""
    yield from nothing_left() if makes_host_files(request.path) else nothing_made()
