"""Prefill side: whom to offer which request, and when (the window, the order of resources, backing off, C26).

The theory is in ``prefill_side.py``.
"""

from __future__ import annotations

from typing import Protocol

from actors.scheduler.batching import Batcher
from actors.scheduler.blocks import CachePool
from actors.scheduler.offers import Offer, Offers, backoff_ms
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import Peers
from actors.scheduler.prefill_request import PrefillBook, PrefillRequest
from actors.scheduler.settings import SchedulerSettings
from actors.scheduler.transitions import PrefillEvent, PrefillState

S, E = PrefillState, PrefillEvent


class FailRequest(Protocol):
    """Ends a request with an error."""

    def __call__(
        self, now_ns: int, request: PrefillRequest, code: int, reason: str, *, retryable: bool = False
    ) -> None: ...


class Offering:
    """Offers requests to decode instances. ``fail`` ends one that nobody will ever take."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: CachePool,
        batcher: Batcher,
        peers: Peers,
        out: Outbox,
        book: PrefillBook,
        offers: Offers,
        fail: FailRequest,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._batcher = batcher
        self._peers = peers
        self._out = out
        self._book = book
        self._offers = offers
        self._fail = fail

    def advance(self, now_ns: int) -> None:
        """Offer what can be offered: first requests that lost their decode instance, then the head of the queue."""
        while self._book.ready and self._offer(now_ns, self._book.ready[0]):
            pass
        while self._book.queue and self._window_is_open():
            request = self._book.queue[0]
            if not request.is_online and self._book.online_waits:
                return
            if not self._hold_memory(now_ns, request) or not self._offer(now_ns, request):
                return

    def _window_is_open(self) -> bool:
        room = self._settings.offer_window - self._book.count(S.ACCEPTED)
        unanswered = self._offers.unanswered
        return len(unanswered) < room or sum(not self._is_silent(offer) for offer in unanswered.values()) < room

    def _is_silent(self, offer: Offer) -> bool:
        peer = self._peers.get(offer.instance, offer.incarnation)
        return peer is not None and peer.silent

    def _hold_memory(self, now_ns: int, request: PrefillRequest) -> bool:
        """Memory here for the whole prefill; an online request takes it from offline ones that have not begun."""
        needed = self._pool.blocks_for(request.sequence.prefill_end)
        while not self._pool.fits(needed):
            if not request.is_online or not self.withdraw_offline(now_ns):
                return False
        request.sequence.holding = self._pool.hold(request.sequence.owner, needed)
        return request.sequence.holding is not None

    def withdraw_offline(self, now_ns: int) -> bool:
        """Take back the youngest offline request that is offered but has not begun; False when there is none."""
        request = self._book.youngest_offline
        if request is None:
            return False
        if request.offer is not None:
            request.asked.discard(request.offer.instance)  # it did not refuse
        self.ask_back(request, "an online request needs the room")
        self.let_go(request)
        self._book.move(now_ns, request, E.WITHDRAW)
        return True

    def _offer(self, now_ns: int, request: PrefillRequest) -> bool:
        """Ask the next decode instance, or step aside when nobody is left to ask. False: nobody can be asked now."""
        peer = self._peers.choose(request.asked)
        if peer is None:
            candidates = [peer for peer in self._peers.usable if peer.info.instance not in request.asked]
            if candidates:
                self.let_go(request)
                return False  # all of them have enough unanswered offers
            if not self._peers.usable:
                request.last_refusal = "no decode instance is linked"
            self._back_off(now_ns, request)
            return True
        epoch = request.next_epoch
        while self._offers.is_taken(request.submit.request_id, epoch) and epoch != request.sequence.epoch:
            epoch += 1
        request.next_epoch = epoch + 1
        request.asked.add(peer.info.instance)
        request.offer = self._offers.make(now_ns, request.submit, epoch, peer.info.instance, peer.info.incarnation)
        self._book.move(now_ns, request, E.OFFER)
        return True

    def _back_off(self, now_ns: int, request: PrefillRequest) -> None:
        """Everybody was asked: wait, or fail when that was the last round."""
        request.rounds += 1
        limit = self._settings.offer_attempts_max
        usable = self._peers.usable
        if usable and all(peer.info.instance in request.too_large for peer in usable):
            self._fail(now_ns, request, 413, next(iter(request.too_large.values())))
        elif request.rounds >= limit:
            reason = f"no decode instance took it in {limit} rounds (offer_attempts_max): {request.last_refusal}"
            self._fail(now_ns, request, 503, reason, retryable=True)
        else:
            self.let_go(request)
            request.asked = set(request.too_large)
            self._book.move(now_ns, request, E.BACK_OFF)
            delay_ms = backoff_ms(self._settings, request.submit.request_id, request.rounds)
            self._out.start_request_timer("retry", request.submit.request_id, request.submit.epoch, delay_ms)

    def mark_silent(self, offer: Offer) -> None:
        """Its decode instance does not answer: pass it over until it says anything."""
        peer = self._peers.get(offer.instance, offer.incarnation)
        if peer is not None:
            peer.silent = True

    def ask_back(self, request: PrefillRequest, reason: str) -> None:
        """Give up the current offer of a request, if it has one."""
        if request.offer is not None:
            self._offers.give_up(request.offer, reason)
            request.offer = None

    def let_go(self, request: PrefillRequest) -> None:
        """Give up the memory of a request whose prefill has not begun; one that has begun keeps it."""
        if request.state in (S.QUEUED, S.OFFERING, S.ACCEPTED):
            self._batcher.remove(request.sequence)
            self._batcher.release(request.sequence)
