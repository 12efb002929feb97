"""A prefill instance's side of the hand-off.

Theory of operation
===================

A request is one gateway attempt; its states and what moves it on are ``transitions.PREFILL``. Each offer of it to a
decode instance uses an epoch of its own (see offers.py), so an answer is about one offer and no other.

Order of resources. A request first holds its memory here, then asks for memory there, and lets go of both when it is
refused. So whoever waits for a decode instance never holds what another one needs to get rid of its own: two requests
of half a pool each cannot block each other (C22). A request that lost its decode instance after prefill keeps its
memory and is offered again, without a second prefill.

The window. Requests are offered in order, online before offline, while fewer than ``offer_window`` are offered or
accepted and not yet prefilling. A refused one steps aside (BACKOFF, with growing, jittered delays and a bounded number
of rounds), so a full decode instance holds up nobody who fits elsewhere. An offer that is not answered in time is given
up and its decode instance counts as silent (see peers.py); offers to silent ones do not fill the window (C25).

Online and offline (C26). While an online request is queued, asks or backs off, no offline request is offered; when an
online request finds no room, here or there, offline ones that have not begun are withdrawn. An offline request that has
begun runs on: it holds what the online one waits for, and holds it no longer than its hand-off takes.

The end. The first token goes to the gateway from here. If it ends the request, the reservation is released; otherwise
``FirstGeneration`` goes to the decode instance, and everything is held until that says ``HandoffComplete``, gives it
back, or is dead. Half-way to ``handoff_timeout_ms`` ``FirstGeneration`` is sent once more (it, or its answer, may have
been lost); after the whole of it the request is offered elsewhere, and the old offer stays open until it is confirmed
as released.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from actors.runtime.machine import StatusRequests
from actors.scheduler.batching import Batcher, Outcome, Step
from actors.scheduler.blocks import CachePool
from actors.scheduler.intake import Intake
from actors.scheduler.offers import Offer, Offers, backoff_ms
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import Peers
from actors.scheduler.prefill_request import PrefillRequest, queue_key
from actors.scheduler.report import FinishReason, fail_request, finish_request, stream_tokens
from actors.scheduler.settings import SchedulerSettings
from actors.scheduler.transitions import PREFILL, PrefillEvent, PrefillState, next_state
from messages.base import Message
from messages.handoff import (
    HandoffComplete,
    HandoffFailed,
    ReleaseRequest,
    RequestAccepted,
    RequestRefused,
    RequestReleased,
)
from messages.requests import CancelRequest, SubmitRequest
from messages.timers import RequestTimer
from messages.transfer import PushFailed

S, E = PrefillState, PrefillEvent

WAITS_FOR_DECODE = (S.QUEUED, S.OFFERING, S.BACKOFF, S.PREFILLED, S.REOFFERING, S.STRANDED)
"""In these states an online request keeps offline ones from being offered."""


class PrefillSide:
    """See the module's theory."""

    def __init__(
        self,
        settings: SchedulerSettings,
        intake: Intake,
        pool: CachePool,
        batcher: Batcher,
        peers: Peers,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._intake = intake
        self._pool = pool
        self._batcher = batcher
        self._peers = peers
        self._out = out
        self._chunk_tokens = batcher.limits.max_tokens_per_chunk or batcher.limits.max_tokens_per_batch
        self.offers = Offers(settings, pool, peers, out)
        self._requests: dict[str, PrefillRequest] = {}
        self._queue: list[PrefillRequest] = []  # QUEUED, in order
        self._ready: list[PrefillRequest] = []  # PREFILLED, in order
        self._count: Counter[PrefillState] = Counter()  # requests by state
        self._online: Counter[PrefillState] = Counter()  # online requests by state

    @property
    def live_count(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def waiting_count(self) -> int:
        """Requests whose prefill has not begun."""
        return sum(self._count[state] for state in (S.QUEUED, S.OFFERING, S.BACKOFF, S.ACCEPTED))

    def handle(self, now_ns: int, sender: str, message: Message) -> bool:
        """React to a message about a request; whether it was one for this side."""
        match message:
            case SubmitRequest():
                self._on_submit_request(now_ns, message)
            case CancelRequest():
                self._on_cancel_request(now_ns, message)
            case RequestAccepted():
                self._on_request_accepted(now_ns, sender, message)
            case RequestRefused():
                self._on_request_refused(now_ns, message)
            case HandoffComplete():
                self._on_handoff_complete(now_ns, message)
            case HandoffFailed():
                self._on_given_back(now_ns, message, message.reason)
            case RequestReleased():
                self._on_given_back(now_ns, message, "the decode instance released it")
            case PushFailed():
                self._on_push_failed(message)
            case _:
                return False
        return True

    # -- the gateway ---------------------------------------------------------------------------------------------

    def _on_submit_request(self, now_ns: int, message: SubmitRequest) -> None:
        old = self._requests.get(message.request_id)
        if old is not None and message.epoch <= old.submit.epoch:
            return
        if old is not None:
            self._end(now_ns, old, "superseded by a newer attempt")
        sequence = self._intake.take(now_ns, message, self.waiting_count)
        if sequence is None:
            return
        while self.offers.is_taken(message.request_id, sequence.epoch):
            sequence.epoch += 1
        request = PrefillRequest(message, sequence, now_ns)
        self._requests[message.request_id] = request
        self._enter(request)

    def _on_cancel_request(self, now_ns: int, message: CancelRequest) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            self._intake.cancels.remember(now_ns, message.request_id, message.epoch)
        elif request.submit.epoch <= message.epoch:
            self._end(now_ns, request, message.reason)
            self._finish(request, "cancelled")

    # -- offering ------------------------------------------------------------------------------------------------

    def before_step(self, now_ns: int) -> None:
        """Offer what can be offered: first requests that lost their decode instance, then the head of the queue."""
        while self._ready and self._offer(now_ns, self._ready[0]):
            pass
        while self._queue and self._window_is_open():
            request = self._queue[0]
            if not request.is_online and any(self._online[state] for state in WAITS_FOR_DECODE):
                return
            if not self._hold_memory(now_ns, request) or not self._offer(now_ns, request):
                return

    def _window_is_open(self) -> bool:
        asking = sum(not offer.answered and not self._is_silent(offer) for offer in self.offers.open.values())
        return self._count[S.ACCEPTED] + asking < self._settings.offer_window

    def _is_silent(self, offer: Offer) -> bool:
        peer = self._peers.get(offer.instance, offer.incarnation)
        return peer is not None and peer.silent

    def _hold_memory(self, now_ns: int, request: PrefillRequest) -> bool:
        """Memory here for the whole prompt; an online request takes it from offline ones that have not begun."""
        needed = self._pool.blocks_for(request.sequence.total)
        while not self._pool.fits(needed):
            if not request.is_online or not self._withdraw_offline(now_ns):
                return False
        request.sequence.holding = self._pool.hold(request.sequence.owner, needed)
        return request.sequence.holding is not None

    def _withdraw_offline(self, now_ns: int) -> bool:
        """Take back the youngest offline request that is offered but has not begun; False when there is none."""
        for request in reversed(self._requests.values()):
            if not request.is_online and request.state in (S.OFFERING, S.ACCEPTED):
                if request.offer is not None:
                    request.asked.discard(request.offer.instance)  # it did not refuse
                self._ask_back(request, "an online request needs the room")
                self._let_go(request)
                self._move(now_ns, request, E.WITHDRAW)
                return True
        return False

    def _offer(self, now_ns: int, request: PrefillRequest) -> bool:
        """Ask the next decode instance, or step aside when nobody is left to ask. False: nobody can be asked now."""
        peer = self._peers.choose(request.asked)
        if peer is None:
            candidates = [peer for peer in self._peers.usable if peer.info.instance not in request.asked]
            if candidates:
                self._let_go(request)
                return False  # all of them have enough unanswered offers
            if not self._peers.usable:
                request.last_refusal = "no decode instance is linked"
            self._back_off(now_ns, request)
            return True
        epoch = request.next_epoch
        while self.offers.is_taken(request.submit.request_id, epoch) and epoch != request.sequence.epoch:
            epoch += 1
        request.next_epoch = epoch + 1
        request.asked.add(peer.info.instance)
        request.offer = self.offers.make(now_ns, request.submit, epoch, peer.info.instance, peer.info.incarnation)
        self._move(now_ns, request, E.OFFER)
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
            self._let_go(request)
            request.asked = set(request.too_large)
            self._move(now_ns, request, E.BACK_OFF)
            delay_ms = backoff_ms(self._settings, request.submit.request_id, request.rounds)
            self._out.start_request_timer("retry", request.submit.request_id, request.submit.epoch, delay_ms)

    # -- what decode instances answer ----------------------------------------------------------------------------

    def _on_request_accepted(self, now_ns: int, sender: str, message: RequestAccepted) -> None:
        self._peers.heard_from(message.instance, message.incarnation)
        offer = self.offers.find(message.request_id, message.epoch, message.instance, message.incarnation)
        if offer is None or offer.accepted is not None:
            self._out.drop_late(message, message.request_id, message.epoch)
            if offer is None and not self._peers.is_dead(message.instance, message.incarnation):
                reason = "this offer is over"
                self._out.send(
                    sender, ReleaseRequest(request_id=message.request_id, epoch=message.epoch, reason=reason)
                )
            return
        request = self._current(offer)
        if request is None:
            return  # it is being asked back
        self.offers.accept(now_ns, offer, message)
        request.asked = set(request.too_large)
        if request.state is S.REOFFERING:
            self._move(now_ns, request, E.ACCEPT)
            ready_tokens = request.sequence.computed
            request.chunk_count = -(-ready_tokens // self._chunk_tokens) if self._settings.mode == "PUSH" else 0
            self.offers.open_push(offer, request.sequence, ready_tokens=ready_tokens)
            self._hand_off(request, offer)
            return
        sequence = request.sequence
        sequence.epoch = offer.epoch
        sequence.push = self._settings.mode == "PUSH"
        self._move(now_ns, request, E.ACCEPT)
        self._batcher.resume(sequence)

    def _on_request_refused(self, now_ns: int, message: RequestRefused) -> None:
        self._peers.heard_from(message.instance, message.incarnation)
        offer = self.offers.find(message.request_id, message.epoch, message.instance, message.incarnation)
        if offer is None:
            self._out.drop_late(message, message.request_id, message.epoch)
            return
        request = self._current(offer)
        self.offers.close(offer)
        if request is None:
            return
        request.offer = None
        request.last_refusal = f"{message.instance}: {message.reason}"
        if message.code in (400, 409):
            self._fail(now_ns, request, message.code, message.reason)
            return
        if message.code == 413:
            request.too_large[message.instance] = message.reason
        self._let_go(request)
        self._move(now_ns, request, E.REFUSE)
        if request.is_online and message.code == 404:
            self._withdraw_offline(now_ns)

    def _on_handoff_complete(self, now_ns: int, message: HandoffComplete) -> None:
        self._peers.heard_from(message.instance, message.incarnation)
        offer = self.offers.find(message.request_id, message.epoch, message.instance, message.incarnation)
        request = self._current(offer)
        if offer is None or request is None or request.state is not S.HANDED_OFF:
            self._out.drop_late(message, message.request_id, message.epoch)  # one that is asked back will be released
            return
        self.offers.close(offer)
        request.offer = None
        self._leave(now_ns, request, E.COMPLETE)

    def _on_given_back(self, now_ns: int, message: HandoffFailed | RequestReleased, reason: str) -> None:
        self._peers.heard_from(message.instance, message.incarnation)
        offer = self.offers.find(message.request_id, message.epoch, message.instance, message.incarnation)
        if offer is None:
            self._out.drop_late(message, message.request_id, message.epoch)
            return
        self._lose(now_ns, offer, reason)

    def _lose(self, now_ns: int, offer: Offer, reason: str) -> None:
        """An offer is over without completion. Its request, if this was its current one, looks for another."""
        request = self._current(offer)
        self.offers.close(offer)
        if request is None:
            return
        request.offer = None
        request.last_refusal = f"{offer.instance}: {reason}"
        self._out.note(
            "warning", "hand-off lost", request_id=offer.request_id, decode_instance=offer.instance, reason=reason
        )
        self._homeless(now_ns, request)

    def _homeless(self, now_ns: int, request: PrefillRequest) -> None:
        """Its decode instance is gone: look for another, or go on without one until the first token is here."""
        self._let_go(request)
        request.sequence.push = False
        self._move(now_ns, request, E.LOSE)

    def _on_push_failed(self, message: PushFailed) -> None:
        """The decode instance learns of it too, gives the attempt up and says so; nothing is to be done here."""
        self._out.note(
            "warning",
            "push failed",
            request_id=message.request_id,
            rank=message.source_rank,
            decode_instance=message.target_instance,
            reason=message.reason,
        )

    def on_instance_lost(self, now_ns: int, instance: str, incarnation: int) -> None:
        """Offers to a dead decode instance are over: nothing of it reads or writes any more."""
        for offer in list(self.offers.open.values()):
            if offer.instance == instance and offer.incarnation <= incarnation:
                self._lose(now_ns, offer, f"incarnation {offer.incarnation} is dead")
        for request in self._requests.values():
            request.too_large.pop(instance, None)
            request.asked.discard(instance)

    def on_peer_linked(self, now_ns: int) -> None:
        """Whoever steps aside is offered again at once."""
        for request in list(self._requests.values()):
            self._retry(now_ns, request)

    def on_timer(self, now_ns: int, message: RequestTimer) -> None:
        """An offer was not answered, a hand-off not confirmed, a release not confirmed, or a backoff is over."""
        if message.purpose == "retry":
            request = self._requests.get(message.request_id)
            if request is not None and request.submit.epoch == message.epoch:
                self._retry(now_ns, request)
            return
        offer = self.offers.open.get((message.request_id, message.epoch))
        if offer is None:
            return
        if message.purpose == "release" and offer.releasing:
            self.offers.ask_back(offer, "asked back again")
        elif message.purpose == "offer" and not offer.answered:
            self._on_silence(now_ns, offer, f"no answer within {self._settings.offer_timeout_ms:.0f} ms")
        elif message.purpose == "handoff" and not offer.releasing:
            request = self._current(offer)
            if request is None or request.state is not S.HANDED_OFF:
                return
            if not offer.probed:
                offer.probed = True
                self.offers.hand_off(offer, request.first_generation(offer, self._settings))
            else:
                limit_ms = self._settings.handoff_timeout_ms
                self._on_silence(now_ns, offer, f"no HandoffComplete within handoff_timeout_ms {limit_ms:.0f}")

    def _on_silence(self, now_ns: int, offer: Offer, reason: str) -> None:
        """Ask the offer back and try elsewhere; the silent decode instance is passed over from now on."""
        peer = self._peers.get(offer.instance, offer.incarnation)
        if peer is not None:
            peer.silent = True
        self._out.note(
            "warning", "decode instance is silent", request_id=offer.request_id, instance=offer.instance, reason=reason
        )
        request = self._current(offer)
        self.offers.give_up(offer, reason)
        if request is not None:
            request.offer = None
            request.last_refusal = f"{offer.instance}: {reason}"
            self._homeless(now_ns, request)

    def _retry(self, now_ns: int, request: PrefillRequest) -> None:
        if request.state in (S.BACKOFF, S.STRANDED):
            self._out.stop_request_timer("retry", request.submit.request_id, request.submit.epoch)
            self._move(now_ns, request, E.RETRY)

    # -- prefilling ----------------------------------------------------------------------------------------------

    def on_step_started(self, now_ns: int, step: Step) -> None:
        """First chunks: open the pushes before the ranks compute anything to push."""
        for sequence in step.started:
            request = self._requests.get(sequence.request_id)
            if request is not None and request.sequence is sequence and request.state is S.ACCEPTED:
                assert request.offer is not None
                self.offers.open_push(request.offer, sequence, ready_tokens=0)
                self._move(now_ns, request, E.START)
                request.started(now_ns)

    def on_outcomes(self, now_ns: int, outcomes: list[Outcome]) -> None:
        """First tokens: stream them, and hand the requests off that go on."""
        for outcome in outcomes:
            request = self._requests.get(outcome.sequence.request_id)
            if request is None or request.sequence is not outcome.sequence:
                continue
            stream_tokens(self._out, request.submit.reply_to, outcome.sequence.epoch, outcome)
            if outcome.error:
                self._fail(now_ns, request, 500, outcome.error)
                continue
            request.sampled(now_ns, outcome)
            if outcome.reason is not None:
                self._end(now_ns, request, "ended at its first token")
                self._finish(request, outcome.reason, outcome.stop_token_id)
                continue
            self._move(now_ns, request, E.SAMPLE)
            if request.offer is not None:
                self._hand_off(request, request.offer)

    def _hand_off(self, request: PrefillRequest, offer: Offer) -> None:
        self.offers.hand_off(offer, request.first_generation(offer, self._settings))

    # -- ends ----------------------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        """Take nothing new; answer with ``reason``."""
        self._intake.closed_because = reason

    def fail_all(self, now_ns: int, reason: str) -> None:
        """End every request with a retryable error (the instance stops)."""
        for request in list(self._requests.values()):
            self._fail(now_ns, request, 503, reason, retryable=True)

    def _fail(self, now_ns: int, request: PrefillRequest, code: int, reason: str, *, retryable: bool = False) -> None:
        submit = request.submit
        self._end(now_ns, request, reason)
        fail_request(self._out, submit.reply_to, submit.request_id, request.epoch, code, reason, retryable=retryable)

    def _finish(self, request: PrefillRequest, reason: FinishReason, stop_token_id: int = -1) -> None:
        finish_request(
            self._out,
            request.submit.reply_to,
            request.epoch,
            request.sequence,
            reason,
            request.times,
            stop_token_id=stop_token_id,
            prefill_instance=self._settings.instance,
        )

    def _end(self, now_ns: int, request: PrefillRequest, reason: str) -> None:
        """Over here, whatever it does: ask back what a decode instance has of it."""
        self._ask_back(request, reason)
        if request.state in (S.BACKOFF, S.STRANDED):
            self._out.stop_request_timer("retry", request.submit.request_id, request.submit.epoch)
        self._leave(now_ns, request, E.END)

    def _leave(self, now_ns: int, request: PrefillRequest, event: PrefillEvent) -> None:
        self._move(now_ns, request, event)
        del self._requests[request.submit.request_id]
        self._intake.cancels.ended(request.submit.request_id, request.submit.epoch)
        self._batcher.remove(request.sequence)
        self._batcher.release(request.sequence)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _current(self, offer: Offer | None) -> PrefillRequest | None:
        """The request whose current offer this is; None when it has ended or moved on."""
        request = self._requests.get(offer.request_id) if offer is not None else None
        return request if request is not None and request.offer is offer else None

    def _ask_back(self, request: PrefillRequest, reason: str) -> None:
        if request.offer is not None:
            self.offers.give_up(request.offer, reason)
            request.offer = None

    def _let_go(self, request: PrefillRequest) -> None:
        """Give up the memory of a request whose prefill has not begun; one that has begun keeps it."""
        if request.state in (S.QUEUED, S.OFFERING, S.ACCEPTED):
            self._batcher.remove(request.sequence)
            self._batcher.release(request.sequence)

    def _move(self, now_ns: int, request: PrefillRequest, event: PrefillEvent) -> None:
        """To the next state, and into the list that goes with it."""
        state = next_state(PREFILL, request.state, event)
        self._count[request.state] -= 1
        self._online[request.state] -= request.is_online
        if request.state is S.QUEUED:
            self._queue.remove(request)
        elif request.state is S.PREFILLED:
            self._ready.remove(request)
        request.state = state
        request.since_ns = now_ns
        if state is not S.ENDED:
            self._enter(request)

    def _enter(self, request: PrefillRequest) -> None:
        self._count[request.state] += 1
        self._online[request.state] += request.is_online
        if request.state is S.QUEUED:
            insort(self._queue, request, key=queue_key)
        elif request.state is S.PREFILLED:
            insort(self._ready, request, key=queue_key)

    def status(self) -> StatusRequests:
        """One row per live request."""
        return tuple(
            (
                request.submit.request_id,
                request.epoch,
                request.state.value,
                self._waits_for(request),
                request.since_ns,
            )
            for request in self._requests.values()
        )

    def _waits_for(self, request: PrefillRequest) -> str:
        target = request.offer.instance if request.offer is not None else ""
        step = f"step {self._batcher.step.number}" if self._batcher.step is not None else "the next step"
        match request.state:
            case S.QUEUED:
                return "its turn to be offered"
            case S.OFFERING | S.REOFFERING:
                return f"RequestAccepted of {target}"
            case S.BACKOFF | S.STRANDED:
                return f"the next round ({request.last_refusal})"
            case S.ACCEPTED | S.PREFILLING | S.ORPHANED:
                return step
            case S.HANDED_OFF:
                return f"HandoffComplete of {target}"
            case _:
                return "a decode instance"
