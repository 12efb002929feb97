"""Which of a row's tokens a request keeps, and whether it has ended: never a token too many.

A verified row may bring several tokens. The request ends at the first that is its end of sequence, one of its stop
tokens, its ``max_tokens``-th, or the last that the model's length allows; what lies behind is dropped, logprobs along.
End-of-sequence and stop tokens count only once ``min_tokens`` tokens are out (the sampler masks them before).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from messages.requests import SamplingParams, TokenLogprobs

FinishReason = Literal["stop", "length"]


class Accepted(NamedTuple):
    """Tokens to deliver; ``reason`` is set when the last of them ends the request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reason: FinishReason | None
    stop_token_id: int = -1


def accept(
    sampling: SamplingParams,
    output_count: int,
    output_max: int,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
) -> Accepted:
    """Cut ``token_ids``, the outputs with index ``output_count, …``, at the request's end.

    ``output_max`` is how many outputs it may have in all: ``max_tokens``, or fewer where the model's length ends it.
    """
    for taken, token_id in enumerate(token_ids, start=1):
        reason, stop_token_id = end_at(sampling, output_count + taken, output_max, token_id)
        if reason is not None:
            return Accepted(token_ids[:taken], logprobs[:taken], reason, stop_token_id)
    return Accepted(token_ids, logprobs[: len(token_ids)], None)


def end_at(
    sampling: SamplingParams, output_count: int, output_max: int, last_token_id: int
) -> tuple[FinishReason | None, int]:
    """(reason, stop token id or -1) when a request of ``output_count`` outputs, the last of them given, has ended."""
    if output_count > sampling.min_tokens:
        if not sampling.ignore_eos and last_token_id in sampling.eos_token_ids:
            return "stop", -1
        if last_token_id in sampling.stop_token_ids:
            return "stop", last_token_id
    if output_count >= output_max:
        return "length", -1
    return None, -1
