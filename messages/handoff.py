"""The hand-off between a prefill scheduler (P) and a decode scheduler (D), message by message."""

from __future__ import annotations

from typing import Literal

import msgspec

from messages.base import Message
from messages.requests import PhaseTimes, SamplingParams, TokenLogprobs

TransferMode = Literal["PUSH", "PULL"]


class WindowRange(msgspec.Struct, frozen=True, kw_only=True):
    """One window of a lease: ``size_bytes`` bytes at ``offset_bytes`` of the rank's staging region."""

    offset_bytes: int
    size_bytes: int


class SourceLease(msgspec.Struct, frozen=True, kw_only=True):
    """The windows into which one source rank may write. Disjoint from every other source's and request's."""

    source_rank: int
    windows: tuple[WindowRange, ...]


class RankLease(msgspec.Struct, frozen=True, kw_only=True):
    """One decode rank's staging lease for one request attempt. Empty ``sources``: every route is in place."""

    target_rank: int
    generation: int
    sources: tuple[SourceLease, ...] = ()


class AddNewRequest(Message, frozen=True, kw_only=True):
    """P scheduler → D scheduler: reserve everything decode needs, before prefill runs."""

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    reply_to: str  # gateway address, for tokens 1…
    priority: Literal["online", "offline"]
    mode: TransferMode
    delivered_token_ids: tuple[int, ...] = ()


class RequestAccepted(Message, frozen=True, kw_only=True):
    """D → P: the reservation stands until HandoffComplete, a release, or D's deadline."""

    request_id: str
    epoch: int
    instance: str
    incarnation: int
    target_block_ids: tuple[int, ...]
    target_slot: int
    leases: tuple[RankLease, ...]
    dp_rank: int = 0


class RequestRefused(Message, frozen=True, kw_only=True):
    """D → P: no. 404 no room now, 413 can never fit, 400 bad, 409 duplicate."""

    request_id: str
    epoch: int
    instance: str
    incarnation: int
    code: Literal[400, 404, 409, 413]
    reason: str


class FirstGeneration(Message, frozen=True, kw_only=True):
    """P → D: prefill is done. Carries all that D cannot compute: the first token, its logprobs, the MTP bootstrap
    (target hidden state of the last prefilled position, after the final norm, raw ``bootstrap_dtype`` bytes), and where
    the source state lies. For an attempt that begins with delivered tokens, ``token_id`` is the last of those."""

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    token_id: int
    token_index: int
    chunk_count: int
    computed_tokens: int
    source_block_ids: tuple[int, ...]
    source_slot: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    bootstrap_hidden: bytes = b""
    bootstrap_dtype: str = ""
    times: PhaseTimes = PhaseTimes()
    sampled_ns: int = 0
    cached_tokens: int = 0  # of the prompt, as ``Usage`` counts them


class HandoffComplete(Message, frozen=True, kw_only=True):
    """D → P: all ranks of D restored and the request is in the decode queue; P may free its blocks."""

    request_id: str
    epoch: int
    instance: str
    incarnation: int


class HandoffFailed(Message, frozen=True, kw_only=True):
    """D → P: D released everything and will not decode this attempt; P may offer it elsewhere."""

    request_id: str
    epoch: int
    instance: str
    incarnation: int
    reason: str


class ReleaseRequest(Message, frozen=True, kw_only=True):
    """P → D: give the reservation back (cancelled, ended on P, or superseded by a newer epoch)."""

    request_id: str
    epoch: int
    reason: str


class RequestReleased(Message, frozen=True, kw_only=True):
    """D → P: nothing of this attempt is left on D and no D reader uses P's blocks any more."""

    request_id: str
    epoch: int
    instance: str
    incarnation: int
