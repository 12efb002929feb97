"""What a scheduler tells about a request: tokens and ends to the gateway, a line to people."""

from __future__ import annotations

from typing import Literal

from actors.scheduler.batching import Outcome
from actors.scheduler.outbox import Outbox
from actors.scheduler.sequence import Sequence
from messages.requests import Failed, Finished, Generation, PhaseTimes

FinishReason = Literal["stop", "length", "cancelled"]


def ms_between(start_ns: int, end_ns: int) -> float:
    """Milliseconds from ``start_ns`` to ``end_ns``; 0 when the first never happened."""
    return (end_ns - start_ns) / 1e6 if start_ns else 0.0


def stream_tokens(out: Outbox, reply_to: str, epoch: int, outcome: Outcome) -> None:
    """Tokens of a step and those kept back before, under the epoch of the attempt that makes them.

    They are kept back until ``output_interval`` of them are there; the first one and the last ones never are.
    """
    sequence = outcome.sequence
    sequence.untold_logprobs += outcome.logprobs
    first_index, count = sequence.told, len(sequence.output)
    may_wait = first_index > 0 and outcome.reason is None
    if count == first_index or (may_wait and count - first_index < sequence.sampling.output_interval):
        return
    logprobs = tuple(sequence.untold_logprobs)
    sequence.untold_logprobs.clear()
    sequence.told = count
    out.send(
        reply_to,
        Generation(
            request_id=sequence.request_id,
            epoch=epoch,
            first_index=first_index,
            token_ids=tuple(sequence.output[first_index:]),
            logprobs=logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
        ),
    )


def fail_request(
    out: Outbox, reply_to: str, request_id: str, epoch: int, code: int, reason: str, *, retryable: bool = False
) -> None:
    """A clear error to the gateway and a line for people."""
    out.send(
        reply_to,
        Failed(request_id=request_id, epoch=epoch, code=code, message=reason, retryable=retryable),
    )
    out.note("warning", "request failed", request_id=request_id, epoch=epoch, code=code, reason=reason)


def finish_request(
    out: Outbox,
    reply_to: str,
    epoch: int,
    sequence: Sequence,
    reason: FinishReason,
    times: PhaseTimes,
    *,
    stop_token_id: int = -1,
    prefill_instance: str = "",
    decode_instance: str = "",
) -> None:
    """The end, with usage and where the time went, to the gateway; a line to people who debug."""
    usage = sequence.usage()
    out.send(
        reply_to,
        Finished(
            request_id=sequence.request_id,
            epoch=epoch,
            reason=reason,
            usage=usage,
            stop_token_id=stop_token_id,
            prefill_instance=prefill_instance,
            decode_instance=decode_instance,
            times=times,
        ),
    )
    out.note(  # the gateway's [PD-PERF] line tells the same to everybody, once per request
        "debug",
        "request finished",
        request_id=sequence.request_id,
        epoch=epoch,
        reason=reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        queue_ms=round(times.queue_ms, 2),
        prefill_ms=round(times.prefill_ms, 2),
        handoff_ms=round(times.handoff_ms, 2),
        decode_ms=round(times.decode_ms, 2),
        drafted=usage.drafted_tokens,
        accepted=usage.accepted_tokens,
        preempted=sequence.preempted_count,
    )
