"""One request attempt as the batching core sees it: its tokens, how far they are computed, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from actors.scheduler.blocks import Holding
from messages.batch import SequenceStart
from messages.requests import SamplingParams, TokenLogprobs, Usage

Priority = Literal["online", "offline"]


@dataclass(eq=False)
class Sequence:
    """``prompt`` is what the client sent, ``output`` every token generated so far, by earlier attempts too.

    ``computed`` tokens lie in the caches. A sequence *prefills* until only its last output token is missing there, and
    *decodes* afterwards. A prefill without output ends by sampling the first token; one with output (after a preemption
    or on another instance) samples nothing: its last token is known, and decoding goes on from it.
    """

    request_id: str
    epoch: int  # of this sequence on the workers: it stays while a prefill instance offers it under newer ones
    prompt: tuple[int, ...]
    output: list[int]
    sampling: SamplingParams
    priority: Priority
    order: int  # of arrival: smaller is older
    final_tokens: int  # it never has more: min(prompt + max_tokens, max_model_len)
    prefill_only: bool = False
    holding: Holding | None = None
    computed: int = 0
    is_open: bool = False  # the workers know it
    is_decoding: bool = False  # only its last token is missing in the caches
    restored: bool = False  # its caches came from a hand-off and were not computed again since
    preempted_count: int = 0
    push: bool = False  # its chunks travel while they are computed
    chunk_count: int = 0  # chunks computed under a push index
    bootstrap_hidden: bytes = b""
    bootstrap_dtype: str = ""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    leader: Sequence | None = None  # computes the prompt for this one too (see siblings.py)
    followers: list[Sequence] = field(default_factory=list)  # wait for this one's prompt
    cached_tokens: int = 0  # of the prompt, computed for another sample
    drafted: int = 0
    accepted: int = 0
    decode_steps: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    told: int = field(init=False)  # outputs that the gateway knows; at first those that it brought
    untold_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the outputs after these

    def __post_init__(self) -> None:
        self.told = len(self.output)

    @property
    def owner(self) -> tuple[str, int]:
        return (self.request_id, self.epoch)

    @property
    def total(self) -> int:
        """Tokens it has now."""
        return len(self.prompt) + len(self.output)

    @property
    def prefill_end(self) -> int:
        """Tokens that lie in the caches when it begins to decode."""
        return max(len(self.prompt), self.total - 1)

    def tokens(self, start: int, count: int) -> tuple[int, ...]:
        """``count`` of its tokens from position ``start``."""
        split = len(self.prompt)
        if start >= split:
            return tuple(self.output[start - split : start - split + count])
        head = self.prompt[start : start + count]
        return head + tuple(self.output[: count - len(head)]) if len(head) < count else head

    def start_message(self) -> SequenceStart:
        """What opens it on the workers."""
        assert self.holding is not None
        return SequenceStart(
            request_id=self.request_id,
            epoch=self.epoch,
            slot=self.holding.slot,
            sampling=self.sampling,
            prompt_token_ids=self.prompt,
            output_token_ids=tuple(self.output),
            bootstrap_hidden=self.bootstrap_hidden if self.restored else b"",
            bootstrap_dtype=self.bootstrap_dtype if self.restored else "",
            restored=self.restored,
        )

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.output),
            cached_tokens=self.cached_tokens,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            decode_steps=self.decode_steps,
            accepted_by_position=tuple(self.accepted_by_position),
        )
