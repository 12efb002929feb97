"""What the gateway knows of one sample: its tokens in order, its attempt, and who may hold it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from messages.base import EPOCHS_PER_ATTEMPT, first_epoch
from messages.gateway import Sample
from messages.requests import Finished, Generation, TokenLogprobs

State = Literal["waiting", "prefill", "streaming", "closing", "delivering"]
"""See the theory in ``machine.py``."""


@dataclass(frozen=True)
class Holder:
    """One life of an instance. ``incarnation`` -1: it spoke before the view named it."""

    instance: str
    incarnation: int


@dataclass(frozen=True)
class Released:
    """Tokens that may be delivered now: the next ones in order."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]


@dataclass
class Record:
    """One sample, from its admission until its last word is delivered."""

    ticket: int
    index: int
    sample: Sample
    priority: Literal["online", "offline"]
    arrived_ns: int
    first_attempt: int
    attempt: int
    epoch: int  # the highest seen; older ones are stale
    progress_ns: int  # the last sign of life
    state: State = "waiting"
    prefill: Holder | None = None  # whom this attempt was submitted to
    decode: Holder | None = None  # who streams it, once it is another one
    loaded: str = ""  # the instance whose load it counts for
    avoid: str = ""  # the instance that failed last
    tokens: list[int] = field(default_factory=list)  # delivered
    early: dict[int, tuple[int, TokenLogprobs | None]] = field(default_factory=dict)  # came before their predecessors
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs_delivered: bool = False
    finished: Finished | None = None  # came; its last tokens may still be on their way
    stopped_at: int = -1  # tokens up to and with the one that completed a stop string
    first_token_ns: int = 0
    last_token_ns: int = 0
    gap_timed: bool = False
    waits_for: Literal["", "an instance", "backoff"] = ""  # in state "waiting"

    @property
    def request_id(self) -> str:
        """The id under which the instances know it."""
        return self.sample.request_id

    @property
    def attempts(self) -> int:
        """How many attempts were made, this one included."""
        return self.attempt - self.first_attempt + 1

    @property
    def last_epoch(self) -> int:
        """The largest epoch that belongs to this attempt: what a cancel of it covers."""
        return first_epoch(self.attempt + 1) - 1

    @property
    def length(self) -> int:
        """Prompt plus the longest output, in tokens."""
        return len(self.sample.prompt_token_ids) + self.sample.sampling.max_tokens

    def awaited(self) -> str:
        """What the record waits for, and from whom, for people."""
        holder = self.decode or self.prefill
        if self.state == "waiting" or holder is None:
            return self.waits_for
        if self.state == "delivering":
            return "the HTTP side"
        if self.state == "closing":
            return f"the figures from {holder.instance}"
        what = "the first token" if self.state == "prefill" else f"token {len(self.tokens)}"
        return f"{what} from {holder.instance}"

    def suspect(self, asked_about_ns: int) -> None:
        """Forget signs of life after ``asked_about_ns``: somebody should be asked about it soon."""
        self.progress_ns = min(self.progress_ns, asked_about_ns)

    def is_current(self, epoch: int) -> bool:
        """Whether a message of this epoch may change anything; remembers the highest."""
        if epoch < self.epoch or epoch // EPOCHS_PER_ATTEMPT > self.attempt:
            return False
        self.epoch = epoch
        return True

    def accept(self, generation: Generation) -> Released | None:
        """Take tokens in any order, give back those that continue the delivered ones; None when there are none yet."""
        prompt = len(self.sample.prompt_token_ids)
        if generation.prompt_logprobs and not self.prompt_logprobs_delivered:
            self.prompt_logprobs = generation.prompt_logprobs[:prompt]
        for offset, token_id in enumerate(generation.token_ids):
            index = generation.first_index + offset
            if index >= len(self.tokens):
                logprobs = generation.logprobs[offset] if offset < len(generation.logprobs) else None
                self.early.setdefault(index, (token_id, logprobs))
        first_index = len(self.tokens)
        released: list[tuple[int, TokenLogprobs | None]] = []
        while len(self.tokens) in self.early:
            entry = self.early.pop(len(self.tokens))
            self.tokens.append(entry[0])
            released.append(entry)
        if not released:
            return None
        prompt_logprobs = () if self.prompt_logprobs_delivered else self.prompt_logprobs
        self.prompt_logprobs_delivered = self.prompt_logprobs_delivered or bool(prompt_logprobs)
        return Released(
            first_index=first_index,
            token_ids=tuple(token_id for token_id, _ in released),
            logprobs=tuple(logprobs for _, logprobs in released if logprobs is not None),
            prompt_logprobs=prompt_logprobs,
        )

    def has_gap(self) -> bool:
        """Whether a token is known to exist that cannot be delivered yet."""
        announced = self.finished.usage.completion_tokens if self.finished is not None else 0
        return bool(self.early) or announced > len(self.tokens)

    def ended_by_its_tokens(self) -> Literal["", "stop", "length"]:
        """How the delivered tokens alone end the request, if they do: then nobody needs to be asked again."""
        sampling = self.sample.sampling
        if not self.tokens:
            return ""
        last = self.tokens[-1]
        if last in sampling.stop_token_ids or (last in sampling.eos_token_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if len(self.tokens) >= sampling.max_tokens else ""

    def next_attempt(self) -> None:
        """Leave the current attempt: whatever it still says is stale."""
        self.attempt += 1
        self.epoch = first_epoch(self.attempt)
        self.prefill = self.decode = self.finished = None
        self.early.clear()
        self.gap_timed = False
