"""The sending half of a link, without sockets: what waits for one peer, how much credit it has left, what it may send.

States: ``idle`` (no connection; the next envelope makes one) → ``greeting`` (connected, ``Hello`` sent, a deadline
runs) → ``open`` → ``idle`` again when the connection breaks, is reset or refused. Whatever waits when a link leaves
``greeting`` or ``open`` is dropped and reported: the peer that it was meant for may be gone. The exceptions are a
dead life of the peer that still answers, or a connection that breaks while greeting: the outbox greets again until
the deadline.

``queue`` is filled by any thread under ``lock``; everything else belongs to the links' thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal

from transport.links import Alone, LinkSettings

State = Literal["idle", "greeting", "open"]


class Outbox:
    """What waits for one peer."""

    __slots__ = (
        "_settings",
        "blocked_frame",
        "deadline_ns",
        "held",
        "known",
        "limit",
        "lock",
        "node",
        "overflowed",
        "pending",
        "queue",
        "queued_bytes",
        "retry_ns",
        "sent",
        "state",
    )

    def __init__(self, node: str, known: int, settings: LinkSettings) -> None:
        self.node = node
        self._settings = settings
        self.lock = threading.Lock()
        self.queue: deque[bytes] = deque()
        self.queued_bytes = 0
        self.pending = False  # the links' thread has been told to look at this outbox
        self.held = False  # nothing leaves before the links' thread has ended the link to a dead life
        self.overflowed = ""  # why what was queued is gone; reported by the links' thread
        self.state: State = "idle"
        self.known = known  # incarnation that queued envelopes are meant for; 0: whoever answers
        self.limit = 0
        self.sent = 0
        self.deadline_ns = 0
        self.retry_ns = 0  # when to greet again ; 0: not waiting
        self.blocked_frame: bytes | None = None  # handed to the carrier, which had no room

    def put(self, parcels: Sequence[bytes]) -> bool:
        """Queue encoded envelopes; True when the links' thread must be told to look. Any thread."""
        settings = self._settings
        with self.lock:
            queue = self.queue
            size = self.queued_bytes
            for parcel in parcels:
                size += len(parcel)
                if len(parcel) > settings.frame_bytes_max:
                    self._overflow(
                        f"an envelope of {len(parcel)} bytes; at most {settings.frame_bytes_max} are allowed"
                    )
                    break
                queue.append(parcel)
            else:
                self.queued_bytes = size
                if len(queue) > settings.outbox_envelopes_max or size > settings.outbox_bytes_max:
                    self._overflow(
                        f"{len(queue)} envelopes and {size} bytes wait; at most {settings.outbox_envelopes_max} and "
                        f"{settings.outbox_bytes_max} may"
                    )
            if self.pending:
                return False
            self.pending = True
            return True

    def _overflow(self, why: str) -> None:
        self.overflowed = why
        self.queue.clear()
        self.queued_bytes = 0

    def drop(self) -> int:
        """Forget what waits; returns how many envelopes."""
        with self.lock:
            count = len(self.queue)
            self.queue.clear()
            self.queued_bytes = 0
            self.blocked_frame = None
        return count

    def hold(self) -> None:
        """Forget what waits, and keep what comes from now on until ``release``. Any thread."""
        with self.lock:
            self.held = True
            self.queue.clear()
            self.queued_bytes = 0

    def release(self) -> None:
        """What waits may leave."""
        with self.lock:
            self.held = False

    def opened(self, incarnation: int, limit: int) -> None:
        """The peer has answered: it may be sent ``limit`` envelopes."""
        self.state, self.known, self.limit, self.sent = "open", incarnation, limit, 0
        self.deadline_ns = self.retry_ns = 0

    def closed(self) -> None:
        """There is no connection any more."""
        self.state, self.known, self.limit, self.sent = "idle", 0, 0, 0
        self.deadline_ns = self.retry_ns = 0
        self.blocked_frame = None

    def take(self) -> list[bytes]:
        """Envelopes for the next frame, as far as credit and frame limits allow. Empty: nothing may be sent now."""
        settings = self._settings
        with self.lock:
            queue = self.queue
            if self.held:
                return []
            if len(queue) == 1 and self.limit > self.sent:  # the common case of a quiet link
                self.queued_bytes = 0
                self.sent += 1
                return [queue.popleft()]
            count = min(len(queue), self.limit - self.sent, settings.frame_envelopes_max)
            taken: list[bytes] = []
            size = 0
            while count > 0:
                parcel = queue[0]
                alone = type(parcel) is Alone
                if taken and (alone or size + len(parcel) > settings.frame_bytes_max // 2):
                    break
                taken.append(queue.popleft())
                size += len(parcel)
                count -= 1
                if alone:
                    break
            self.queued_bytes -= size
        self.sent += len(taken)
        return taken
