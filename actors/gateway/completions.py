"""Answers of ``/v1/completions``."""

from __future__ import annotations

from typing import Any

from actors.gateway.edge import Delta, SampleStream
from actors.gateway.parameters import Plan
from actors.gateway.responses import Heading, Responder, shown
from actors.gateway.tokenizer import CheckpointTokenizer
from messages.requests import TokenLogprobs


class CompletionResponder(Responder):
    """One request's answers. With ``echo`` the prompt's text, and its tokens' log-probabilities, come first."""

    WHOLE = CHUNK = "text_completion"

    def __init__(self, plan: Plan, heading: Heading, tokenizer: CheckpointTokenizer) -> None:
        super().__init__(plan, heading, tokenizer)
        self._tokenizer = tokenizer
        self._prompt_texts = [self._prompt_text(index) for index in range(len(plan.prompts))] if plan.echo else []

    def _whole_choice(self, index: int, sample: SampleStream) -> dict[str, Any]:
        return self._choice(index, sample, sample.total, True)

    def _new_choices(self, index: int, sample: SampleStream, delta: Delta, first: bool) -> list[dict[str, Any]]:
        return [self._choice(index, sample, delta, first)]

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
            choice["prompt_logprobs"] = self._prompt_logprobs(sample)
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
