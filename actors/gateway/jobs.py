"""What the gateway's machine asks its shell to do: hand something to the HTTP side, or to the metrics.

All of them are quick and never wait for a client. ``DeliverEnd`` is answered with ``messages.gateway.Delivered``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.runtime.machine import Job
from messages.cluster import Heartbeat
from messages.requests import PhaseTimes, TokenLogprobs, Usage

EndReason = Literal["stop", "length", "cancelled", "error"]


class DeliverTokens(Job, frozen=True, kw_only=True):
    """Tokens ``first_index, first_index+1, …`` of a sample, the next ones in order.

    ``waited_ms`` is since the sample's previous tokens, or since its arrival for its first ones.
    """

    ticket: int
    sample: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    waited_ms: float = 0.0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost, as the gateway saw it, and as the instances reported it (``phases``).

    ``decode_instance`` is who made the last token: the prefill instance itself when there was no hand-off.
    """

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    attempts: int
    prefill_instance: str
    decode_instance: str
    phases: PhaseTimes


class DeliverEnd(Job, frozen=True, kw_only=True):
    """The last word on a sample. ``code``, ``message`` and ``retry_after_s`` are set when ``reason`` is "error"."""

    ticket: int
    sample: int
    reason: EndReason
    usage: Usage
    timings: Timings
    code: int = 0
    message: str = ""
    retry_after_s: int = 0


class DeliverRefusal(Job, frozen=True, kw_only=True):
    """The last word on a ticket that was never admitted. ``param`` names the request's field at fault, if one is."""

    ticket: int
    code: int
    message: str
    param: str = ""
    retry_after_s: int = 0


class PublishInstances(Job, frozen=True, kw_only=True):
    """Which instances are alive now, as (name, role, max_model_len); what is ``missing`` for them to serve together, ""
    when nothing is; and how long a sequence (prompt plus output) of theirs may be."""

    instances: tuple[tuple[str, str, int], ...]
    missing: str
    length_max: int


class PublishLoad(Job, frozen=True, kw_only=True):
    """How busy one instance says it is."""

    heartbeat: Heartbeat
