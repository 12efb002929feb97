"""What completions and chat completions answer in common: chunks, usage, log-probabilities, the ``kvferry`` object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from actors.gateway.edge import Delta, SampleStream, TicketStream
from actors.gateway.parameters import Plan
from actors.gateway.tokenizer import CheckpointTokenizer
from messages.requests import TokenLogprobs


@dataclass(frozen=True)
class Heading:
    """What every answer begins with. ``created`` is in seconds since 1970."""

    request_id: str
    model: str
    created: int

    def object(self, kind: str) -> dict[str, Any]:
        """The fields before ``choices``."""
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}


LOGPROB_MIN = -9999.0
"""What a log-probability of minus infinity (a masked token) is shown as: JSON has no infinity."""


def shown(logprob: float) -> float:
    """A log-probability as JSON can carry it."""
    return max(logprob, LOGPROB_MIN)


class TokenNames:
    """Tokens as text. One that is no valid text of its own is shown as ``bytes:\\xe4\\xbd``, as OpenAI does."""

    def __init__(self, tokenizer: CheckpointTokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        self._names: dict[int, str] = {}

    def bytes(self, token_id: int) -> bytes:
        """What the token stands for."""
        return self._detokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        """The token as a person reads it."""
        name = self._names.get(token_id)
        if name is None:
            raw = self.bytes(token_id)
            try:
                name = raw.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._names[token_id] = name
        return name

    def top(self, entry: TokenLogprobs, count: int) -> dict[str, float]:
        """The ``count`` most likely tokens and the chosen one by name; names that clash get their token id."""
        found: dict[str, float] = {}
        for token_id, logprob in dict([*entry.top[:count], (entry.token_id, entry.logprob)]).items():
            name = self.name(token_id)
            found[f"token_id:{token_id}" if name in found else name] = shown(logprob)
        return found


class Responder(ABC):
    """Turns a ticket's output into answers of one endpoint, whose objects are named ``WHOLE`` and ``CHUNK``."""

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, plan: Plan, heading: Heading, tokenizer: CheckpointTokenizer) -> None:
        self._plan = plan
        self._heading = heading
        self._names = TokenNames(tokenizer)
        self._begun: set[int] = set()  # choices of which a chunk was sent
        self._ended: set[int] = set()

    @abstractmethod
    def _whole_choice(self, index: int, sample: SampleStream) -> dict[str, Any]:
        """All of one choice."""

    @abstractmethod
    def _new_choices(self, index: int, sample: SampleStream, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """What is new of one choice, each for a chunk of its own; ``first`` before anything of it was sent."""

    def whole(self, stream: TicketStream) -> dict[str, Any]:
        """The answer to a request that is not streamed, once it is over."""
        samples = chosen(self._plan, stream)
        choices = [self._whole_choice(index, sample) for index, sample in enumerate(samples)]
        answer = self._heading.object(self.WHOLE) | {"choices": choices, "usage": usage(self._plan, stream)}
        extend_whole(answer, self._plan, samples)
        return answer

    def chunks(self, stream: TicketStream) -> list[dict[str, Any]]:
        """Chunks for what is new since the last call."""
        chunks: list[dict[str, Any]] = []
        for index, sample in enumerate(stream.samples):
            if index in self._ended:
                continue
            delta = sample.take()
            ends = sample.end is not None
            wanted = delta.token_ids and (self._plan.logprobs >= 0 or self._plan.return_token_ids)
            if not (ends or delta.text or wanted):
                continue
            first = index not in self._begun
            self._begun.add(index)
            chunks += [self._chunk(choice) for choice in self._new_choices(index, sample, delta, first)]
            if ends:
                self._ended.add(index)
                if self._plan.return_token_ids:
                    chunks[-1]["kvferry"] = measured(sample)
        return chunks

    def last_chunk(self, stream: TicketStream) -> dict[str, Any] | None:
        """The chunk after the last choice has ended: usage, if it was asked for."""
        if not self._plan.include_usage:
            return None
        return self._heading.object(self.CHUNK) | {"choices": [], "usage": usage(self._plan, stream)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._heading.object(self.CHUNK) | {"choices": [choice]}
        if self._plan.include_usage:
            chunk["usage"] = None
        return chunk

    def _prompt_logprobs(self, sample: SampleStream) -> list[Any]:
        return prompt_logprobs(self._names, sample.prompt_logprobs, self._plan.prompt_logprobs)


def prompt_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs | None], count: int) -> list[Any]:
    """Per prompt token: its log-probability and the ``count`` most likely ones, by token id; null for the first."""
    return [None if entry is None else _by_token_id(names, entry, count) for entry in entries]


def _by_token_id(names: TokenNames, entry: TokenLogprobs, count: int) -> dict[str, Any]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:count], start=1)]
    ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token_id): {"logprob": shown(logprob), "rank": rank, "decoded_token": names.name(token_id)}
        for token_id, logprob, rank in ranked
    }


def usage(plan: Plan, stream: TicketStream) -> dict[str, Any]:
    """Token counts of the whole request: each prompt once, every sample's output."""
    cached = 0
    for index in range(len(plan.prompts)):
        group = stream.samples[index * plan.best_of : (index + 1) * plan.best_of]
        cached += min((s.end.usage.cached_tokens for s in group if s.end is not None), default=0)
    prompt = sum(len(item.token_ids) for item in plan.prompts)
    completion = sum(len(sample.total.token_ids) for sample in stream.samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def measured(sample: SampleStream) -> dict[str, Any]:
    """The ``kvferry`` object of an ended sample: times in ms, bytes, instances, speculation."""
    if sample.end is None:
        return {}
    timings, counts = sample.end.timings, sample.end.usage
    return {
        "request_id": sample.sample.request_id,
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": len(sample.total.token_ids),
        "cached_tokens": counts.cached_tokens,
        "prefill_instance": timings.prefill_instance,
        "decode_instance": timings.decode_instance,
        "attempts": timings.attempts,
        "ttft_ms": timings.ttft_ms,
        "tpot_ms": timings.tpot_ms,
        "e2e_ms": timings.e2e_ms,
        **msgspec.structs.asdict(timings.phases),
        "bytes_by_role": dict(timings.phases.bytes_by_role),
        "drafted_tokens": counts.drafted_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "decode_steps": counts.decode_steps,
        "mean_accepted_length": counts.mean_accepted_length,
        "accepted_by_position": list(counts.accepted_by_position),
    }


def chosen(plan: Plan, stream: TicketStream) -> list[SampleStream]:
    """The samples that the client sees, in the order of its choices: of ``best_of`` the ``n`` most likely per token."""
    selected: list[SampleStream] = []
    for index in range(len(plan.prompts)):
        group = list(stream.samples[index * plan.best_of : (index + 1) * plan.best_of])
        if plan.best_of > plan.n:
            group.sort(key=_mean_logprob, reverse=True)
        selected += group[: plan.n]
    return selected


def _mean_logprob(sample: SampleStream) -> float:
    entries = sample.total.logprobs
    return sum(entry.logprob for entry in entries) / max(1, len(entries))


def extend_whole(answer: dict[str, Any], plan: Plan, samples: Sequence[SampleStream]) -> None:
    """Add ``kvferry`` to an answer: to the whole of it, or to each of its choices when it has several."""
    if not plan.return_token_ids:
        return
    if len(samples) == 1:
        answer["kvferry"] = measured(samples[0])
        return
    for choice, sample in zip(answer["choices"], samples, strict=True):
        choice["kvferry"] = measured(sample)
