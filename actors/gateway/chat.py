"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from actors.gateway.edge import Delta, SampleStream
from actors.gateway.responses import Responder, shown
from messages.requests import TokenLogprobs


class ChatResponder(Responder):
    """One conversation's answers. The first chunk of a choice says only who speaks."""

    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def _whole_choice(self, index: int, sample: SampleStream) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.total.text, "refusal": None}
        return {"index": index, "message": message} | self._rest(sample, sample.total, True)

    def _new_choices(self, index: int, sample: SampleStream, delta: Delta, first: bool) -> list[dict[str, Any]]:
        content = {"content": delta.text} if delta.text or sample.end is None else {}
        choice = {"index": index, "delta": content} | self._rest(sample, delta, False)
        return [self._opening(index, sample), choice] if first else [choice]

    def _opening(self, index: int, sample: SampleStream) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}}
        choice |= {"logprobs": None, "finish_reason": None}
        if self._plan.return_token_ids:
            choice["prompt_token_ids"] = list(sample.sample.prompt_token_ids)
        if self._plan.prompt_logprobs >= 0:
            choice["prompt_logprobs"] = self._prompt_logprobs(sample)
        return choice

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
