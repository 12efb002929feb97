"""The timers of one node: one thread that sleeps until the next is due."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count

Callback = Callable[[], None]

COMPACT_AT = 256
"""From this many cancelled timers on, and more than half of all, they are removed before they are due."""


class Timer:
    """One running timer. ``callback`` is None once it fired or was cancelled."""

    __slots__ = ("callback", "due_ns", "number")

    def __init__(self, due_ns: int, number: int, callback: Callback) -> None:
        self.due_ns = due_ns
        self.number = number
        self.callback: Callback | None = callback

    def __lt__(self, other: Timer) -> bool:
        return (self.due_ns, self.number) < (other.due_ns, other.number)


class Timers:
    """Calls back on its own thread; callbacks must be short and must not raise. Any thread may start and cancel."""

    def __init__(self, name: str) -> None:
        self._condition = threading.Condition()
        self._heap: list[Timer] = []
        self._numbers = count()
        self._cancelled = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"timers-{name}", daemon=True)
        self._thread.start()

    def start(self, delay_ms: float, callback: Callback) -> Timer:
        """Call ``callback`` once, ``delay_ms`` from now. After ``close`` nothing is called any more."""
        due_ns = time.monotonic_ns() + max(0, int(delay_ms * 1e6))
        with self._condition:
            timer = Timer(due_ns, next(self._numbers), callback)
            heapq.heappush(self._heap, timer)
            if self._heap[0] is timer:
                self._condition.notify()
        return timer

    def cancel(self, timer: Timer) -> None:
        """Do not call it any more. One that is being called at this moment still is; its caller must tell."""
        with self._condition:
            if timer.callback is None:
                return
            timer.callback = None
            self._cancelled += 1
            if self._cancelled > COMPACT_AT and self._cancelled * 2 > len(self._heap):
                self._heap = [kept for kept in self._heap if kept.callback is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    @property
    def count(self) -> int:
        """Timers held, cancelled ones that were not removed yet included."""
        return len(self._heap)

    def close(self) -> None:
        """Forget all timers and end the thread (waiting for it, unless it is the caller)."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (due := self._next_due()) is not None:
            for callback in due:
                callback()

    def _next_due(self) -> list[Callback] | None:
        """Sleep until at least one timer is due; None when closed."""
        with self._condition:
            while not self._closed:
                now_ns = time.monotonic_ns()
                due: list[Callback] = []
                while self._heap and self._heap[0].due_ns <= now_ns:
                    timer = heapq.heappop(self._heap)
                    if timer.callback is None:
                        self._cancelled -= 1
                    else:
                        due.append(timer.callback)
                        timer.callback = None
                if due:
                    return due
                self._condition.wait((self._heap[0].due_ns - now_ns) / 1e9 if self._heap else None)
        return None
