"""The conversation scheduler ↔ engine ↔ workers: one command stream, the same for every rank of a TP group."""

from __future__ import annotations

import msgspec

from messages.base import Message
from messages.requests import SamplingParams, TokenLogprobs


class SequenceStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Opens a sequence on the workers: everything that stays the same or that a sampler's history needs.

    ``output_token_ids`` are generated tokens so far (after a hand-off: the first; after a preemption: all).
    ``bootstrap_hidden`` is the MTP bootstrap, set only when the caches were restored from a hand-off.
    """

    request_id: str
    epoch: int
    slot: int
    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    bootstrap_hidden: bytes = b""
    bootstrap_dtype: str = ""
    restored: bool = False  # the slot already holds the state of all tokens but the last output token


class BatchRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence's part of a step: feed ``token_ids`` at positions ``start, start+1, …``.

    ``block_ids`` is the whole block table (target and draft caches share it), long enough for every position the step
    may write, ``speculative_tokens`` included. A row samples when ``samples`` is true: a prefill's last chunk, and
    every decode row. ``speculative_tokens`` is how many drafts this row may verify (0 for prefill rows).

    A decode row without ``token_ids`` belongs to a step that was sent while the one before it still runs: it feeds the
    token that its sequence is given there. ``start`` is that token's position.

    ``resumes`` marks the last chunk of a prefill over prompt and output: it ends before the last output token and
    samples nothing, because the token that follows is known. That token is the first to be decoded, as it would have
    been had nothing been computed again, so drafts and random streams fall on the same positions.

    ``push_chunk`` ≥ 0 asks the worker to tell its transfer actor ``LayerReady`` after each layer, under this chunk
    index.

    ``fork_of`` names the request whose prompt's last chunk is an earlier row of this step. This row then feeds nothing
    (``start`` is the prompt's length): it samples from that prompt's last position with its own parameters, and takes
    over that prompt's state. A block or slot of its own gets a copy of the other's; those that both name are shared.
    """

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    samples: bool
    is_prefill: bool = False
    resumes: bool = False
    speculative_tokens: int = 0
    push_chunk: int = -1
    fork_of: str = ""

    @property
    def token_count(self) -> int:
        """How many tokens it feeds, drafts aside."""
        return len(self.token_ids) if self.is_prefill else 1

    @property
    def ends_prefill(self) -> bool:
        """Whether its sequence has everything it decodes from once this row has run."""
        return self.is_prefill and (self.samples or self.resumes)


class ExecuteBatch(Message, frozen=True, kw_only=True):
    """Scheduler → engine → every worker. ``closed`` is applied first, then ``opened``, then the rows run.

    ``step`` numbers the stream from 1; the ranks compare it before the first collective.
    """

    step: int
    incarnation: int
    rows: tuple[BatchRow, ...]
    opened: tuple[SequenceStart, ...] = ()
    closed: tuple[str, ...] = ()


class RowResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one row produced: the tokens accepted (several when drafts were), in order.

    ``error`` non-empty: this row alone failed (a bad bootstrap, a logit that is not finite); the others stand.
    """

    request_id: str
    epoch: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    drafted: int = 0
    accepted: int = 0
    bootstrap_hidden: bytes = b""
    bootstrap_dtype: str = ""
    error: str = ""


class BatchResult(Message, frozen=True, kw_only=True):
    """Worker → engine, and (rank 0's, once all ranks agree) engine → scheduler."""

    step: int
    incarnation: int
    rank: int
    rows: tuple[RowResult, ...]
    forward_ms: float = 0.0


class StepFailed(Message, frozen=True, kw_only=True):
    """Worker → engine → scheduler: the step broke as a whole (a lost peer in a collective, ranks that disagree).

    The instance cannot go on; its supervisor restarts it under a new incarnation.
    """

    step: int
    incarnation: int
    rank: int
    reason: str
