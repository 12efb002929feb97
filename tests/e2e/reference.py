"""The reference: ``transformers`` on the same checkpoint, greedy, one prompt at a time, float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM


class Reference(NamedTuple):
    """Greedy continuation, and per token the gap between the two best log-probabilities."""

    token_ids: list[int]
    gaps: list[float]
    logprobs: list[float]


class TransformersReference:
    """Greedy continuations by ``transformers``; answers are kept, so that many topologies share them."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._answers: dict[tuple[tuple[int, ...], int], Reference] = {}

    @torch.inference_mode()
    def greedy(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Reference:
        """``max_tokens`` tokens after the prompt, EOS ignored."""
        key = (tuple(prompt_token_ids), max_tokens)
        if key not in self._answers:
            self._answers[key] = self._generate(key[0], max_tokens)
        return self._answers[key]

    def _generate(self, prompt: tuple[int, ...], max_tokens: int) -> Reference:
        answer = Reference([], [], [])
        inputs = torch.tensor([prompt])
        cache = None
        for _ in range(max_tokens):
            out = self._model(inputs, cache=cache, use_cache=True)
            cache = out.cache
            scores = torch.log_softmax(out.logits[0, -1].float(), dim=-1)
            best = torch.topk(scores, 2)
            answer.token_ids.append(int(best.indices[0]))
            answer.gaps.append(float(best.values[0] - best.values[1]))
            answer.logprobs.append(float(best.values[0]))
            inputs = best.indices[:1].reshape(1, 1)
        return answer
