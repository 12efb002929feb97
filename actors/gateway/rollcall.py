"""Finds requests that nobody holds any more, whatever message was lost: ask all instances, compare, conclude. Pure.

An instance that holds a request lists it in its ``StatusReport``; the prefill instance lists it from ``SubmitRequest``
to ``HandoffComplete``, the decode instance from its acceptance to its end, so at every moment at least one does. The
answers of one round come at different moments, but a request that passes between two instances meanwhile shows a sign
of life (its first token). So a request without a sign of life since the round began, in nobody's answer, is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from messages.lifecycle import StatusReport

PATIENCE_NS = 10_000_000_000
"""How long a round waits for a busy instance before everybody is asked again."""


class RollCall:
    """One round at a time; a new one replaces an unfinished one."""

    def __init__(self) -> None:
        self._round = 0
        self._missing: set[str] = set()
        self._claimed: dict[str, int] = {}
        self.started_ns = 0

    def is_open(self, now_ns: int) -> bool:
        """Whether answers are awaited, and have been for less than ``PATIENCE_NS``."""
        return bool(self._missing) and now_ns - self.started_ns < PATIENCE_NS

    def begin(self, now_ns: int, schedulers: Iterable[str]) -> str:
        """Start a round in which all of ``schedulers`` (addresses) are asked; gives the tag that the answers repeat."""
        self._round += 1
        self._missing = set(schedulers)
        self._claimed = {}
        self.started_ns = now_ns
        return f"rollcall {self._round}"

    def answer(self, report: StatusReport) -> bool:
        """Note one answer; true when it completes the round. Answers of other rounds and strangers change nothing."""
        if report.tag != f"rollcall {self._round}" or report.address not in self._missing:
            return False
        self._missing.discard(report.address)
        for request_id, epoch, *_ in report.requests:
            self._claimed[request_id] = max(epoch, self._claimed.get(request_id, -1))
        return not self._missing

    def keep(self, live: Iterable[str]) -> bool:
        """Only these schedulers still live, the others hold nothing; true when that completes the round."""
        if not self._missing:
            return False
        self._missing.intersection_update(live)
        return not self._missing

    def is_claimed(self, request_id: str, epoch: int) -> bool:
        """Whether someone listed the request under this epoch or a newer one."""
        return self._claimed.get(request_id, -1) >= epoch
