"""A mixed instance's requests: prefilled and decoded where they were submitted.

A request is waiting (no memory yet), prefilling, decoding or preempted; the batching core holds its sequence, unless it
follows another sample of its prompt (see ``siblings.py``). It ends
when it finishes, fails, is cancelled, or is superseded by a newer attempt of the same id. A second submission of the
same attempt is a duplicate and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.runtime.machine import Handlers, StatusRequests
from actors.scheduler.batching import Batcher, Outcome, Step
from actors.scheduler.intake import Intake
from actors.scheduler.outbox import Outbox
from actors.scheduler.report import FinishReason, fail_request, finish_request, ms_between, stream_tokens
from actors.scheduler.sequence import Sequence
from actors.scheduler.siblings import gather, part, samples_of
from messages.requests import CancelRequest, PhaseTimes, SubmitRequest
from messages.timers import RequestTimer


@dataclass(eq=False)
class LocalRequest:
    """One attempt of one request."""

    submit: SubmitRequest
    sequence: Sequence
    arrived_ns: int
    started_ns: int = 0
    first_token_ns: int = 0

    @property
    def since_ns(self) -> int:
        """Since when it is in its present state."""
        return self.first_token_ns or self.started_ns or self.arrived_ns


class LocalSide:
    """See the module's theory."""

    def __init__(self, instance: str, intake: Intake, batcher: Batcher, out: Outbox) -> None:
        self._instance = instance
        self._intake = intake
        self._batcher = batcher
        self._out = out
        self._requests: dict[str, LocalRequest] = {}

    def handlers(self) -> Handlers[None]:
        """What is done with messages about requests."""
        handlers: Handlers[None] = Handlers()
        on = handlers.on
        on(SubmitRequest, self._on_submit_request)
        on(CancelRequest, self.on_cancel_request)
        return handlers

    @property
    def live_count(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def waiting_count(self) -> int:
        """Requests of which nothing runs."""
        batcher = self._batcher
        return len(batcher.waiting) + sum(len(leader.followers) for leader in (*batcher.waiting, *batcher.running))

    def _on_submit_request(self, now_ns: int, sender: str, message: SubmitRequest) -> None:
        taken: list[Sequence] = []
        for submit in samples_of(message):
            old = self._requests.get(submit.request_id)
            if old is not None and submit.epoch <= old.submit.epoch:
                continue
            if old is not None:
                self._drop(old)
            sequence = self._intake.take(now_ns, submit, self.waiting_count + len(taken))
            if sequence is not None:
                self._requests[submit.request_id] = LocalRequest(submit, sequence, now_ns)
                taken.append(sequence)
        self._begin(gather(taken))

    def _begin(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._batcher.add(sequence)

    def on_cancel_request(self, now_ns: int, sender: str, message: CancelRequest) -> None:
        """Nobody waits for this request any more."""
        request = self._requests.get(message.request_id)
        if request is None:
            self._intake.cancels.remember(now_ns, message.request_id, message.epoch)
        elif request.submit.epoch <= message.epoch:
            self._drop(request)
            self._finish(now_ns, request, "cancelled")

    def on_timer(self, now_ns: int, message: RequestTimer) -> None:
        """No timers here."""

    def on_instance_lost(self, now_ns: int, instance: str, incarnation: int) -> None:
        """Nothing here depends on another instance."""

    def on_peer_linked(self, now_ns: int) -> None:
        """Nothing here depends on another instance."""

    @property
    def waits_for_steps(self) -> bool:
        """Nobody does."""
        return False

    def before_step(self, now_ns: int) -> None:
        """Nothing to prepare: the batching core takes requests from its own queue."""

    def on_step_started(self, now_ns: int, step: Step) -> None:
        """Note when a request's prompt began; followers that were left behind begin on their own."""
        for leader in step.started:
            for sequence in (leader, *leader.followers):
                request = self._requests.get(sequence.request_id)
                if request is not None and request.sequence is sequence and not request.started_ns:
                    request.started_ns = now_ns
        for leader in step.left_behind:
            self._begin(part(leader))

    def on_outcomes(self, now_ns: int, outcomes: list[Outcome]) -> None:
        """Stream what a step produced; end what has ended."""
        for outcome in outcomes:
            request = self._requests.get(outcome.sequence.request_id)
            if request is None or request.sequence is not outcome.sequence:
                continue
            stream_tokens(self._out, request.submit.reply_to, request.submit.epoch, outcome)
            if outcome.token_ids and not request.first_token_ns:
                request.first_token_ns = now_ns
            if outcome.error:
                self._forget(request)
                self._fail(request, 500, outcome.error)
            elif outcome.reason is not None:
                self._forget(request)
                self._finish(now_ns, request, outcome.reason, outcome.stop_token_id)

    def drain(self, reason: str) -> None:
        """Take nothing new; answer with ``reason``."""
        self._intake.closed_because = reason

    def fail_all(self, now_ns: int, reason: str) -> None:
        """End every request with a retryable error (the instance stops)."""
        for request in list(self._requests.values()):
            self._drop(request)
            self._fail(request, 503, reason, retryable=True)

    def status(self) -> StatusRequests:
        """One row per live request."""
        return tuple(self._row(request) for request in self._requests.values())

    def _row(self, request: LocalRequest) -> tuple[str, int, str, str, int]:
        sequence = request.sequence
        if sequence.leader is not None:
            state, waits_for = "following", f"the prompt that {sequence.leader.request_id} computes"
        elif sequence.holding is None:
            state = "preempted" if sequence.preempted_count else "waiting"
            waits_for = "blocks and a slot"
        else:
            state = "decoding" if sequence.is_decoding else "prefilling"
            waits_for = f"step {self._batcher.step.number}" if self._batcher.step is not None else "the next step"
        return (request.submit.request_id, request.submit.epoch, state, waits_for, request.since_ns)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _drop(self, request: LocalRequest) -> None:
        """Out of the batching core, its memory given up."""
        self._batcher.remove(request.sequence)
        self._batcher.release(request.sequence)
        self._forget(request)

    def _forget(self, request: LocalRequest) -> None:
        del self._requests[request.submit.request_id]
        self._begin(part(request.sequence))
        self._intake.cancels.ended(request.submit.request_id, request.submit.epoch)

    def _fail(self, request: LocalRequest, code: int, reason: str, *, retryable: bool = False) -> None:
        submit = request.submit
        fail_request(self._out, submit.reply_to, submit.request_id, submit.epoch, code, reason, retryable=retryable)

    def _finish(self, now_ns: int, request: LocalRequest, reason: FinishReason, stop_token_id: int = -1) -> None:
        started, first = request.started_ns or now_ns, request.first_token_ns
        times = PhaseTimes(
            queue_ms=ms_between(request.arrived_ns, started),
            prefill_ms=ms_between(request.started_ns, first or now_ns),
            decode_ms=ms_between(first, now_ns),
        )
        finish_request(
            self._out,
            request.submit.reply_to,
            request.submit.epoch,
            request.sequence,
            reason,
            times,
            stop_token_id=stop_token_id,
            prefill_instance=self._instance,
            decode_instance=self._instance,
        )
