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

The end. The first token goes to the gateway from here, unless an earlier attempt delivered it: then the prefill ends
before the last delivered token, which takes the first one's place in the hand-off. If it ends the request, the
reservation is released; otherwise ``FirstGeneration`` goes to the decode instance, and everything is held until that
says ``HandoffComplete``, gives it back, or is dead. If it says nothing for as long as an offer may take,
``FirstGeneration`` is sent once more (it, or its answer, may have been lost) and the decode instance counts as silent;
after ``handoff_timeout_ms`` the request is offered elsewhere, and the old offer stays open until it is confirmed as
released.

Samples of one prompt (see ``siblings.py``). A follower is not offered before its leader's prompt is complete
(FOLLOWING). Its first token comes with its leader's, and from then on it is a request whose state is ready but which no
decode instance has (PREFILLED): it is offered, pushed and handed off like one that lost its decode instance. All of
them read the leader's memory, which is freed when the last one's hand-off is complete.
"""

from __future__ import annotations

from actors.runtime.machine import Handlers, StatusRequests
from actors.scheduler.batching import Batcher, Outcome, Step
from actors.scheduler.blocks import CachePool
from actors.scheduler.intake import Intake
from actors.scheduler.offering import Offering
from actors.scheduler.offers import Offer, Offers
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import Peers
from actors.scheduler.prefill_request import PrefillBook, PrefillRequest
from actors.scheduler.report import FinishReason, fail_request, finish_request, stream_tokens
from actors.scheduler.sequence import Sequence
from actors.scheduler.settings import SchedulerSettings
from actors.scheduler.siblings import gather, part, samples_of
from actors.scheduler.transitions import PrefillEvent, PrefillState
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
from messages.transfer import PushClosed, PushFailed

S, E = PrefillState, PrefillEvent


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
        self._batcher = batcher
        self._peers = peers
        self._out = out
        self._chunk_tokens = batcher.limits.max_tokens_per_chunk or batcher.limits.max_tokens_per_batch
        self.offers = Offers(settings, pool, peers, out)
        self._book = PrefillBook()
        self._offering = Offering(settings, pool, batcher, peers, out, self._book, self.offers, self._fail)

    def handlers(self) -> Handlers[None]:
        """What is done with messages about requests."""
        handlers: Handlers[None] = Handlers()
        on = handlers.on
        on(SubmitRequest, self._on_submit_request)
        on(CancelRequest, self.on_cancel_request)
        on(RequestAccepted, self._on_request_accepted)
        on(RequestRefused, self._on_request_refused)
        on(HandoffComplete, self._on_handoff_complete)
        on(HandoffFailed, self._on_handoff_failed)
        on(RequestReleased, self._on_request_released)
        on(PushFailed, self._on_push_failed)
        on(PushClosed, self._on_push_closed)
        return handlers

    @property
    def live_count(self) -> int:
        """Requests that have not ended."""
        return len(self._book.requests)

    @property
    def waiting_count(self) -> int:
        """Requests whose prefill has not begun."""
        return self._book.count(S.FOLLOWING, S.QUEUED, S.OFFERING, S.BACKOFF, S.ACCEPTED)

    # -- the gateway ---------------------------------------------------------------------------------------------

    def _on_submit_request(self, now_ns: int, sender: str, message: SubmitRequest) -> None:
        taken: list[PrefillRequest] = []
        for submit in samples_of(message):
            old = self._book.requests.get(submit.request_id)
            if old is not None and submit.epoch <= old.submit.epoch:
                continue
            if old is not None:
                self._end(now_ns, old, "superseded by a newer attempt")
            sequence = self._intake.take(now_ns, submit, self.waiting_count + len(taken))
            if sequence is None:
                continue
            while self.offers.is_taken(submit.request_id, sequence.epoch):
                sequence.epoch += 1
            taken.append(PrefillRequest(submit, sequence, now_ns))
        gather([request.sequence for request in taken])
        for request in taken:
            self._book.add(request)
            if request.sequence.leader is not None:
                self._book.move(now_ns, request, E.FOLLOW)

    def on_cancel_request(self, now_ns: int, sender: str, message: CancelRequest) -> None:
        """Nobody waits for this request any more."""
        request = self._book.requests.get(message.request_id)
        if request is None:
            self._intake.cancels.remember(now_ns, message.request_id, message.epoch)
        elif request.submit.epoch <= message.epoch:
            self._end(now_ns, request, message.reason)
            self._finish(request, "cancelled")

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
            self._book.move(now_ns, request, E.ACCEPT)
            ready_tokens = request.sequence.computed
            request.chunk_count = -(-ready_tokens // self._chunk_tokens) if self._settings.mode == "PUSH" else 0
            self.offers.open_push(offer, request.sequence, ready_tokens=ready_tokens)
            self._hand_off(request, offer)
            return
        sequence = request.sequence
        sequence.epoch = offer.epoch
        sequence.push = self._settings.mode == "PUSH"
        self._book.move(now_ns, request, E.ACCEPT)
        self._batcher.resume(sequence)

    def _on_request_refused(self, now_ns: int, sender: str, message: RequestRefused) -> None:
        self._peers.heard_from(message.instance, message.incarnation)
        offer = self.offers.find(message.request_id, message.epoch, message.instance, message.incarnation)
        if offer is None or offer.accepted is not None:  # a doubled offer is refused after it was taken
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
        self._offering.let_go(request)
        self._book.move(now_ns, request, E.REFUSE)
        if request.is_online and message.code == 404:
            self._offering.withdraw_offline(now_ns)

    def _on_handoff_complete(self, now_ns: int, sender: str, message: HandoffComplete) -> None:
        self._peers.heard_from(message.instance, message.incarnation)
        offer = self.offers.find(message.request_id, message.epoch, message.instance, message.incarnation)
        request = self._current(offer)
        if offer is None or request is None or request.state is not S.HANDED_OFF:
            self._out.drop_late(message, message.request_id, message.epoch)  # one that is asked back will be released
            return
        self.offers.close(offer)
        request.offer = None
        self._leave(now_ns, request, E.COMPLETE)

    def _on_handoff_failed(self, now_ns: int, sender: str, message: HandoffFailed) -> None:
        self._on_given_back(now_ns, message, message.reason)

    def _on_request_released(self, now_ns: int, sender: str, message: RequestReleased) -> None:
        self._on_given_back(now_ns, message, "the decode instance released it")

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
        self._offering.let_go(request)
        request.sequence.push = False
        self._book.move(now_ns, request, E.LOSE)

    def _on_push_failed(self, now_ns: int, sender: str, message: PushFailed) -> None:
        """The decode instance learns of it too, gives the attempt up and says so; nothing is to be done here."""
        self._out.note(
            "warning",
            "push failed",
            request_id=message.request_id,
            rank=message.source_rank,
            decode_instance=message.target_instance,
            reason=message.reason,
        )

    def _on_push_closed(self, now_ns: int, sender: str, message: PushClosed) -> None:
        if not self.offers.push_closed((message.request_id, message.epoch)):
            self._out.drop_late(message, message.request_id, message.epoch)

    def on_instance_lost(self, now_ns: int, instance: str, incarnation: int) -> None:
        """Offers to a dead decode instance are over: nothing of it reads or writes any more."""
        for offer in list(self.offers.open.values()):
            if offer.instance == instance and offer.incarnation <= incarnation:
                self._lose(now_ns, offer, f"incarnation {offer.incarnation} is dead")
        for request in self._book.requests.values():
            request.too_large.pop(instance, None)
            request.asked.discard(instance)

    def on_peer_linked(self, now_ns: int) -> None:
        """Whoever steps aside is offered again at once."""
        for request in list(self._book.requests.values()):
            self._retry(now_ns, request)

    def on_timer(self, now_ns: int, message: RequestTimer) -> None:
        """An offer was not answered, a hand-off not confirmed, a release not confirmed, or a backoff is over."""
        if message.purpose == "retry":
            request = self._book.requests.get(message.request_id)
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
                self._offering.mark_silent(offer)
                self.offers.hand_off(offer, request.first_generation(offer, self._settings))
            else:
                limit_ms = self._settings.handoff_timeout_ms
                self._on_silence(now_ns, offer, f"no HandoffComplete within handoff_timeout_ms {limit_ms:.0f}")

    def _on_silence(self, now_ns: int, offer: Offer, reason: str) -> None:
        """Ask the offer back and try elsewhere; the silent decode instance is passed over from now on."""
        self._offering.mark_silent(offer)
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
            self._book.move(now_ns, request, E.RETRY)

    # -- prefilling ----------------------------------------------------------------------------------------------

    @property
    def waits_for_steps(self) -> bool:
        """Nobody does."""
        return False

    def before_step(self, now_ns: int) -> None:
        """Offer what can be offered."""
        self._offering.advance(now_ns)

    def on_step_started(self, now_ns: int, step: Step) -> None:
        """First chunks: open the pushes before the ranks compute anything to push."""
        for sequence in [begun for leader in step.started for begun in (leader, *leader.followers)]:
            request = self._book.requests.get(sequence.request_id)
            if request is None or request.sequence is not sequence:
                continue
            request.started(now_ns)
            if request.state is S.ACCEPTED:
                assert request.offer is not None
                self.offers.open_push(request.offer, sequence, ready_tokens=0)
                self._book.move(now_ns, request, E.START)
        for leader in step.left_behind:
            self._lead(now_ns, part(leader))

    def _lead(self, now_ns: int, sequences: list[Sequence]) -> None:
        """These followers compute their prompt themselves."""
        for sequence in sequences:
            self._book.move(now_ns, self._book.requests[sequence.request_id], E.LEAD)

    def on_outcomes(self, now_ns: int, outcomes: list[Outcome]) -> None:
        """Complete prefills: stream first tokens, and hand the requests off that go on."""
        for outcome in outcomes:
            request = self._book.requests.get(outcome.sequence.request_id)
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
            self._book.move(now_ns, request, E.SAMPLE)
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
        for request in list(self._book.requests.values()):
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
        self._offering.ask_back(request, reason)
        if request.state in (S.BACKOFF, S.STRANDED):
            self._out.stop_request_timer("retry", request.submit.request_id, request.submit.epoch)
        self._leave(now_ns, request, E.END)

    def _leave(self, now_ns: int, request: PrefillRequest, event: PrefillEvent) -> None:
        self._book.move(now_ns, request, event)
        self._intake.cancels.ended(request.submit.request_id, request.submit.epoch)
        self._batcher.remove(request.sequence)
        self._batcher.release(request.sequence)
        self._lead(now_ns, part(request.sequence))

    # -- helpers -------------------------------------------------------------------------------------------------

    def _current(self, offer: Offer | None) -> PrefillRequest | None:
        """The request whose current offer this is; None when it has ended or moved on."""
        request = self._book.requests.get(offer.request_id) if offer is not None else None
        return request if request is not None and request.offer is offer else None

    def status(self) -> StatusRequests:
        """One row per live request."""
        step = f"step {self._batcher.step.number}" if self._batcher.step is not None else "the next step"
        return tuple(
            (name, request.epoch, request.state.value, request.waits_for(step), request.since_ns)
            for name, request in self._book.requests.items()
        )
