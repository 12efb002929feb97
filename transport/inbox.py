"""The receiving half of links, without sockets: who may speak (sessions), and how much (credit).

A connection becomes a session by a ``Hello`` of the right protocol version, from a node's newest incarnation, meant for
this node. Data outside a session is dropped and answered with ``Reset``: so nothing that was
queued for an earlier life of this node, or comes from a dead life of a peer, is ever delivered.
"""

from __future__ import annotations

import threading

from messages.base import PROTOCOL_VERSION, instance_of
from transport.frames import Hello, Refused, Welcome
from transport.links import LinkSettings


class Session:
    """One peer's connection that has greeted. ``consumed`` is counted by any thread under ``lock``."""

    __slots__ = ("announced", "consumed", "incarnation", "lock", "node", "number", "peer", "received", "window")

    def __init__(self, number: int, peer: bytes, node: str, incarnation: int, window: int) -> None:
        self.number = number
        self.peer = peer
        self.node = node
        self.incarnation = incarnation
        self.window = window
        self.lock = threading.Lock()
        self.received = 0
        self.consumed = 0
        self.announced = 0

    def consume(self, count: int) -> bool:
        """Count handled envelopes; True when the peer should now be told its new limit. Any thread."""
        with self.lock:
            self.consumed += count
            if self.consumed - self.announced < max(1, self.window // 4):
                return False
            self.announced = self.consumed
            return True

    @property
    def limit(self) -> int:
        """How many envelopes the peer may send in all."""
        return self.announced + self.window


class Sessions:
    """Everybody who may speak to this node. Belongs to the links' thread, but for ``find``."""

    def __init__(self, node: str, incarnation: int, settings: LinkSettings) -> None:
        self.node = node
        self.incarnation = incarnation
        self._settings = settings
        self._by_peer: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._newest: dict[str, int] = {}  # node → incarnation
        self._required: dict[str, int] = {}  # instance → smallest living incarnation
        self._count = 0

    def greet(self, peer: bytes, hello: Hello) -> Welcome | Refused:
        """Judge a greeting; a welcomed one is a session from now on, and older ones of that node end."""
        refusal = self._refusal(hello)
        if refusal is not None:
            return refusal
        for old in [session for session in self._by_peer.values() if session.node == hello.node]:
            self._end(old)
        self._count += 1
        window = self._settings.window_envelopes
        session = Session(self._count, peer, hello.node, hello.incarnation, window)
        self._by_peer[peer] = self._by_number[session.number] = session
        return Welcome(
            protocol_version=PROTOCOL_VERSION, node=self.node, incarnation=self.incarnation, limit=session.limit
        )

    def _refusal(self, hello: Hello) -> Refused | None:
        if hello.protocol_version != PROTOCOL_VERSION:
            return Refused(
                reason=f"{hello.node} speaks protocol version {hello.protocol_version}, {self.node} speaks "
                f"{PROTOCOL_VERSION}: run the same kvferry on all hosts"
            )
        if hello.target_node != self.node:
            return Refused(reason=f"{hello.node} looks for {hello.target_node}, this is {self.node}: check endpoints")
        least = self.least(hello.node)
        if hello.incarnation < least:
            return Refused(reason=f"{hello.node} incarnation {hello.incarnation} is dead; {least} is expected")
        return None

    def least(self, node: str) -> int:
        """The smallest incarnation of ``node`` that is still spoken to."""
        return max(self._newest.get(node, 0), self._required.get(instance_of(node), 0))

    def expected(self, node: str) -> int:
        """The incarnation of ``node`` that will answer, as far as is known; 0: whichever does. Any thread."""
        newest = self._newest.get(node, 0)
        return newest if newest >= self._required.get(instance_of(node), 0) else 0

    def learn(self, node: str, incarnation: int) -> None:
        """``node`` is known to live as ``incarnation``."""
        self._newest[node] = max(incarnation, self._newest.get(node, 0))

    def require(self, instance: str, incarnation: int) -> None:
        """End the sessions of this instance's nodes below ``incarnation``, for good."""
        self._required[instance] = max(incarnation, self._required.get(instance, 0))
        for session in list(self._by_peer.values()):
            if session.incarnation < self._required.get(instance_of(session.node), 0):
                self._end(session)

    def at(self, peer: bytes) -> Session | None:
        """The session of this connection."""
        return self._by_peer.get(peer)

    def find(self, number: int) -> Session | None:
        """The session with this number, unless it has ended. Any thread."""
        return self._by_number.get(number)

    def drop(self, peer: bytes) -> None:
        """End the session of this connection."""
        session = self._by_peer.get(peer)
        if session is not None:
            self._end(session)

    def _end(self, session: Session) -> None:
        self._by_peer.pop(session.peer, None)
        self._by_number.pop(session.number, None)
