"""Taking requests from the gateway: what is refused at once and why, duplicates, cancels that come first.

Everything that may be wrong with a request is found here, before it costs anything. A refused request gets one
``Failed`` with the numbers; a request that was cancelled before it came gets ``Finished("cancelled")``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal, NamedTuple, TypeVar

from actors.scheduler.acceptance import end_at
from actors.scheduler.outbox import Outbox
from actors.scheduler.report import fail_request, finish_request
from actors.scheduler.sequence import Sequence
from actors.scheduler.settings import Capacity, SchedulerSettings
from messages.requests import PhaseTimes, SamplingParams, SubmitRequest

T = TypeVar("T")

EARLY_CANCEL_MS: Final = 10_000
"""How long a cancel waits for the request that it overtook."""

REMEMBERED_MAX: Final = 4096
"""How many ended requests and early cancels are remembered."""


class Refusal(NamedTuple):
    """Why a request can never run here, with the status code its client sees."""

    code: Literal[400, 413]
    reason: str


def final_tokens(capacity: Capacity, prompt_count: int, sampling: SamplingParams) -> int:
    """The most tokens a request can come to have."""
    return min(prompt_count + sampling.max_tokens, capacity.max_model_len)


def check_request(
    capacity: Capacity,
    prompt_count: int,
    delivered_count: int,
    sampling: SamplingParams,
    *,
    decodes: bool,
    instance: str,
) -> Refusal | None:
    """None when a request can run on this instance. ``decodes``: it stays here until its last token."""
    if prompt_count < 1:
        return Refusal(400, "the prompt is empty: at least 1 token is needed")
    if sampling.max_tokens < 1:
        return Refusal(400, f"max_tokens is {sampling.max_tokens}, at least 1 is needed")
    if prompt_count >= capacity.max_model_len:
        return Refusal(
            400,
            f"the prompt has {prompt_count} tokens, max_model_len is {capacity.max_model_len}: at most"
            f" {capacity.max_model_len - 1} leave room for an answer",
        )
    prefilled = prompt_count + max(0, delivered_count - 1)  # the last delivered token is decoded, where that is done
    tokens = final_tokens(capacity, prompt_count, sampling) if decodes else prefilled
    blocks = -(-tokens // capacity.block_size)
    if blocks > capacity.block_count:
        what = f"{prompt_count} prompt tokens and up to {tokens - prompt_count} more" if decodes else f"{tokens} tokens"
        return Refusal(
            413,
            f"{what} need {blocks} blocks of {capacity.block_size}, instance {instance} has {capacity.block_count} in"
            " all: shorten the prompt, lower max_tokens or raise block_count",
        )
    return None


class Cancels:
    """Cancels that overtook their request. A cancel of a request that has ended here is late, not early."""

    def __init__(self) -> None:
        self._early: OrderedDict[str, tuple[int, int]] = OrderedDict()  # request id → (epoch, until_ns)
        self._ended: OrderedDict[str, int] = OrderedDict()  # request id → epoch

    def remember(self, now_ns: int, request_id: str, epoch: int) -> None:
        """Nothing of this request is here: should it come yet, it must not begin."""
        if request_id not in self._ended:
            _remember(self._early, request_id, (epoch, now_ns + EARLY_CANCEL_MS * 1_000_000))

    def covers(self, now_ns: int, request_id: str, epoch: int) -> bool:
        """Whether this attempt was cancelled before it came. Says so once."""
        early = self._early.pop(request_id, None)
        return early is not None and epoch <= early[0] and now_ns <= early[1]

    def ended(self, request_id: str, epoch: int) -> None:
        """This attempt has ended here."""
        _remember(self._ended, request_id, epoch)


def _remember(memory: OrderedDict[str, T], key: str, value: T) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)


class Intake:
    """What a mixed and a prefill instance do alike with what the gateway submits."""

    def __init__(self, settings: SchedulerSettings, capacity: Capacity, out: Outbox) -> None:
        self.cancels = Cancels()
        self.closed_because = ""  # set: nothing is taken any more
        self._settings = settings
        self._capacity = capacity
        self._out = out
        self._arrivals = 0

    def take(self, now_ns: int, message: SubmitRequest, waiting_count: int) -> Sequence | None:
        """A sequence for the request; None when it was answered at once."""
        if self.cancels.covers(now_ns, message.request_id, message.epoch):
            self._finish_at_once(message, "cancelled", -1)
            return None
        decodes = self._settings.role != "PREFILL"
        refusal = check_request(
            self._capacity,
            len(message.prompt_token_ids),
            len(message.delivered_token_ids),
            message.sampling,
            decodes=decodes,
            instance=self._settings.instance,
        )
        if refusal is not None:
            self._refuse(message, refusal.code, refusal.reason)
            return None
        if self.closed_because:
            self._refuse(message, 503, self.closed_because, retryable=True)
            return None
        if waiting_count >= self._settings.waiting_requests_max:
            reason = (
                f"{waiting_count} requests wait on {self._settings.instance} already (waiting_requests_max"
                f" {self._settings.waiting_requests_max}): try later or add an instance"
            )
            self._refuse(message, 503, reason, retryable=True)
            return None
        if self._ended_before(message):
            return None
        self._arrivals += 1
        sequence = self._sequence(message)
        sequence.prefill_only = not decodes
        return sequence

    def _ended_before(self, message: SubmitRequest) -> bool:
        """A retried request whose delivered tokens are its whole answer: only the end was lost."""
        delivered = message.delivered_token_ids
        if not delivered:
            return False
        prompt_count = len(message.prompt_token_ids)
        output_max = final_tokens(self._capacity, prompt_count, message.sampling) - prompt_count
        reason, stop_token_id = end_at(message.sampling, len(delivered), output_max, delivered[-1])
        if reason is not None:
            self._finish_at_once(message, reason, stop_token_id)
        return reason is not None

    def _sequence(self, message: SubmitRequest) -> Sequence:
        return Sequence(
            request_id=message.request_id,
            epoch=message.epoch,
            prompt=message.prompt_token_ids,
            output=list(message.delivered_token_ids),
            sampling=message.sampling,
            priority=message.priority,
            order=self._arrivals,
            final_tokens=final_tokens(self._capacity, len(message.prompt_token_ids), message.sampling),
        )

    def _finish_at_once(
        self, message: SubmitRequest, reason: Literal["stop", "length", "cancelled"], stop_token_id: int
    ) -> None:
        finish_request(
            self._out,
            message.reply_to,
            message.epoch,
            self._sequence(message),
            reason,
            PhaseTimes(),
            stop_token_id=stop_token_id,
            prefill_instance=self._settings.instance,
        )

    def _refuse(self, message: SubmitRequest, code: int, reason: str, *, retryable: bool = False) -> None:
        fail_request(self._out, message.reply_to, message.request_id, message.epoch, code, reason, retryable=retryable)
