"""A decode instance's side of the hand-off.

Theory of operation
===================

An *attempt* is one offer of one request by one prefill instance, named ``(request id, epoch)``; the epoch is used once,
so whatever carries it is about this attempt and no other. Its states and what moves it on are ``transitions.DECODE``.

Memory for everything that decode needs at first (the prompt, the first token, the drafts) is held from the moment the
offer is taken on, and pinned ("receive") while any rank might still write to it: from ``ReserveLeases`` until all ranks
restored or said ``ReceiveReleased``. Giving an attempt up is always the same: release the memory, ask the engine to
release the receive, and answer the prefill instance when that is confirmed:

    it asked for it (ReleaseRequest)                          → RequestReleased
    restore failed, deadline, cancel, superseded              → HandoffFailed (never decoded after that)
    it is dead                                                → nobody to answer

An attempt that decodes needs nothing from its prefill instance any more; its death changes nothing. A
``ReleaseRequest`` still stops it: then the prefill instance has given this epoch up and offers the request elsewhere.

Room: an online offer may preempt offline sequences, which frees their memory when the step in flight is over (WAITING).
Nothing new is taken while preempted sequences wait for blocks: those resume first. What can never fit, even alone, is
refused with 413 and the numbers.

Attempts that ended are remembered (a bounded number): a late or doubled ``AddNewRequest`` of theirs is refused, a
doubled ``FirstGeneration`` of a completed one is answered with ``HandoffComplete`` again.
"""

from __future__ import annotations

import msgspec

from actors.runtime.machine import Handlers, StatusRequests
from actors.scheduler.attempts import Answers, Attempt, Attempts, Ending, same_source
from actors.scheduler.batching import Batcher, Outcome, Step
from actors.scheduler.blocks import CachePool
from actors.scheduler.intake import final_tokens
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import Peers
from actors.scheduler.report import FinishReason, fail_request, finish_request, ms_between, stream_tokens
from actors.scheduler.reservations import RECEIVE_PIN, Reservations, prompt_blocks
from actors.scheduler.settings import Capacity, SchedulerSettings
from actors.scheduler.transitions import DecodeEvent, DecodeState
from messages.base import attempt_of
from messages.handoff import AddNewRequest, FirstGeneration, ReleaseRequest
from messages.requests import CancelRequest, SubmitRequest
from messages.timers import RequestTimer
from messages.transfer import (
    AllRestored,
    LeasesRefused,
    LeasesReserved,
    PullKVCache,
    ReceiveReleased,
    ReleaseReceive,
    RestoreFailed,
)


class DecodeSide:
    """See the module's theory."""

    def __init__(
        self,
        settings: SchedulerSettings,
        capacity: Capacity,
        pool: CachePool,
        batcher: Batcher,
        peers: Peers,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._capacity = capacity
        self._pool = pool
        self._batcher = batcher
        self._peers = peers
        self._out = out
        self._attempts = Attempts()
        self._answers = Answers(settings.instance, settings.incarnation, peers, out)
        self._reservations = Reservations(settings, capacity, pool, batcher, peers, out, self._attempts, self._answers)
        self._arrivals = 0

    def handlers(self) -> Handlers[None]:
        """What is done with messages about requests."""
        handlers: Handlers[None] = Handlers()
        on = handlers.on
        on(AddNewRequest, self._on_add_new_request)
        on(FirstGeneration, self._on_first_generation)
        on(ReleaseRequest, self._on_release_request)
        on(LeasesReserved, self._on_leases_reserved)
        on(LeasesRefused, self._on_leases_refused)
        on(AllRestored, self._on_all_restored)
        on(RestoreFailed, self._on_restore_failed)
        on(ReceiveReleased, self._on_receive_released)
        on(CancelRequest, self.on_cancel_request)
        on(SubmitRequest, self._on_submit_request)
        return handlers

    @property
    def live_count(self) -> int:
        """Attempts that have not ended, draining ones too."""
        return len(self._attempts.live)

    @property
    def waiting_count(self) -> int:
        """Attempts that do not decode yet, or are preempted."""
        waiting = sum(attempt.state is not DecodeState.DECODING for attempt in self._attempts.live.values())
        return waiting + len(self._batcher.waiting)

    # -- reserving -----------------------------------------------------------------------------------------------

    def _on_add_new_request(self, now_ns: int, sender: str, offer: AddNewRequest) -> None:
        if self._peers.is_dead(offer.source_instance, offer.source_incarnation):
            self._out.drop_late(offer, offer.request_id, offer.epoch)
            return
        key = (offer.request_id, offer.epoch)
        known = self._attempts.live.get(key)
        if known is not None and same_source(known.offer, offer):
            self._out.drop_late(offer, *key)
            return
        if key in self._attempts.ended:
            self._answers.refuse(offer, 404, f"epoch {offer.epoch} has ended here: offer it under a newer one")
            return
        for other in self._attempts.of_request(offer.request_id):
            same_attempt = attempt_of(other.offer.epoch) == attempt_of(offer.epoch)
            if same_attempt and not same_source(other.offer, offer):
                self._answers.refuse(offer, 409, f"a request with id {offer.request_id} is in flight here")
                return
            if other.offer.epoch > offer.epoch:
                self._out.drop_late(offer, *key)
                return
            self._give_up(now_ns, other, f"superseded by epoch {offer.epoch}")
        refusal = self._reservations.refusal(offer)
        if refusal is not None:
            self._answers.refuse(offer, *refusal)
            return
        self._arrivals += 1
        attempt = Attempt(offer, self._arrivals, now_ns)
        self._attempts.add(attempt)
        self._reservations.reserve(now_ns, attempt)

    def _on_leases_reserved(self, now_ns: int, sender: str, message: LeasesReserved) -> None:
        attempt = self._find(message, DecodeState.RESERVING)
        if attempt is None or attempt.holding is None:
            return
        attempt.move(now_ns, DecodeEvent.GRANT)
        self._out.start_request_timer("reservation", *attempt.key, self._settings.reservation_timeout_ms)
        self._answers.accept(attempt, prompt_blocks(self._pool, attempt), attempt.holding.slot, message.leases)

    def _on_leases_refused(self, now_ns: int, sender: str, message: LeasesRefused) -> None:
        attempt = self._find(message, DecodeState.RESERVING)
        if attempt is None:
            return
        if attempt.holding is not None:
            self._pool.release(attempt.holding)
            self._pool.unpin(attempt.holding, RECEIVE_PIN)
        self._attempts.end(attempt, DecodeEvent.REFUSE, Ending.GIVEN_UP)
        self._answers.refuse(attempt.offer, 404, message.reason)

    # -- restoring -----------------------------------------------------------------------------------------------

    def _on_first_generation(self, now_ns: int, sender: str, message: FirstGeneration) -> None:
        key = (message.request_id, message.epoch)
        attempt = self._attempts.live.get(key)
        if attempt is None:
            self._answer_late_first(message)
            return
        if attempt.state is DecodeState.DECODING:
            self._answers.complete(attempt.offer)  # it was lost on its way
        if attempt.state is not DecodeState.RESERVED:
            self._out.drop_late(message, *key)
            return
        offer = attempt.offer
        expected = (offer.source_instance, offer.source_incarnation, attempt.first_index, attempt.total)
        seen = (message.source_instance, message.source_incarnation, message.token_index, message.computed_tokens)
        if expected != seen:
            self._give_up(now_ns, attempt, f"FirstGeneration says {seen}, the offer said {expected}")
            return
        attempt.first = message
        attempt.first_ns = now_ns
        attempt.move(now_ns, DecodeEvent.FIRST)
        self._out.stop_request_timer("reservation", *key)
        self._out.start_request_timer("restore", *key, self._settings.handoff_timeout_ms)
        self._out.send(
            self._settings.engine,
            PullKVCache(
                request_id=message.request_id,
                epoch=message.epoch,
                source_instance=message.source_instance,
                source_incarnation=message.source_incarnation,
                source_block_ids=message.source_block_ids,
                source_slot=message.source_slot,
                chunk_count=message.chunk_count,
                computed_tokens=message.computed_tokens,
            ),
        )

    def _answer_late_first(self, message: FirstGeneration) -> None:
        key = (message.request_id, message.epoch)
        self._out.drop_late(message, *key)
        if self._attempts.ended.get(key) is Ending.COMPLETED:
            self._answers.complete(message)
        else:
            self._answers.fail(message, f"{self._settings.instance} has no reservation for this epoch")

    def _on_all_restored(self, now_ns: int, sender: str, message: AllRestored) -> None:
        attempt = self._find(message, DecodeState.RESTORING)
        if attempt is None or attempt.holding is None:
            return
        offer = attempt.offer
        attempt.move(now_ns, DecodeEvent.RESTORE)
        self._out.stop_request_timer("restore", *attempt.key)
        self._pool.unpin(attempt.holding, RECEIVE_PIN)
        final = final_tokens(self._capacity, len(offer.prompt_token_ids), offer.sampling)
        attempt.sequence = attempt.restored(now_ns, message, final)
        self._batcher.resume(attempt.sequence)
        self._answers.complete(offer)

    def _on_restore_failed(self, now_ns: int, sender: str, message: RestoreFailed) -> None:
        attempt = self._attempts.live.get((message.request_id, message.epoch))
        if attempt is None or attempt.state in (DecodeState.DECODING, DecodeState.DRAINING):
            self._out.drop_late(message, message.request_id, message.epoch)
            return
        self._give_up(now_ns, attempt, f"rank {message.rank} cannot restore: {message.reason}")

    # -- giving up -----------------------------------------------------------------------------------------------

    def _on_release_request(self, now_ns: int, sender: str, message: ReleaseRequest) -> None:
        key = (message.request_id, message.epoch)
        attempt = self._attempts.live.get(key)
        if attempt is None:
            self._attempts.remember(key, self._attempts.ended.get(key, Ending.GIVEN_UP))
            self._answers.released(key, sender)
            return
        attempt.released_by_source = True
        self._give_up(now_ns, attempt, message.reason)

    def _give_up(self, now_ns: int, attempt: Attempt, reason: str) -> None:
        """End an attempt, whatever it does; its prefill instance is answered when no writer is left."""
        match attempt.state:
            case DecodeState.DRAINING:
                return
            case DecodeState.WAITING:
                self._attempts.end(attempt, DecodeEvent.END, Ending.GIVEN_UP)
                self._answers.given_up(attempt, reason)
            case DecodeState.DECODING:
                if attempt.sequence is not None:
                    self._batcher.remove(attempt.sequence)
                    self._batcher.release(attempt.sequence)
                self._attempts.end(attempt, DecodeEvent.END, Ending.COMPLETED)
                if attempt.released_by_source:
                    self._answers.given_up(attempt, reason)
            case _:
                attempt.reason = reason
                attempt.move(now_ns, DecodeEvent.DRAIN)
                self._out.stop_request_timer("reservation", *attempt.key)
                self._out.stop_request_timer("restore", *attempt.key)
                if attempt.holding is not None:
                    self._pool.release(attempt.holding)
                self._out.send(self._settings.engine, ReleaseReceive(request_id=attempt.key[0], epoch=attempt.key[1]))
                self._out.note("info", "reservation given up", request_id=attempt.key[0], reason=reason)

    def _on_receive_released(self, now_ns: int, sender: str, message: ReceiveReleased) -> None:
        attempt = self._find(message, DecodeState.DRAINING)
        if attempt is None:
            return
        if attempt.holding is not None:
            self._pool.unpin(attempt.holding, RECEIVE_PIN)
        self._attempts.end(attempt, DecodeEvent.DRAINED, Ending.GIVEN_UP)
        self._answers.given_up(attempt, attempt.reason)

    def on_cancel_request(self, now_ns: int, sender: str, message: CancelRequest) -> None:
        """Nobody waits for this request any more."""
        for attempt in self._attempts.of_request(message.request_id):
            if attempt.offer.epoch > message.epoch:
                continue
            decoding = attempt.state is DecodeState.DECODING
            self._give_up(now_ns, attempt, message.reason)
            if decoding:
                self._finish(now_ns, attempt, "cancelled")

    def _on_submit_request(self, now_ns: int, sender: str, message: SubmitRequest) -> None:
        reason = f"{self._settings.instance} is a decode instance: submit to a prefill or mixed one"
        fail_request(self._out, message.reply_to, message.request_id, message.epoch, 503, reason, retryable=True)

    def on_timer(self, now_ns: int, message: RequestTimer) -> None:
        """A reservation or a restore took too long."""
        attempt = self._attempts.live.get((message.request_id, message.epoch))
        if attempt is None:
            return
        if message.purpose == "reservation" and attempt.state is DecodeState.RESERVED:
            limit_ms = self._settings.reservation_timeout_ms
            self._give_up(now_ns, attempt, f"no FirstGeneration within reservation_timeout_ms {limit_ms:.0f}")
        elif message.purpose == "restore" and attempt.state is DecodeState.RESTORING:
            limit_ms = self._settings.handoff_timeout_ms
            self._give_up(now_ns, attempt, f"not restored within handoff_timeout_ms {limit_ms:.0f}")

    def on_instance_lost(self, now_ns: int, instance: str, incarnation: int) -> None:
        """Reservations of a dead prefill instance are drained; what it handed off decodes on."""
        for attempt in list(self._attempts.live.values()):
            offer = attempt.offer
            is_of_it = offer.source_instance == instance and offer.source_incarnation <= incarnation
            if is_of_it and attempt.state is not DecodeState.DECODING:
                self._give_up(now_ns, attempt, f"{instance} incarnation {offer.source_incarnation} is dead")

    def on_peer_linked(self, now_ns: int) -> None:
        """Prefill instances ask; nothing waits for them here."""

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def waits_for_steps(self) -> bool:
        """Offers wait for the memory of sequences that a step in flight runs over."""
        return any(attempt.state is DecodeState.WAITING for attempt in self._attempts.live.values())

    def before_step(self, now_ns: int) -> None:
        """Offers that waited for the step to end get their memory, oldest first."""
        if self._batcher.step is None:
            for attempt in [a for a in self._attempts.live.values() if a.state is DecodeState.WAITING]:
                self._reservations.reserve(now_ns, attempt)

    def on_step_started(self, now_ns: int, step: Step) -> None:
        """Nothing depends on when a step starts."""

    def on_outcomes(self, now_ns: int, outcomes: list[Outcome]) -> None:
        """Stream what a step produced; end what has ended."""
        for outcome in outcomes:
            attempt = self._attempts.live.get(outcome.sequence.owner)
            if attempt is None or attempt.sequence is not outcome.sequence:
                continue
            stream_tokens(self._out, attempt.offer.reply_to, attempt.offer.epoch, outcome)
            if outcome.error:
                self._attempts.end(attempt, DecodeEvent.END, Ending.COMPLETED)
                fail_request(self._out, attempt.offer.reply_to, *attempt.key, 500, outcome.error)
            elif outcome.reason is not None:
                self._attempts.end(attempt, DecodeEvent.END, Ending.COMPLETED)
                self._finish(now_ns, attempt, outcome.reason, outcome.stop_token_id)

    def drain(self, reason: str) -> None:
        """Take nothing new; answer with ``reason``."""
        self._reservations.closed_because = reason

    def fail_all(self, now_ns: int, reason: str) -> None:
        """End everything with a retryable error (the instance stops)."""
        for attempt in list(self._attempts.live.values()):
            decoding = attempt.state is DecodeState.DECODING
            self._give_up(now_ns, attempt, reason)
            if decoding:
                fail_request(self._out, attempt.offer.reply_to, *attempt.key, 503, reason, retryable=True)

    def status(self) -> StatusRequests:
        """One row per live attempt."""
        step = f"step {self._batcher.step.number}" if self._batcher.step is not None else "the next step"
        return tuple(
            (*attempt.key, *attempt.standing(step), attempt.since_ns) for attempt in self._attempts.live.values()
        )

    # -- helpers -------------------------------------------------------------------------------------------------

    def _find(
        self, message: LeasesReserved | LeasesRefused | AllRestored | ReceiveReleased, state: DecodeState
    ) -> Attempt | None:
        """The attempt that ``message`` is about, when it is in ``state``; else the message is late."""
        attempt = self._attempts.live.get((message.request_id, message.epoch))
        if attempt is None or attempt.state is not state:
            self._out.drop_late(message, message.request_id, message.epoch)
            return None
        return attempt

    def _finish(self, now_ns: int, attempt: Attempt, reason: FinishReason, stop_token_id: int = -1) -> None:
        assert attempt.sequence is not None
        finish_request(
            self._out,
            attempt.offer.reply_to,
            attempt.offer.epoch,
            attempt.sequence,
            reason,
            msgspec.structs.replace(attempt.times, decode_ms=ms_between(attempt.since_ns, now_ns)),
            stop_token_id=stop_token_id,
            prefill_instance=attempt.offer.source_instance,
            decode_instance=self._settings.instance,
        )
