"""Control links: how envelopes travel between nodes. The interface, its limits, and what it reports.

A link is one-way: node A's link to B carries A's envelopes. Links are made by the first ``send`` and greet each other
once (protocol version, node names, incarnations). Envelopes of one link arrive once each, in order, or not at all: what
a broken link, a full outbox or a restarted peer swallowed is reported as ``on_peer_lost``, never silently resent.

Flow control: a receiver grants a peer ``window_envelopes``; ``consumed`` (an actor has handled them) grants more. So an
inbox never holds more than that from one peer, and a slow receiver fills its sender's outbox, which is bounded too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from messages.envelope import Envelope


@dataclass(frozen=True)
class LinkSettings:
    """Limits of a node's links."""

    window_envelopes: int = 2048  # a peer may have this many unhandled in our actors' inboxes
    outbox_envelopes_max: int = 32_768  # per peer
    outbox_bytes_max: int = 256 << 20  # per peer
    frame_envelopes_max: int = 256  # coalesced into one frame
    frame_bytes_max: int = 64 << 20  # a larger envelope is refused at its sender, a larger frame at its receiver
    handshake_timeout_ms: int = 15_000  # from the first envelope for a peer to its answer
    flush_timeout_ms: int = 1_000  # what close() waits for outboxes to empty


class Alone(bytes):
    """An encoded envelope that travels in a frame of its own (a damaged one must not take its neighbours along)."""


class LinkEvents(Protocol):
    """What links report. Called on the links' own thread; must not block and must not raise."""

    def on_envelopes(self, session: int, node: str, envelopes: Sequence[Envelope]) -> None:
        """``node`` sent these, in order. Each is given back to ``Links.consumed`` with ``session`` once handled."""
        ...

    def on_peer_lost(self, node: str, reason: str) -> None:
        """Envelopes sent to ``node`` may be lost: its link broke, was refused, or its outbox overflowed."""
        ...

    def on_peer_known(self, node: str, incarnation: int) -> None:
        """``node`` has greeted or answered as this incarnation, the newest seen."""
        ...

    def on_note(self, level: str, event: str, fields: Mapping[str, str | int | float]) -> None:
        """One line for people."""
        ...

    def on_links_failed(self, reason: str) -> None:
        """The links' thread died; nothing is sent or received any more."""
        ...


class Links(Protocol):
    """A node's links to all its peers. Every method but ``start`` may be called from any thread."""

    def start(self, events: LinkEvents) -> None:
        """Begin to receive. Raises ``OSError`` when the node's endpoint cannot be bound."""
        ...

    def send(self, node: str, parcels: Sequence[bytes]) -> None:
        """Queue envelopes, each encoded by ``messages.codec.encode``. Never blocks, never raises.

        After ``close`` they are counted and dropped.
        """
        ...

    def consumed(self, session: int, count: int) -> None:
        """``count`` envelopes that came in ``session`` are handled: their sender may send as many more."""
        ...

    def call(self, function: Callable[[], None]) -> None:
        """Have the links' thread call ``function`` soon, once, after what it was asked to call before.

        What ``function`` sends leaves at once, as no thread needs to be woken for it. It must not block and must not
        raise. When the links' thread has ended, the caller's thread does it (one at a time).
        """
        ...

    def require(self, instance: str, incarnation: int) -> None:
        """Incarnations of this instance's nodes below ``incarnation`` are dead: what is queued for them is dropped, and
        they are neither heard nor spoken to again."""
        ...

    def counters(self) -> dict[str, int]:
        """What happened so far: ``malformed``, ``refused``, ``overflowed``, ``dropped_closed``, ``frames_sent``, …"""
        ...

    def close(self) -> None:
        """Send what is queued (for a bounded time), then stop. Closing again changes nothing."""
        ...
