"""Prefill side: the offers of requests to decode instances that are open, and what is said about them.

An offer is one epoch of one request at one decode instance. It is *open* from ``AddNewRequest`` until that instance can
have nothing of it any more: it refused, completed, failed or released it, or is dead. Nothing else closes an offer, no
timeout either: an offer that is given up is asked back (``ReleaseRequest``, repeated) and stays open until it is
confirmed. Once its pushes were opened, the request's memory here is pinned until the offer is closed and the engine
says that no rank has a write in flight: until then that decode instance, or a write on its way to it, may read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from actors.scheduler.blocks import CachePool, Holding
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import Peers
from actors.scheduler.sequence import Sequence
from actors.scheduler.settings import SchedulerSettings
from messages.base import control_address
from messages.handoff import AddNewRequest, FirstGeneration, ReleaseRequest, RequestAccepted
from messages.requests import SubmitRequest
from messages.transfer import ClosePush, OpenPush

Key = tuple[str, int]
"""(request id, epoch)."""


@dataclass(eq=False)
class Offer:
    """One epoch of one request at one decode instance. ``holding``: the memory here that its pushes read."""

    request_id: str
    epoch: int
    instance: str
    incarnation: int
    offered_ns: int
    answered: bool = False
    accepted: RequestAccepted | None = None
    accepted_ns: int = 0
    holding: Holding | None = None
    releasing: bool = False
    probed: bool = False  # FirstGeneration was sent a second time

    @property
    def key(self) -> Key:
        return (self.request_id, self.epoch)

    @property
    def address(self) -> str:
        """Of the decode instance's scheduler."""
        return control_address(self.instance, "scheduler")


class Offers:
    """Every open offer of this instance."""

    def __init__(self, settings: SchedulerSettings, pool: CachePool, peers: Peers, out: Outbox) -> None:
        self._settings = settings
        self._pool = pool
        self._peers = peers
        self._out = out
        self.open: dict[Key, Offer] = {}
        self.unanswered: dict[Key, Offer] = {}  # those of the open ones that nobody answered yet
        self._closing: dict[Key, Holding] = {}  # closed, but their pushes are not

    def find(self, request_id: str, epoch: int, instance: str, incarnation: int) -> Offer | None:
        """The open offer that a message from this incarnation of ``instance`` is about."""
        offer = self.open.get((request_id, epoch))
        if offer is None or (offer.instance, offer.incarnation) != (instance, incarnation):
            return None
        return offer

    def is_taken(self, request_id: str, epoch: int) -> bool:
        """Whether this epoch may still be in use (a client may use an id again before its last use is released)."""
        key = (request_id, epoch)
        return key in self.open or key in self._closing or key in self._pool.holdings

    def make(self, now_ns: int, submit: SubmitRequest, epoch: int, instance: str, incarnation: int) -> Offer:
        """Ask a decode instance to reserve everything that decode needs."""
        offer = Offer(submit.request_id, epoch, instance, incarnation, now_ns)
        self.open[offer.key] = self.unanswered[offer.key] = offer
        peer = self._peers.get(instance, incarnation)
        if peer is not None:
            peer.unanswered += 1
        own = self._settings
        self._out.send(
            offer.address,
            AddNewRequest(
                request_id=submit.request_id,
                epoch=epoch,
                source_instance=own.instance,
                source_incarnation=own.incarnation,
                prompt_token_ids=submit.prompt_token_ids,
                sampling=submit.sampling,
                reply_to=submit.reply_to,
                priority=submit.priority,
                mode=own.mode,
                delivered_token_ids=submit.delivered_token_ids,
            ),
        )
        self._out.start_request_timer("offer", *offer.key, own.offer_timeout_ms)
        return offer

    def accept(self, now_ns: int, offer: Offer, message: RequestAccepted) -> None:
        """The reservation stands."""
        self._answered(offer)
        offer.accepted = message
        offer.accepted_ns = now_ns

    def open_push(self, offer: Offer, sequence: Sequence, ready_tokens: int) -> None:
        """Tell the ranks where this attempt's chunks go; from now on the memory here is pinned."""
        accepted, holding = offer.accepted, sequence.holding
        if accepted is None or holding is None:
            raise AssertionError(f"{offer.key}: pushes are opened without a reservation or memory")
        self._pool.pin(holding, offer.key)
        offer.holding = holding
        self._out.send(
            self._settings.engine,
            OpenPush(
                request_id=offer.request_id,
                epoch=offer.epoch,
                target_instance=offer.instance,
                target_incarnation=offer.incarnation,
                mode=self._settings.mode,
                source_block_ids=tuple(holding.blocks),
                source_slot=holding.slot,
                target_block_ids=accepted.target_block_ids,
                target_slot=accepted.target_slot,
                leases=accepted.leases,
                ready_tokens=ready_tokens,
            ),
        )

    def hand_off(self, offer: Offer, message: FirstGeneration) -> None:
        """Prefill is done: the decode instance restores from here on."""
        self._out.send(offer.address, message)
        limit_ms = self._settings.handoff_timeout_ms
        probe_ms = min(self._settings.offer_timeout_ms, limit_ms / 2)
        self._out.start_request_timer("handoff", *offer.key, limit_ms - probe_ms if offer.probed else probe_ms)

    def give_up(self, offer: Offer, reason: str) -> None:
        """Ask the decode instance for everything back, until it confirms or is dead."""
        if offer.releasing:
            return
        offer.releasing = True
        self._answered(offer)
        self._stop_timers(offer)
        self.ask_back(offer, reason)

    def ask_back(self, offer: Offer, reason: str) -> None:
        """Send ``ReleaseRequest``, and again later."""
        self._out.send(offer.address, ReleaseRequest(request_id=offer.request_id, epoch=offer.epoch, reason=reason))
        self._out.start_request_timer("release", *offer.key, self._settings.release_resend_ms)

    def close(self, offer: Offer) -> None:
        """The decode instance can have nothing of it any more."""
        del self.open[offer.key]
        self._answered(offer)
        self._stop_timers(offer)
        self._out.stop_request_timer("release", *offer.key)
        if offer.holding is not None:
            self._closing[offer.key] = offer.holding
            self._out.send(self._settings.engine, ClosePush(request_id=offer.request_id, epoch=offer.epoch))

    def push_closed(self, key: Key) -> bool:
        """No rank reads the memory for this offer any more; False when nobody waited for that."""
        holding = self._closing.pop(key, None)
        if holding is not None:
            self._pool.unpin(holding, key)
        return holding is not None

    def _answered(self, offer: Offer) -> None:
        if offer.answered:
            return
        offer.answered = True
        del self.unanswered[offer.key]
        self._out.stop_request_timer("offer", *offer.key)
        peer = self._peers.get(offer.instance, offer.incarnation)
        if peer is not None:
            peer.unanswered -= 1

    def _stop_timers(self, offer: Offer) -> None:
        if offer.accepted is not None:
            self._out.stop_request_timer("handoff", *offer.key)


def backoff_ms(settings: SchedulerSettings, request_id: str, rounds: int) -> float:
    """How long to wait after ``rounds`` rounds of refusals: doubling, capped, spread by a hash of request and round."""
    ceiling = min(settings.offer_backoff_max_ms, settings.offer_backoff_ms * 2.0 ** min(rounds - 1, 16))
    spread = crc32(f"{settings.seed}/{settings.instance}/{request_id}/{rounds}".encode()) / 2**32
    return ceiling * (0.5 + spread / 2)
