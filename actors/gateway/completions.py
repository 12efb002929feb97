"""Answers of ``/v1/completions``."""

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


class CompletionResponder:
    """One request's answers. With ``echo`` the prompt's text, and its tokens' log-probabilities, come first."""

    def __init__(self, plan: Plan, heading: Heading, tokenizer: CheckpointTokenizer) -> None:
        self._plan = plan
        self._heading = heading
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._begun: set[int] = set()  # choices of which a chunk was sent
        self._ended: set[int] = set()
        self._prompt_texts = [self._prompt_text(index) for index in range(len(plan.prompts))] if plan.echo else []

    def whole(self, stream: TicketStream) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        samples = chosen(self._plan, stream)
        choices = [self._choice(index, sample, sample.total, True) for index, sample in enumerate(samples)]
        answer = self._heading.object("text_completion") | {"choices": choices, "usage": usage(self._plan, stream)}
        extend_whole(answer, self._plan, samples)
        return answer

    def chunks(self, stream: TicketStream) -> list[dict[str, Any]]:
        """Chunks for what is new."""
        chunks = []
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
            chunk = self._heading.object("text_completion")
            chunk["choices"] = [self._choice(index, sample, delta, first)]
            if self._plan.include_usage:
                chunk["usage"] = None
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
        return self._heading.object("text_completion") | {"choices": [], "usage": usage(self._plan, stream)}

    def _choice(self, index: int, sample: SampleStream, delta: Delta, first: bool) -> dict[str, Any]:
        plan = self._plan
        echo = self._prompt_texts[index // plan.n] if first and plan.echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + delta.text,
            "logprobs": self._logprobs(index, sample, delta, first) if plan.logprobs >= 0 else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if first and plan.prompt_logprobs >= 0:
            choice["prompt_logprobs"] = prompt_logprobs(self._names, sample.prompt_logprobs, plan.prompt_logprobs)
        if plan.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if first:
                choice["prompt_token_ids"] = list(sample.sample.prompt_token_ids)
        return choice

    def _logprobs(self, index: int, sample: SampleStream, delta: Delta, first: bool) -> dict[str, Any]:
        """OpenAI's four parallel lists; the first prompt token of an echo has no log-probability."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        base = 0
        if self._plan.echo:
            base = len(self._prompt_texts[index // self._plan.n])
            if first:
                self._add_prompt(found, sample)
        for entry, offset in zip(delta.logprobs, delta.offsets, strict=False):
            self._add(found, entry.token_id, entry, base + offset)
        return found

    def _add_prompt(self, found: dict[str, list[Any]], sample: SampleStream) -> None:
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=self._plan.skip_special_tokens)
        offset = 0
        for token_id, entry in zip(sample.sample.prompt_token_ids, sample.prompt_logprobs, strict=False):
            self._add(found, token_id, entry, offset)
            offset += len(detokenizer.push(token_id))

    def _add(self, found: dict[str, list[Any]], token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
        found["tokens"].append(self._names.name(token_id))
        found["token_logprobs"].append(None if entry is None else shown(entry.logprob))
        found["top_logprobs"].append(None if entry is None else self._names.top(entry, self._plan.logprobs))
        found["text_offset"].append(offset)

    def _prompt_text(self, index: int) -> str:
        prompt = self._plan.prompts[index]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self._plan.skip_special_tokens)
