"""The conversation between the gateway and the schedulers: submit, stream, finish, cancel."""

from __future__ import annotations

from typing import Literal

import msgspec

from messages.base import Message


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. ``seed`` is always set by the gateway, so that a retried request draws the same tokens.

    ``top_k`` 0 and ``top_p`` 1.0 are off. ``temperature`` 0 is greedy. ``logprobs`` is how many alternatives per token
    to report, -1 for none (0 reports the chosen token only); ``prompt_logprobs`` likewise for the prompt.
    ``stop_token_ids`` and ``eos_token_ids`` end a request; both are masked until ``min_tokens`` tokens are out.
    ``output_interval`` changes no token, only when the gateway hears of it: the first at once, the others in groups of
    at least so many, or when the request ends.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1
    output_interval: int = 1


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of one token and of the most likely alternatives at its position, most likely first."""

    token_id: int
    logprob: float
    rank: int = 0  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of one request, and what speculation did for it.

    ``completion_tokens`` counts the request's output from index 0, tokens delivered by earlier attempts included.
    ``cached_tokens`` of the prompt were not computed for this request (but for another sample of the same prompt).
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_steps: int = 0
    accepted_by_position: tuple[int, ...] = ()

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per decode step: its own and the drafts that stood; 0 before the first step."""
        return 1 + self.accepted_tokens / self.decode_steps if self.decode_steps else 0.0


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request's time went, in ms; what the ``[PD-PERF]`` line prints. Unset phases did not happen.

    Intervals are measured on one host's monotonic clock, so they hold across its processes.
    """

    queue_ms: float = 0.0
    allocation_ms: float = 0.0
    prefill_ms: float = 0.0
    push_ms: float = 0.0
    pull_ms: float = 0.0
    merge_ms: float = 0.0
    sync_ms: float = 0.0
    restore_ms: float = 0.0  # FirstGeneration → Restored by all ranks
    handoff_ms: float = 0.0  # first token sampled on P → request in D's decode queue
    decode_ms: float = 0.0
    bytes_moved: int = 0
    bytes_by_role: tuple[tuple[str, int], ...] = ()
    verified_bytes: int = 0


class Sibling(msgspec.Struct, frozen=True, kw_only=True):
    """One more sample of a submitted prompt: a request of its own in everything but the prompt's computation."""

    request_id: str
    epoch: int
    sampling: SamplingParams


class SubmitRequest(Message, frozen=True, kw_only=True):
    """Gateway → scheduler of a mixed or prefill instance.

    ``delivered_token_ids`` are tokens an earlier attempt already delivered: all but the last are prefilled like prompt,
    the last is decoded first, and the next generated token has index ``len(delivered_token_ids)``.
    ``sampling.max_tokens`` counts them too.
    ``siblings`` are further samples of the same prompt, submitted along with this one so that the prompt is computed
    once for all where that is possible. An instance answers about each of them under its own id and epoch.
    """

    request_id: str
    epoch: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    reply_to: str  # gateway address
    priority: Literal["online", "offline"] = "online"
    delivered_token_ids: tuple[int, ...] = ()
    siblings: tuple[Sibling, ...] = ()


class CancelRequest(Message, frozen=True, kw_only=True):
    """Gateway → every scheduler that may hold the request. Idempotent; unknown requests are ignored.

    Covers every epoch up to and including ``epoch`` (the gateway names the last epoch of its attempt, because P may
    have offered the request again meanwhile); a newer attempt is untouched. Whoever streams the request answers
    ``Finished(reason="cancelled")``.
    """

    request_id: str
    epoch: int
    reason: str = "cancelled"


class Generation(Message, frozen=True, kw_only=True):
    """Tokens ``first_index, first_index+1, …`` of a request, straight from the instance that made them."""

    request_id: str
    epoch: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class Finished(Message, frozen=True, kw_only=True):
    """The request ended well. ``stop_token_id`` is set when a stop token (not EOS) ended it."""

    request_id: str
    epoch: int
    reason: Literal["stop", "length", "cancelled"]
    usage: Usage
    stop_token_id: int = -1
    prefill_instance: str = ""
    decode_instance: str = ""
    times: PhaseTimes = PhaseTimes()


class Failed(Message, frozen=True, kw_only=True):
    """The request cannot be served by the sender.

    ``retryable`` says whether another instance or a later attempt may succeed (a lost peer, a failed transfer); the
    gateway then resubmits under a new epoch while attempts remain.
    """

    request_id: str
    epoch: int
    code: int  # HTTP status the client sees when it is final
    message: str
    retryable: bool = False


GatewayToScheduler = SubmitRequest | CancelRequest
SchedulerToGateway = Generation | Finished | Failed
