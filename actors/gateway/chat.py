"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from actors.gateway.edge import Delta, SampleStream, TicketStream
from actors.gateway.parameters import Plan
from actors.gateway.responses import (
    Heading,
    TokenNames,
    chosen,
    extend_whole,
    measured,
    prompt_logprobs,
    shown,
    usage,
)
from actors.gateway.tokenizer import CheckpointTokenizer
from messages.requests import TokenLogprobs


class ChatResponder:
    """One conversation's answers."""

    def __init__(self, plan: Plan, heading: Heading, tokenizer: CheckpointTokenizer) -> None:
        self._plan = plan
        self._heading = heading
        self._names = TokenNames(tokenizer)
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def whole(self, stream: TicketStream) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        samples = chosen(self._plan, stream)
        choices = []
        for index, sample in enumerate(samples):
            message = {"role": "assistant", "content": sample.total.text, "refusal": None}
            choices.append({"index": index, "message": message} | self._rest(sample, sample.total, True))
        answer = self._heading.object("chat.completion") | {"choices": choices, "usage": usage(self._plan, stream)}
        extend_whole(answer, self._plan, samples)
        return answer

    def chunks(self, stream: TicketStream) -> list[dict[str, Any]]:
        """Chunks for what is new; the first of a choice says only who speaks."""
        chunks = []
        for index, sample in enumerate(stream.samples):
            if index in self._ended:
                continue
            delta = sample.take()
            ends = sample.end is not None
            wanted = delta.token_ids and (self._plan.logprobs >= 0 or self._plan.return_token_ids)
            if not (ends or delta.text or wanted):
                continue
            if index not in self._begun:
                self._begun.add(index)
                chunks.append(self._first_chunk(index, sample))
            content = {"content": delta.text} if delta.text or not ends else {}
            chunk = self._chunk({"index": index, "delta": content} | self._rest(sample, delta, False))
            if ends:
                self._ended.add(index)
                if self._plan.return_token_ids:
                    chunk["kvferry"] = measured(sample)
            chunks.append(chunk)
        return chunks

    def last_chunk(self, stream: TicketStream) -> dict[str, Any] | None:
        """Usage, if it was asked for."""
        if not self._plan.include_usage:
            return None
        return self._heading.object("chat.completion.chunk") | {"choices": [], "usage": usage(self._plan, stream)}

    def _first_chunk(self, index: int, sample: SampleStream) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}}
        choice |= {"logprobs": None, "finish_reason": None}
        if self._plan.return_token_ids:
            choice["prompt_token_ids"] = list(sample.sample.prompt_token_ids)
        if self._plan.prompt_logprobs >= 0:
            choice["prompt_logprobs"] = self._prompt_logprobs(sample)
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._heading.object("chat.completion.chunk") | {"choices": [choice]}
        if self._plan.include_usage:
            chunk["usage"] = None
        return chunk

    def _rest(self, sample: SampleStream, delta: Delta, whole: bool) -> dict[str, Any]:
        """A choice's fields besides its text."""
        plan = self._plan
        rest: dict[str, Any] = {
            "logprobs": {"content": self._logprobs(delta)} if plan.logprobs >= 0 else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if plan.return_token_ids:
            rest["token_ids"] = list(delta.token_ids)
        if whole:
            if plan.prompt_logprobs >= 0:
                rest["prompt_logprobs"] = self._prompt_logprobs(sample)
            if plan.return_token_ids:
                rest["prompt_token_ids"] = list(sample.sample.prompt_token_ids)
        return rest

    def _prompt_logprobs(self, sample: SampleStream) -> list[Any]:
        return prompt_logprobs(self._names, sample.prompt_logprobs, self._plan.prompt_logprobs)

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        return [
            self._entry(entry.token_id, entry.logprob) | {"top_logprobs": self._top(entry)} for entry in delta.logprobs
        ]

    def _top(self, entry: TokenLogprobs) -> list[dict[str, Any]]:
        return [self._entry(token_id, logprob) for token_id, logprob in entry.top[: self._plan.logprobs]]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.name(token_id),
            "logprob": shown(logprob),
            "bytes": list(self._names.bytes(token_id)),
        }
