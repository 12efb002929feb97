"""Greedy tokens are the same at every draft depth: fifty prompts on the demo model, alone and eight at once."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import Tokenizer

from messages.requests import SamplingParams
from scripts.compare import equal_by_tie_rule
from scripts.demo_prompts import accuracy_prompts
from scripts.models import DEMO_MODEL_DIR
from tests.worker.harness import Generated, LocalEngine, one_thread

PROMPTS = 50
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2)  # room for eight drafts in the first step


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """From one token to a page of text."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    return tuple(tuple(tokenizer.encode(text).ids[:150]) for text in accuracy_prompts(PROMPTS))


def generate(speculative_tokens: int, batch_rows: int) -> list[Generated]:
    with one_thread(), LocalEngine(DEMO_MODEL_DIR, speculative_tokens=speculative_tokens, slot_count=8) as engine:
        return engine.generate(prompts(), GREEDY, chunk_tokens=64, batch_rows=batch_rows)


@cache
def without_drafts() -> list[Generated]:
    """Every prompt alone, one token per step."""
    return generate(0, batch_rows=1)


def test_the_prompts_are_of_many_lengths() -> None:
    assert len({len(prompt) for prompt in prompts()}) >= 20
    assert min(map(len, prompts())) <= 4 and max(map(len, prompts())) >= 100


@pytest.mark.parametrize("batch_rows", [1, 8], ids=["alone", "eight at once"])
@pytest.mark.parametrize("speculative_tokens", [1, 2, 3, 5, 8])
def test_greedy_tokens_equal_those_without_speculation(speculative_tokens: int, batch_rows: int) -> None:
    found = generate(speculative_tokens, batch_rows)
    for prompt, expected, result in zip(prompts(), without_drafts(), found, strict=True):
        gaps = [entry.top[0][1] - entry.top[1][1] for entry in expected.logprobs]
        assert len(result.token_ids) == GREEDY.max_tokens
        assert equal_by_tie_rule(expected.token_ids, result.token_ids, gaps), len(prompt)
    accepted, steps = sum(one.accepted for one in found), sum(one.decode_steps for one in found)
    assert steps + accepted == PROMPTS * (GREEDY.max_tokens - 1)
    assert accepted > 0.3 * steps
