"""The post office of a node: stamps what its actors send, and brings it to an actor of this node or to a link.

It also knows who is dead. Messages that say so (``InstanceLost`` and ``UnlinkPeer``; ``ClusterView`` and ``LinkPeer``
name a newer life) pass through here anyway; from then on nothing of the dead incarnation is delivered,
nothing queued for it is sent, and what is sent to that node is for its next life.

Threads: ``post``, ``stamp`` and ``register`` may be called from any thread; a ``Basket`` belongs to one. Link events
arrive on the links' thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from actors.runtime.hooks import Delivery, Injector, NoInjector, Recorder
from actors.runtime.log import Log
from actors.runtime.swaps import Swaps
from actors.runtime.timers import Timers
from messages.base import Message, instance_of
from messages.cluster import ClusterView, InstanceLost, LinkPeer, UnlinkPeer
from messages.codec import UnencodableValue, encode
from messages.envelope import Envelope
from messages.lifecycle import NotSent, PeerLost
from transport.links import Alone, Links

POST = "post"
"""Name of the post office itself as a sender (of ``PeerLost`` and ``NotSent``)."""

Accept = Callable[[int, Sequence[Envelope]], None]
"""``accept(session, envelopes)``: put envelopes into an actor's mailbox. Any thread; never blocks. Session 0: local."""


def damaged(parcel: bytes) -> bytes:
    """The bytes of an envelope after a fault on the way: no receiver can decode them."""
    return Alone(b"\xc1" + parcel[1:])  # 0xc1 is never used in msgpack


def not_sent(envelope: Envelope, error: UnencodableValue) -> NotSent:
    """What the sender of an envelope that cannot be encoded is told. Raises ``error`` when it names no request: nobody
    could answer for it, so its sender must fail."""
    request_id: str = getattr(envelope.message, "request_id", "")
    if not request_id:
        raise error
    epoch: int = getattr(envelope.message, "epoch", 0)
    what = type(envelope.message).__name__
    return NotSent(request_id=request_id, epoch=epoch, what=what, to=envelope.to, reason=str(error))


class PostOffice:
    """See the module. ``fail(part, reason)`` is called when nothing can be sent or received any more."""

    def __init__(
        self,
        node: str,
        incarnation: int,
        links: Links,
        recorder: Recorder,
        injector: Injector,
        timers: Timers,
        log: Log,
        fail: Callable[[str, str], None],
    ) -> None:
        self.node = node
        self.instance = instance_of(node)
        self.incarnation = incarnation
        self._links = links
        self._recorder = recorder
        self._injector = None if isinstance(injector, NoInjector) else injector
        self._timers = timers
        self._log = log
        self._fail = fail
        self._mailboxes: dict[str, Accept] = {}
        self._held: list[tuple[int, Sequence[Envelope]]] | None = []  # what came before the actors were there
        self._prefix = f"{node}#{incarnation}."
        self._next_count = count(1).__next__
        self._senders: dict[str, set[str]] = {}  # peer node → local addresses that sent there
        self._dead: dict[str, int] = {}  # instance → newest dead incarnation
        self._swaps: Swaps[str, Envelope] = Swaps()  # by peer node: what the next message to it is to pass
        self.call = links.call
        self.dropped_dead = 0
        self.dropped_unknown = 0

    # -- mailboxes -------------------------------------------------------------------------------------------------

    def register(self, actor: str, accept: Accept) -> None:
        """Deliver to local actor ``actor`` from now on."""
        self._mailboxes[actor] = accept

    def open(self) -> None:
        """All actors are registered: deliver what links brought so far, and everything from now on."""
        held, self._held = self._held, None
        for session, envelopes in held or ():
            self._deliver(session, envelopes)

    def consumed(self, session: int, envelope_count: int) -> None:
        """An actor has handled that many envelopes of a link's session."""
        if session:
            self._links.consumed(session, envelope_count)

    # -- sending ---------------------------------------------------------------------------------------------------

    def stamp(self, sender: str, to: str, message: Message, cause: Envelope | None) -> Envelope:
        """An envelope around ``message``; ``cause`` is the envelope whose handling led to it."""
        request_id: str = getattr(message, "request_id", "")
        epoch: int = getattr(message, "epoch", 0)
        if cause is None:
            parent_id, trace_id = "", request_id
        else:
            parent_id, trace_id = cause.message_id, request_id or cause.trace_id
            if not request_id:
                epoch = epoch or cause.epoch
        return Envelope(
            message_id=f"{self._prefix}{self._next_count()}",
            sender=sender,
            to=to,
            sent_ns=time.monotonic_ns(),
            message=message,
            parent_id=parent_id,
            trace_id=trace_id,
            epoch=epoch,
            incarnation=self.incarnation,
        )

    def basket(self, sender: str) -> Basket:
        """A place where local actor ``sender`` (an address) collects what it sends, to hand it over in one go."""
        return Basket(self, sender)

    def post(self, sender: str, to: str, message: Message, cause: Envelope | None = None) -> None:
        """Send one message at once, as the local actor at address ``sender``."""
        basket = Basket(self, sender)
        basket.put(to, message, cause)
        basket.flush()

    def route(self, envelope: Envelope, parcels: dict[str, list[bytes]]) -> None:
        """Deliver a stamped envelope locally, or add it to ``parcels`` of its node, as the fault injector decides."""
        if self._injector is None:
            self._forward(envelope, False, parcels)
            return
        for delivery in self._injector.on_send(time.monotonic_ns(), envelope):
            if delivery.swap:
                self._forward_behind_next(delivery, parcels)
            elif delivery.delay_ms > 0:
                self._forward_later(delivery)
            else:
                self._forward(delivery.envelope, delivery.corrupt, parcels)

    def _forward(self, envelope: Envelope, corrupt: bool, parcels: dict[str, list[bytes]]) -> None:
        node, _, actor = envelope.to.partition("/")
        if type(envelope.message) in NEWS:
            self._read_news(envelope.message)
        if node == self.node:
            self._recorder.sent(envelope, 0)
            if not corrupt:
                self._hand_over(actor, 0, (envelope,))
            return
        try:
            parcel = encode(envelope)
        except UnencodableValue as error:
            told = not_sent(envelope, error)
            self._log.write(POST, "error", "not_sent", {"message": told.what, "to": told.to, "reason": told.reason})
            self.post(f"{self.node}/{POST}", envelope.sender, told, envelope)
            return
        self._recorder.sent(envelope, len(parcel))
        senders = self._senders.get(node)
        if senders is None:
            senders = self._senders.setdefault(node, set())
        if envelope.sender not in senders:
            senders.add(envelope.sender)
        waiting = parcels.get(node)
        if waiting is None:
            parcels[node] = waiting = []
        waiting.append(damaged(parcel) if corrupt else parcel)
        if self._swaps and (passed := self._swaps.passed(node)) is not None:
            self._forward(passed, False, parcels)

    def _forward_behind_next(self, delivery: Delivery, parcels: dict[str, list[bytes]]) -> None:
        """Hold an envelope until the next one to its node is on the way, ``delay_ms`` at most."""
        envelope, node = delivery.envelope, delivery.envelope.to.partition("/")[0]
        if not self._swaps.hold(node, envelope):
            self._forward(envelope, False, parcels)
            return

        def due() -> None:
            if self._swaps.overdue(node, envelope):
                late: dict[str, list[bytes]] = {}
                self._forward(envelope, False, late)
                self.ship(late)

        self._timers.start(delivery.delay_ms, due)

    def _forward_later(self, delivery: Delivery) -> None:
        def due() -> None:
            parcels: dict[str, list[bytes]] = {}
            self._forward(delivery.envelope, delivery.corrupt, parcels)
            self.ship(parcels)

        self._timers.start(delivery.delay_ms, due)

    def ship(self, parcels: dict[str, list[bytes]]) -> None:
        """Give collected parcels to the links; empties ``parcels``."""
        for node, waiting in parcels.items():
            self._links.send(node, waiting)
        parcels.clear()

    # -- receiving: LinkEvents ---------------------------------------------------------------------------------------

    def on_envelopes(self, session: int, node: str, envelopes: Sequence[Envelope]) -> None:
        """See ``LinkEvents``."""
        if self._held is not None:
            self._held.append((session, envelopes))
        else:
            self._deliver(session, envelopes)

    def _deliver(self, session: int, envelopes: Sequence[Envelope]) -> None:
        """Into the mailboxes, runs of envelopes for the same actor together."""
        if len(envelopes) == 1 and not self._dead and type(envelopes[0].message) not in NEWS:  # the common case
            self._hand_over(envelopes[0].to.partition("/")[2], session, envelopes)
            return
        start, to = 0, ""
        for index, envelope in enumerate(envelopes):
            if type(envelope.message) in NEWS:
                self._read_news(envelope.message)
            is_dead = bool(self._dead) and self._is_dead(envelope)
            if envelope.to != to or is_dead:
                if index > start:
                    self._hand_over(to.partition("/")[2], session, envelopes[start:index])
                start, to = index, envelope.to
            if is_dead:
                self.dropped_dead += 1
                self.consumed(session, 1)
                start, to = index + 1, ""
        if start < len(envelopes):
            self._hand_over(to.partition("/")[2], session, envelopes[start:] if start else envelopes)

    def _hand_over(self, actor: str, session: int, envelopes: Sequence[Envelope]) -> None:
        accept = self._mailboxes.get(actor)
        if accept is not None:
            accept(session, envelopes)
            return
        self.dropped_unknown += len(envelopes)
        self.consumed(session, len(envelopes))
        message = type(envelopes[0].message).__name__
        self._log.write(POST, "warning", "no_such_actor", {"actor": actor, "message": message})

    def on_peer_lost(self, node: str, reason: str) -> None:
        """See ``LinkEvents``: tell every local actor that ever sent there."""
        # A detail: whoever watches that node (supervisor, registry, scheduler) says what its loss means.
        self._log.write(POST, "debug", "peer_lost", {"peer": node, "reason": reason})
        for address in sorted(self._senders.pop(node, ())):
            self.post(f"{self.node}/{POST}", address, PeerLost(node=node, reason=reason))

    def on_peer_known(self, node: str, incarnation: int) -> None:
        """See ``LinkEvents``."""

    def on_note(self, level: str, event: str, fields: Mapping[str, str | int | float]) -> None:
        """See ``LinkEvents``."""
        self._log.write("links", level, event, fields)

    def on_links_failed(self, reason: str) -> None:
        """See ``LinkEvents``."""
        self._fail("links", reason)

    # -- who is dead ---------------------------------------------------------------------------------------------------

    def _is_dead(self, envelope: Envelope) -> bool:
        return envelope.incarnation <= self._dead.get(instance_of(envelope.sender), -1)

    def _read_news(self, message: Message) -> None:
        for instance, incarnation in deaths_in(message):
            self._bury(instance, incarnation)

    def _bury(self, instance: str, incarnation: int) -> None:
        """Lives of ``instance`` up to ``incarnation`` are over."""
        if instance == self.instance or incarnation < 1 or incarnation <= self._dead.get(instance, 0):
            return
        self._dead[instance] = incarnation
        self._links.require(instance, incarnation + 1)


NEWS = frozenset({InstanceLost, UnlinkPeer, ClusterView, LinkPeer})
"""Types of messages that say who is dead."""


def deaths_in(message: Message) -> list[tuple[str, int]]:
    """(instance, its newest incarnation that is over), as one of ``NEWS`` says."""
    match message:
        case InstanceLost() | UnlinkPeer():
            return [(message.instance, message.incarnation)]
        case ClusterView():
            return [(info.instance, info.incarnation - 1) for info in message.instances]
        case LinkPeer():
            return [(message.peer.instance, message.peer.incarnation - 1)]
        case _:
            return []


class Basket:
    """What one actor sends while it handles messages: stamped at once, handed to links by ``flush``. One thread."""

    __slots__ = ("_office", "_parcels", "_sender")

    def __init__(self, office: PostOffice, sender: str) -> None:
        self._office = office
        self._sender = sender
        self._parcels: dict[str, list[bytes]] = {}

    def put(self, to: str, message: Message, cause: Envelope | None) -> None:
        """Stamp and route one message."""
        office = self._office
        office.route(office.stamp(self._sender, to, message, cause), self._parcels)

    def flush(self) -> None:
        """Give what goes to other nodes to the links."""
        if self._parcels:
            self._office.ship(self._parcels)
