"""What a person sees while a tree starts: a progress bar per rank on a terminal, a line per finished step otherwise."""

from __future__ import annotations

import sys
import threading

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from actors.runtime.log import write_to_stderr
from messages.lifecycle import NodeProgress


class StartDisplay:
    """Shows progress until ``close``. ``write_line`` is where everybody else's lines must go meanwhile. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._tasks: dict[tuple[str, int, str], TaskID] = {}
        self._finished: set[tuple[str, int, str]] = set()
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()

    def write_line(self, line: str) -> None:
        """One line to stderr, above the bars if there are any."""
        with self._lock:
            if self._bars is None:
                write_to_stderr(line)
            else:
                self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, progress: NodeProgress) -> None:
        """A step of a node's start got further."""
        key = (progress.node, progress.incarnation, progress.what)
        description = f"{progress.node} {progress.what}"
        with self._lock:
            if self._bars is not None:
                task = self._tasks.get(key)
                if task is None:
                    task = self._tasks[key] = self._bars.add_task(description, total=progress.total)
                self._bars.update(task, completed=progress.done, total=progress.total)
            elif progress.done >= progress.total and key not in self._finished:
                self._finished.add(key)
                write_to_stderr(f"{description} {progress.done}/{progress.total}")

    def close(self) -> None:
        """Take the bars away; lines still work. May be called again."""
        with self._lock:
            bars, self._bars = self._bars, None
        if bars is not None:
            bars.stop()
