"""The post offices and links of a simulated cluster: from a machine's ``Send`` to the moment at which it is handled.

Follows ``postoffice.py`` and ``transport/links.py``: envelopes are stamped where they are sent; between nodes they are
encoded, travel by a link that belongs to one life of the receiver, and are decoded where they arrive. What is sent to
a life dies with it; what is sent while there is none waits for the next, a bounded time. Envelopes of a life that is
known to be over are dropped, and so is what was on its way when a link broke.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from random import Random
from typing import TYPE_CHECKING, Final

from actors.runtime.postoffice import NEWS, deaths_in, not_sent
from actors.runtime.simulated_links import Links
from actors.runtime.simulated_nodes import SimulatedActor, SimulatedNode
from actors.runtime.swaps import Swaps
from messages.base import Message
from messages.codec import MalformedFrame, UnencodableValue, decode, encode
from messages.envelope import MESSAGE_TYPES, Envelope
from messages.lifecycle import PeerLost

if TYPE_CHECKING:
    from actors.runtime.simulation import Simulation

CONNECT_NS: Final = 15_000_000_000
"""How long what is sent to a node without a life waits for one (the links' handshake timeout)."""

HEARD_MAX: Final = 12
"""Messages per request and node that may come again."""

Listener = Callable[[int, Envelope], None]

_NAMES: Final = {
    kind: ("request_id" in kind.__struct_fields__, "epoch" in kind.__struct_fields__) for kind in MESSAGE_TYPES
}


class _Places(dict[str, tuple[str, str, str]]):
    """Address → (node, actor, instance)."""

    def __missing__(self, address: str) -> tuple[str, str, str]:
        node, _, actor = address.partition("/")
        place = self[address] = (node, actor, node.partition(".")[0])
        return place


class SimulatedPost:
    """One for all nodes of a simulation."""

    def __init__(self, simulation: Simulation, links: Links, random: Random) -> None:
        self._simulation = simulation
        self._links = links
        self._chance = random.random
        self._local_ns = links.settings.local_us * 1e3
        self.listeners: dict[str, Listener] = {}
        self.frame_count = 0
        self.stale_count = 0
        self._broken_at: dict[tuple[str, str], int] = {}  # (source, target) → what was sent until then is lost
        self._waiting: dict[str, list[tuple[SimulatedNode, bytes]]] = {}  # node without a life → what waits for one
        self._swaps: Swaps[tuple[str, str], tuple[SimulatedNode | None, bytes]] = Swaps()  # what lets the next one pass
        self._has_swapped = False
        self._heard: dict[tuple[str, str], list[tuple[int, bytes]]] = {}  # (life, request) → newest epoch's messages
        self._places = _Places()

    # -- sending --------------------------------------------------------------------------------------------------

    def send_from(self, node: SimulatedNode, sender: str, to: str, message: Message, parent_id: str) -> None:
        """Put ``message`` in an envelope and on its way."""
        node.count += 1
        simulation = self._simulation
        kind = type(message)
        names_request, names_epoch = _NAMES[kind]
        envelope = Envelope(
            message_id=f"{node.id_prefix}{node.count}",
            sender=sender,
            to=to,
            sent_ns=simulation.now_ns,
            message=message,
            parent_id=parent_id,
            trace_id=message.request_id if names_request else "",  # type: ignore[attr-defined]
            epoch=message.epoch if names_epoch else 0,  # type: ignore[attr-defined]
            incarnation=node.incarnation,
        )
        if kind in simulation.watched:
            self._injected(node, envelope)
        else:
            self._transmit(node, envelope, False)

    def _injected(self, node: SimulatedNode, envelope: Envelope) -> None:
        """Send what the injector makes of an envelope."""
        simulation = self._simulation
        if simulation.injector is None:
            self._transmit(node, envelope, False)
            return
        deliveries = simulation.injector.on_send(simulation.now_ns, envelope)
        if not node.alive:
            return
        if not deliveries and node.recorder is not None:
            node.recorder.sent(envelope, 0)
        for delivery in deliveries:
            if delivery.swap:
                self._transmit(node, delivery.envelope, delivery.corrupt, int(delivery.delay_ms * 1e6))
            elif delivery.delay_ms:
                due = simulation.now_ns + int(delivery.delay_ms * 1e6)
                late = (delivery.envelope, delivery.corrupt)
                simulation.push(due, node, self._transmit_late, node, late)
            else:
                self._transmit(node, delivery.envelope, delivery.corrupt)

    def _transmit_late(self, node: SimulatedNode, late: tuple[Envelope, bool]) -> None:
        self._transmit(node, late[0], late[1])

    def _transmit(self, node: SimulatedNode, envelope: Envelope, corrupt: bool, swap_ns: int = 0) -> None:
        if type(envelope.message) in NEWS:
            self._read_news(node, envelope.message)
        actor = node.by_address.get(envelope.to)
        if actor is not None:
            self._deliver_inside(node, actor, envelope)
            return
        name = self._places[envelope.to][0]
        if name == node.name:
            self._deliver_outside_actors(node, envelope)
            return
        try:
            frame = encode(envelope)
        except UnencodableValue as error:
            self.send_from(node, f"{node.name}/post", envelope.sender, not_sent(envelope, error), envelope.message_id)
            return
        self.frame_count += 1
        if node.recorder is not None:
            node.recorder.sent(envelope, len(frame))
        senders = node.sent_to.get(name)
        if senders is None:
            senders = node.sent_to[name] = {}
        senders[envelope.sender] = None
        count = self.dispatch(node, name, b"\xc1" + frame if corrupt else frame, swap_ns)
        if count != 1 and node.record_fault is not None:
            text = "link: lost or held" if count == 0 else "link: duplicated"
            node.record_fault(self._simulation.now_ns, envelope, text)

    def _deliver_inside(self, node: SimulatedNode, actor: SimulatedActor, envelope: Envelope) -> None:
        simulation = self._simulation
        if node.recorder is not None:
            node.recorder.sent(envelope, 0)
        due = simulation.now_ns + int(self._chance() * self._local_ns) + node.slow_ns
        if due < actor.free_ns:
            due = actor.free_ns
        actor.free_ns = due
        turn = simulation.handle if type(envelope.message) in simulation.watched else simulation.step
        heappush(simulation.heap, (due, simulation.next_number(), node, turn, actor, envelope))

    def _deliver_outside_actors(self, node: SimulatedNode, envelope: Envelope) -> None:
        """To an address of this node that is no actor's."""
        if node.recorder is not None:
            node.recorder.sent(envelope, 0)
        if envelope.to in self.listeners:
            self.listeners[envelope.to](self._simulation.now_ns, envelope)

    # -- links ----------------------------------------------------------------------------------------------------

    def dispatch(self, source: SimulatedNode, name: str, frame: bytes, swap_ns: int = 0) -> int:
        """Put a frame on the link to the life of ``name`` that is up; returns how often it will arrive.

        ``swap_ns``: behind the next frame of that link, so much later at most.
        """
        simulation = self._simulation
        target = simulation.nodes.get(name)
        if target is None or not target.alive:
            if not any(self._places[address][0] == name for address in self.listeners):
                self._wait(source, name, frame)
                return 1
            target = None
        link = (source.name, name)
        if self._links.reorders and self._links.lets_pass():
            swap_ns = int(self._links.settings.reorder_ms * 1e6)
        if swap_ns and not self._links.is_blocked(link):
            waiting = (target, frame)
            self._has_swapped = True
            if self._swaps.hold(link, waiting):
                simulation.push(simulation.now_ns + swap_ns, None, self._no_longer_wait, link, waiting)
                return 1
        dues = self._links.due(simulation.now_ns, link, source, frame)
        for due in dues:
            heappush(simulation.heap, (due, simulation.next_number(), None, self._arrive, target, frame))
        if self._has_swapped and dues and (passed := self._swaps.passed(link)) is not None:
            simulation.push(dues[0], None, self._arrive, *passed)
        return len(dues)

    def _no_longer_wait(self, link: tuple[str, str], waiting: tuple[SimulatedNode | None, bytes]) -> None:
        """It arrives now, unless another message has passed it."""
        if self._swaps.overdue(link, waiting):
            self._arrive(*waiting)

    def _wait(self, source: SimulatedNode, name: str, frame: bytes) -> None:
        waiting = self._waiting.setdefault(name, [])
        if not any(sender is source for sender, _ in waiting):
            self._simulation.push(self._simulation.now_ns + CONNECT_NS, source, self._give_up, source, name)
        waiting.append((source, frame))

    def _give_up(self, source: SimulatedNode, name: str) -> None:
        """Nobody greeted us in time: what waits for ``name`` is lost, and its senders are told."""
        waiting = self._waiting.get(name, [])
        kept = [entry for entry in waiting if entry[0] is not source]
        if len(kept) < len(waiting):
            self._waiting[name] = kept
            self._peer_lost(source, (name, f"{name} did not answer within {CONNECT_NS // 1_000_000} ms"))

    def connect(self, name: str) -> None:
        """A life of ``name`` began: it gets what waited for one."""
        for source, frame in self._waiting.pop(name, ()):
            if source.alive:
                self.dispatch(source, name, frame)

    def on_death(self, name: str) -> None:
        """A life of ``name`` ended: its peers find their links broken a little later."""
        for peer in self._simulation.nodes.values():
            if peer.alive and name in peer.sent_to:
                self._links.forget(peer.name, name)
                self._tell_lost(peer, name)

    def break_link(self, source: str, target: str) -> None:
        """What is on its way from ``source`` to ``target`` is lost."""
        self._broken_at[(source, target)] = self._simulation.now_ns
        node = self._simulation.nodes.get(source)
        if node is not None and node.alive and target in node.sent_to:
            self._tell_lost(node, target)

    def _tell_lost(self, node: SimulatedNode, name: str) -> None:
        due = self._simulation.now_ns + int(self._links.settings.detect_ms * 1e6)
        self._simulation.push(due, node, self._peer_lost, node, (name, f"link to {name} broke"))

    def _peer_lost(self, node: SimulatedNode, lost: tuple[str, str]) -> None:
        """Tell every actor of ``node`` that ever sent there."""
        name, reason = lost
        message = PeerLost(node=name, reason=reason)
        for sender in sorted(node.sent_to.pop(name, ())):
            self.send_from(node, f"{node.name}/post", sender, message, "")

    # -- receiving ------------------------------------------------------------------------------------------------

    def _arrive(self, node: SimulatedNode | None, frame: bytes) -> None:
        """A frame reaches the life that it was sent to, or a listener."""
        simulation = self._simulation
        if node is not None and not node.alive:
            self._links.dropped_count += 1
            return
        try:
            envelope = decode(frame)
        except MalformedFrame:
            self._links.dropped_count += 1
            return
        to = envelope.to
        if node is None:
            if to in self.listeners:
                self.listeners[to](simulation.now_ns, envelope)
            return
        if type(envelope.message) in NEWS:
            self._read_news(node, envelope.message)
        source, _, instance = self._places[envelope.sender]
        incarnation = envelope.incarnation
        if (incarnation != node.newest.get(source) or node.dead or self._broken_at) and self._is_stale(
            node, envelope, source, instance
        ):
            self.stale_count += 1
            return
        if self._links.settings.echo and envelope.trace_id:
            self._echo(node, envelope, frame)
        actor = node.by_address.get(to)
        if actor is None:
            if to in self.listeners:
                self.listeners[to](simulation.now_ns, envelope)
            return
        turn = simulation.handle if type(envelope.message) in simulation.watched else simulation.step
        if actor.free_ns > simulation.now_ns or node.slow_ns or not node.running:
            actor.free_ns = max(actor.free_ns, simulation.now_ns + node.slow_ns)
            simulation.push(actor.free_ns, node, turn, actor, envelope)
        else:
            turn(actor, envelope)

    def _echo(self, node: SimulatedNode, envelope: Envelope, frame: bytes) -> None:
        """Let what came of a request's older epochs come once more, now that a newer one is here."""
        heard = self._heard.setdefault((node.id_prefix, envelope.trace_id), [])
        newest = heard[-1][0] if heard else -1
        if envelope.epoch < newest:
            return
        if envelope.epoch > newest:
            settings = self._links.settings
            for _, old in heard:
                if self._chance() < settings.echo:
                    due = self._simulation.now_ns + int(self._chance() * settings.echo_ms * 1e6)
                    self._simulation.push(due, None, self._arrive, node, old)
            heard.clear()
        if len(heard) < HEARD_MAX:
            heard.append((envelope.epoch, frame))

    def _is_stale(self, node: SimulatedNode, envelope: Envelope, source: str, instance: str) -> bool:
        """Whether it comes from a life that is over, or was on a link when it broke."""
        incarnation = envelope.incarnation
        newest = node.newest.get(source, 0)
        if incarnation < newest:
            return True
        if incarnation > newest:
            node.newest[source] = incarnation
        if self._broken_at and envelope.sent_ns <= self._broken_at.get((source, node.name), -1):
            return True
        return bool(node.dead) and incarnation <= node.dead.get(instance, -1)

    def _read_news(self, node: SimulatedNode, message: Message) -> None:
        for instance, incarnation in deaths_in(message):
            self._bury(node, instance, incarnation)

    def _bury(self, node: SimulatedNode, instance: str, incarnation: int) -> None:
        """Lives of ``instance`` up to ``incarnation`` are over for ``node``; what waits for them is dropped."""
        if incarnation <= node.dead.get(instance, 0) or instance == node.name.partition(".")[0]:
            return
        node.dead[instance] = incarnation
        for name, waiting in self._waiting.items():
            if name.partition(".")[0] == instance:
                waiting[:] = [entry for entry in waiting if entry[0] is not node]
