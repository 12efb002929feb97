"""The edge between the tree and the person (or program) who started it.

An actor of the supervisor's node that only passes on: whoever started the tree waits here, with a bound, for what the
actors tell. It decides nothing, so its machine has no state that a replay could miss.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from actors.runtime.machine import Effect
from messages.base import Message
from messages.lifecycle import StatusReport

Listener = Callable[[Message], None]


class Console:
    """Machine of ``supervisor/console``. Hands every message to ``listener``, and status reports to who asked."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._reports: dict[str, queue.SimpleQueue[StatusReport]] = {}

    def start(self, now_ns: int) -> list[Effect]:
        """Nothing."""
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """Pass the message on. On the node's thread."""
        if isinstance(message, StatusReport):
            asked = self._reports.get(message.tag)
            if asked is not None:
                asked.put(message)
        else:
            self._listener(message)
        return []

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        """Nothing to report."""
        return (), ()

    def gather(self, tag: str, count: int, ask: Callable[[], None], timeout_s: float) -> list[StatusReport]:
        """Call ``ask`` and wait for ``count`` reports tagged ``tag``; fewer when ``timeout_s`` is over. Any thread."""
        asked = self._reports[tag] = queue.SimpleQueue()
        deadline = time.monotonic() + timeout_s
        reports: list[StatusReport] = []
        try:
            ask()
            while len(reports) < count:
                reports.append(asked.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            pass
        finally:
            del self._reports[tag]
        return reports
