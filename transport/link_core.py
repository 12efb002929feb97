"""What all links have in common: outboxes, sessions, credit, and what happens when; a carrier moves the frames.

``LinkCore`` is driven by one thread, which owns the carrier. Other threads only fill outboxes, count consumed
envelopes and ask for calls, and wake that thread when there is something new to do. The thread calls ``service`` after
each wake-up, and the ``on_…`` methods for what its carrier receives.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from messages.base import PROTOCOL_VERSION, instance_of
from messages.codec import MalformedFrame, decode_batch
from transport.frames import Credit, Hello, Refused, Reset, Welcome, control_frame, data_frame, split
from transport.inbox import Session, Sessions
from transport.links import LinkEvents, LinkSettings
from transport.outbox import Outbox

RETRY_NS = 50_000_000
"""Pause before greeting a peer again whose old life is still ending."""

CALLS_PER_ROUND = 64
"""Called before the carrier is asked again what came."""


class Carrier(Protocol):
    """Moves whole frames. Owned by the links' thread."""

    def connect(self, node: str) -> None:
        """Make a connection to ``node``, in place of an earlier one. Nobody needs to be there yet."""
        ...

    def disconnect(self, node: str) -> None:
        """End the connection to ``node`` and drop what it still holds."""
        ...

    def transmit(self, node: str, frame: bytes) -> bool:
        """Send on the connection to ``node``; False: no room now, ``LinkCore.on_writable`` when there is."""
        ...

    def await_reply(self, node: str) -> None:
        """Nothing more can be sent to ``node`` before it has said something: look for that at once."""
        ...

    def reply(self, peer: bytes, frame: bytes) -> None:
        """Answer on a connection that a peer made; dropped when it is gone."""
        ...

    def is_there(self, node: str) -> bool:
        """False when certainly nobody listens at that node's endpoint."""
        ...


class LinkCore:
    """See the module. ``wake`` is called from any thread when ``service`` should run."""

    def __init__(
        self,
        node: str,
        incarnation: int,
        settings: LinkSettings,
        carrier: Carrier,
        wake: Callable[[], None],
        incarnations: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.settings = settings
        self._carrier = carrier
        self._wake = wake
        self._events: LinkEvents | None = None
        self._outboxes: dict[str, Outbox] = {}
        self._outboxes_lock = threading.Lock()
        self._sessions = Sessions(node, incarnation, settings)
        for peer, known in incarnations:
            self._sessions.learn(peer, known)
        self._fresh: deque[Outbox] = deque()
        self._grants: deque[Session] = deque()
        self._requirements: deque[tuple[str, int]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._calls_lock = threading.Lock()  # held by whoever calls after the end
        self._is_calling = False
        self._thread_id = 0
        self._ended = False
        self._greeting: set[Outbox] = set()
        self._complained: set[str] = set()
        self.closing = False
        self.counts: Counter[str] = Counter()

    # -- any thread ----------------------------------------------------------------------------------------------

    def send(self, node: str, parcels: Sequence[bytes]) -> None:
        """See ``Links.send``."""
        if self.closing:
            self.counts["dropped_closed"] += len(parcels)
            return
        outbox = self._outboxes.get(node)
        if outbox is None:
            with self._outboxes_lock:
                outbox = self._outboxes.setdefault(node, Outbox(node, self._sessions.expected(node), self.settings))
        if outbox.put(parcels):
            if self._is_calling and threading.get_ident() == self._thread_id:
                self._meet_requirements()
                self._pump(outbox, time.monotonic_ns())
            else:
                self._fresh.append(outbox)
                self._wake()

    def consumed(self, session: int, count: int) -> None:
        """See ``Links.consumed``."""
        found = self._sessions.find(session)
        if found is not None and found.consume(count):
            self._grants.append(found)
            self._wake()

    def call(self, function: Callable[[], None]) -> None:
        """See ``Links.call``."""
        self._calls.append(function)
        if self._ended:
            self._call_all()
        else:
            self._wake()

    def require(self, instance: str, incarnation: int) -> None:
        """See ``Links.require``. What is queued is dropped at once: what the caller sends next is for the new life."""
        with self._outboxes_lock:  # an outbox is made before this, and held, or after it, for the new life
            for outbox in self._outboxes.values():
                if instance_of(outbox.node) == instance and outbox.known < incarnation:
                    outbox.hold()
            self._requirements.append((instance, incarnation))
        self._wake()

    # -- the links' thread -----------------------------------------------------------------------------------------

    def begin(self, events: LinkEvents) -> None:
        """Report to ``events`` from now on."""
        self._events = events

    def enter(self) -> None:
        """The calling thread drives the links from now on."""
        self._thread_id = threading.get_ident()

    @property
    def has_news(self) -> bool:
        """Whether ``service`` has something to do at once."""
        return bool(self._calls or self._fresh or self._grants or self._requirements)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be sent to anybody who may still answer."""
        return not any(
            (outbox.queue or outbox.blocked_frame) and (outbox.state == "open" or self._carrier.is_there(outbox.node))
            for outbox in list(self._outboxes.values())
        )

    def end(self) -> None:
        """Give up greetings that nobody answered: what the carrier still holds of them would be of no use."""
        for outbox in list(self._greeting):
            self._close(outbox)
        self._ended = True
        self._call_all()

    def _call_all(self) -> None:
        """The links' thread is over: call what is left. A call that asks for another does not wait for it."""
        while self._calls and self._calls_lock.acquire(blocking=False):
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                self._calls_lock.release()

    def service(self, now_ns: int) -> int:
        """Do what other threads asked for and what is due; returns when to come again, 0 for no particular time."""
        self._meet_requirements()
        while self._grants:
            session = self._grants.popleft()
            self._carrier.reply(session.peer, control_frame(Credit(limit=session.limit)))
        while self._fresh:
            self._pump(self._fresh.popleft(), now_ns)
        self.make_calls()
        return self._check_greetings(now_ns) if self._greeting else 0

    def make_calls(self) -> None:
        """Make the calls that were asked for, a bounded number of them; what each sends leaves as it is sent."""
        self._is_calling = True
        try:
            for _ in range(min(len(self._calls), CALLS_PER_ROUND)):
                self._calls.popleft()()
        finally:
            self._is_calling = False
        self._meet_requirements()
        while self._fresh:
            self._pump(self._fresh.popleft(), time.monotonic_ns())

    def _check_greetings(self, now_ns: int) -> int:
        """Greet again where that is due, give up where the deadline has passed; returns the next such time."""
        next_ns = 0
        for outbox in list(self._greeting):
            if now_ns >= outbox.deadline_ns:
                self._lose(outbox, f"no answer to the greeting within {self.settings.handshake_timeout_ms} ms")
                continue
            if outbox.retry_ns and now_ns >= outbox.retry_ns:
                self._greet(outbox)
            due_ns = outbox.retry_ns or outbox.deadline_ns
            next_ns = min(next_ns or due_ns, due_ns)
        return next_ns

    def on_writable(self, node: str, now_ns: int) -> None:
        """The carrier has room again on the connection to ``node``."""
        outbox = self._outboxes.get(node)
        if outbox is not None:
            self._pump(outbox, now_ns)

    def on_broken(self, node: str, now_ns: int) -> None:
        """The connection to ``node`` is gone. A greeting that went with it is said again, a little later."""
        self._meet_requirements()  # what was sent after them did not go with it
        outbox = self._outboxes.get(node)
        if outbox is None or outbox.state == "idle":
            return
        if outbox.state == "greeting":
            self._try_again(outbox, now_ns)
        else:
            self._lose(outbox, "the link broke")

    def on_refused(self, node: str, reason: str) -> None:
        """``node`` (or its socket's authentication) will not have this link."""
        outbox = self._outboxes.get(node)
        if outbox is not None and outbox.state == "greeting":
            self.counts["refused"] += 1
            self._lose(outbox, f"refused: {reason}")

    def on_reply(self, node: str, frame: bytes, now_ns: int) -> None:
        """``node`` said something on the connection made to it."""
        outbox = self._outboxes.get(node)
        if outbox is None or outbox.state == "idle":
            return
        try:
            control = split(frame)
        except MalformedFrame as error:
            self._complain(node, error)
            return
        match control:
            case Welcome():
                self._on_welcome(outbox, control, now_ns)
            case Refused():
                self.on_refused(node, control.reason)
            case Credit():
                outbox.limit = max(outbox.limit, control.limit)
                self._pump(outbox, now_ns)
            case Reset():
                if outbox.state == "open":
                    self._lose(outbox, "the peer knows nothing of this link: it was restarted")
            case _:
                self._complain(node, MalformedFrame("only answers are expected on this connection"))

    def on_frame(self, peer: bytes, frame: bytes) -> None:
        """A peer said something on a connection that it made."""
        try:
            content = split(frame)
            if isinstance(content, tuple):
                self._on_data(peer, *content)
            elif isinstance(content, Hello):
                self._on_hello(peer, content)
            else:
                raise MalformedFrame("only greetings and data are expected on this connection")
        except MalformedFrame as error:
            session = self._sessions.at(peer)
            self._complain(session.node if session else "somebody without a greeting", error)

    def _pump(self, outbox: Outbox, now_ns: int) -> None:
        """Send as much as may be sent; begin with a greeting when there is no connection."""
        with outbox.lock:
            outbox.pending = False
            why, outbox.overflowed = outbox.overflowed, ""
        if why:
            self.counts["overflowed"] += 1
            self._note("warning", "outbox_overflowed", peer=outbox.node, why=why)
            self._report_lost(outbox.node, f"its outbox overflowed: {why}")
        if outbox.state == "idle" and outbox.queue:
            outbox.state = "greeting"
            outbox.deadline_ns = now_ns + self.settings.handshake_timeout_ms * 1_000_000
            self._greeting.add(outbox)
            self._greet(outbox)
        while outbox.state == "open" and (outbox.queue or outbox.blocked_frame):
            frame = outbox.blocked_frame
            if frame is None:
                parcels = outbox.take()
                if not parcels:  # out of credit
                    self._carrier.await_reply(outbox.node)
                    return
                frame = data_frame(parcels)
            if not self._carrier.transmit(outbox.node, frame):
                outbox.blocked_frame = frame
                return
            outbox.blocked_frame = None
            self.counts["frames_sent"] += 1

    def _greet(self, outbox: Outbox) -> None:
        outbox.retry_ns = 0
        self._carrier.connect(outbox.node)
        hello = Hello(
            protocol_version=PROTOCOL_VERSION, node=self.node, incarnation=self.incarnation, target_node=outbox.node
        )
        self._carrier.transmit(outbox.node, control_frame(hello))
        self._carrier.await_reply(outbox.node)

    def _on_welcome(self, outbox: Outbox, welcome: Welcome, now_ns: int) -> None:
        if outbox.state != "greeting":
            return
        if welcome.protocol_version != PROTOCOL_VERSION or welcome.node != outbox.node:
            self.on_refused(
                outbox.node,
                f"protocol version {welcome.protocol_version} of {welcome.node} answered, "
                f"expected {PROTOCOL_VERSION} of {outbox.node}",
            )
            return
        self._meet_requirements()
        if welcome.incarnation < self._sessions.least(outbox.node):
            self._try_again(outbox, now_ns)  # a dead life of the peer still answers
            return
        self._learn(outbox.node, welcome.incarnation)
        self._greeting.discard(outbox)
        outbox.opened(welcome.incarnation, welcome.limit)
        self._pump(outbox, now_ns)

    def _learn(self, node: str, incarnation: int) -> None:
        """``node`` lives as ``incarnation``: drop what was queued for an earlier life, and the link to it."""
        self._meet_requirements()  # what was sent after them is not for an earlier life
        self._sessions.learn(node, incarnation)
        outbox = self._outboxes.get(node)
        if outbox is not None:
            if 0 < outbox.known < incarnation:
                why = f"it was restarted as incarnation {incarnation}"
                if outbox.state == "open":
                    self._lose(outbox, why)
                elif outbox.drop():
                    self._report_lost(node, why)
            outbox.known = max(outbox.known, incarnation)
        if self._events is not None:
            self._events.on_peer_known(node, incarnation)

    def _try_again(self, outbox: Outbox, now_ns: int) -> None:
        self._carrier.disconnect(outbox.node)
        outbox.retry_ns = now_ns + RETRY_NS

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        self._meet_requirements()  # it may come from a life that was given up
        answer = self._sessions.greet(peer, hello)
        if isinstance(answer, Refused):
            self.counts["refused"] += 1
            self._note("warning", "greeting_refused", peer=hello.node, reason=answer.reason)
        else:
            self._learn(hello.node, hello.incarnation)
        self._carrier.reply(peer, control_frame(answer))

    def _on_data(self, peer: bytes, count: int, batch: memoryview) -> None:
        session = self._sessions.at(peer)
        if session is None:
            self.counts["dropped_no_session"] += 1
            self._carrier.reply(peer, control_frame(Reset()))
            return
        session.received += count
        if session.received > session.limit:
            self._sessions.drop(peer)
            self._carrier.reply(peer, control_frame(Reset()))
            raise MalformedFrame(f"{session.received} envelopes came, {session.limit} were granted: link reset")
        try:
            envelopes = decode_batch(batch)
            if len(envelopes) != count:
                raise MalformedFrame(f"{len(envelopes)} envelopes in a frame that announced {count}")
        except MalformedFrame:
            self.consumed(session.number, count)  # nobody else will
            raise
        if self._events is not None:
            self._events.on_envelopes(session.number, session.node, envelopes)

    def _meet_requirements(self) -> None:
        while self._requirements:
            self._require(*self._requirements.popleft())

    def _require(self, instance: str, incarnation: int) -> None:
        with self._outboxes_lock:
            self._sessions.require(instance, incarnation)
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            if instance_of(outbox.node) != instance:
                continue
            outbox.release()
            if outbox.known >= incarnation:
                continue
            if outbox.state == "open":
                self._carrier.disconnect(outbox.node)
                outbox.closed()
                self._fresh.append(outbox)
            elif outbox.state == "greeting":
                outbox.deadline_ns = time.monotonic_ns() + self.settings.handshake_timeout_ms * 1_000_000
            outbox.known = 0  # what is queued by now was sent after ``require``: it is for the new life

    def _close(self, outbox: Outbox) -> int:
        """End the connection and forget what waited for it; returns how many envelopes."""
        self._greeting.discard(outbox)
        self._carrier.disconnect(outbox.node)
        outbox.closed()
        return outbox.drop()

    def _lose(self, outbox: Outbox, reason: str) -> None:
        dropped = self._close(outbox)
        self.counts["dropped_lost"] += dropped
        self._report_lost(outbox.node, reason)

    def _report_lost(self, node: str, reason: str) -> None:
        if self._events is not None and not self.closing:
            self._events.on_peer_lost(node, reason)

    def _complain(self, who: str, error: MalformedFrame) -> None:
        """Count a malformed frame; say so once per peer."""
        self.counts["malformed"] += 1
        if who not in self._complained:
            self._complained.add(who)
            self._note("warning", "malformed_frame", peer=who, error=str(error))

    def _note(self, level: str, event: str, **fields: str | int | float) -> None:
        if self._events is not None:
            self._events.on_note(level, event, fields)
