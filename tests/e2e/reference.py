"""The reference: ``transformers`` on the same checkpoint, greedy, one prompt at a time, float32.

A ``Rule`` changes the logits before the best token is taken: how a request's options are stated for the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

Rule = Callable[[Sequence[int], Sequence[int], torch.Tensor], torch.Tensor]
"""``rule(prompt, outputs so far, logits [V])`` gives the logits to choose from."""


class Reference(NamedTuple):
    """Greedy continuation, and per token the gap between the two best (changed) logits.

    ``logprobs`` are the model's own, before any rule.
    """

    token_ids: list[int]
    gaps: list[float]
    logprobs: list[float]


class TransformersReference:
    """Greedy continuations by ``transformers``; answers are kept, so that many topologies share them."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._leads: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, ...]] = {}
        self._answers: dict[tuple[tuple[int, ...], int], Reference] = {}

    @torch.inference_mode()
    def greedy(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Reference:
        """``max_tokens`` tokens after the prompt, EOS ignored."""
        key = (tuple(prompt_token_ids), max_tokens)
        if key not in self._answers:
            self._answers[key] = self._generate(key[0], max_tokens)
        return self._answers[key]

    @torch.inference_mode()
    def leads(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[float, ...]:
        """Per token of a continuation, by how much (in logits) its best token leads it, after what came before: all 0
        for a greedy one. One pass over all positions, so much cheaper than ``greedy``."""
        key = (tuple(prompt_token_ids), tuple(token_ids))
        if key not in self._leads:
            logits = self._model(torch.tensor([[*prompt_token_ids, *token_ids[:-1]]])).logits[0].float()
            rows = logits[len(prompt_token_ids) - 1 :]
            chosen = rows.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
            self._leads[key] = tuple((rows.amax(-1) - chosen).tolist())
        return self._leads[key]

    @torch.inference_mode()
    def steered(self, prompt_token_ids: Sequence[int], max_tokens: int, rule: Rule) -> Reference:
        """As ``greedy``, with ``rule`` applied at every position."""
        return self._generate(tuple(prompt_token_ids), max_tokens, rule)

    @torch.inference_mode()
    def prompt_logprobs(self, prompt_token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every prompt token but the first."""
        logits = self._model(torch.tensor([list(prompt_token_ids)])).logits[0].float()
        scores = torch.log_softmax(logits, dim=-1)
        return [float(scores[place, token]) for place, token in enumerate(prompt_token_ids[1:])]

    def _generate(self, prompt: tuple[int, ...], max_tokens: int, rule: Rule | None = None) -> Reference:
        answer = Reference([], [], [])
        inputs = torch.tensor([prompt])
        cache = None
        for _ in range(max_tokens):
            out = self._model(inputs, cache=cache, use_cache=True)
            cache = out.cache
            logits = out.logits[0, -1].float()
            chosen_from = logits if rule is None else rule(prompt, answer.token_ids, logits.clone())
            best = torch.topk(chosen_from, 2)
            token = int(best.indices[0])
            answer.token_ids.append(token)
            answer.gaps.append(float(best.values[0] - best.values[1]))
            answer.logprobs.append(float(torch.log_softmax(logits, dim=-1)[token]))
            inputs = best.indices[:1].reshape(1, 1)
        return answer
