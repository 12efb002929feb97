"""Greedy tokens against the reference: lengths around blocks, mixed batches, chunks, reuse of blocks and slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from messages.requests import SamplingParams
from tests.worker.harness import LocalEngine, Reference, prompts_of

BLOCK = 16
AROUND_BLOCKS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5]


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("chunk_tokens", [0, 13])
def test_prompts_around_a_block_equal_the_reference(
    model_dir: Path, reference: Reference, tp_size: int, chunk_tokens: int
) -> None:
    prompts = prompts_of(AROUND_BLOCKS)
    with LocalEngine(model_dir, tp_size, block_size=BLOCK) as engine:
        results = engine.generate(prompts, greedy(), chunk_tokens=chunk_tokens)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 12
        reference.assert_greedy(prompt, result.token_ids)


def test_sixteen_at_once_that_join_while_others_decode(model_dir: Path, reference: Reference) -> None:
    prompts = prompts_of([3, 70, 18, 40, 1, 33, 9, 64, 25, 16, 50, 7, 90, 12, 31, 45])
    with LocalEngine(model_dir, block_count=256) as engine:
        results = engine.generate(prompts, greedy(20), chunk_tokens=24, arrivals=list(range(16)))
    for prompt, result in zip(prompts, results, strict=True):
        reference.assert_greedy(prompt, result.token_ids)


def test_contexts_of_very_different_length_in_one_decode_batch(model_dir: Path, reference: Reference) -> None:
    prompts = prompts_of([4, 300, 6, 5, 120, 3])
    with LocalEngine(model_dir, block_count=256) as engine:
        results = engine.generate(prompts, greedy(10))
    for prompt, result in zip(prompts, results, strict=True):
        reference.assert_greedy(prompt, result.token_ids)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_any_block_size_gives_the_same_tokens(model_dir: Path, reference: Reference, block_size: int) -> None:
    prompts = prompts_of([31, 64, 7])
    with LocalEngine(model_dir, block_size=block_size, block_count=256) as engine:
        results = engine.generate(prompts, greedy(8), chunk_tokens=10)
    for prompt, result in zip(prompts, results, strict=True):
        reference.assert_greedy(prompt, result.token_ids)


@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_the_next_owner_of_blocks_and_slots_sees_nothing_of_the_last(
    model_dir: Path, reference: Reference, speculative_tokens: int
) -> None:
    """C24: few blocks and one slot, so that every request runs in what the one before it used."""
    prompts = prompts_of([60, 5, 33, 1, 48, 17])
    with LocalEngine(model_dir, block_count=6, slot_count=1, speculative_tokens=speculative_tokens) as engine:
        results = engine.generate(prompts, greedy(9))
        assert len(engine.runners[0].sequences) == 0
    for prompt, result in zip(prompts, results, strict=True):
        reference.assert_greedy(prompt, result.token_ids)


def test_a_preempted_sequence_computes_prompt_and_output_again(model_dir: Path, reference: Reference) -> None:
    from tests.worker.harness import Request

    (prompt,) = prompts_of([37])
    with LocalEngine(model_dir, speculative_tokens=2) as engine:
        (whole,) = engine.generate([prompt], greedy(14))
        again = Request(prompt=tuple(prompt), sampling=greedy(14), outputs=list(whole.token_ids[:6]))
        engine.run([again], chunk_tokens=16)
    assert again.outputs == whole.token_ids
    reference.assert_greedy(prompt, again.outputs)


def test_an_end_of_sequence_token_ends_a_request_and_is_its_last_token(model_dir: Path) -> None:
    (prompt,) = prompts_of([20])
    with LocalEngine(model_dir) as engine:
        (free,) = engine.generate([prompt], greedy(10))
        third = free.token_ids[3]
        first_seen = free.token_ids.index(third)
        sampling = SamplingParams(max_tokens=10, eos_token_ids=(third,))
        (ended,) = engine.generate([prompt], sampling)
        (stopped,) = engine.generate([prompt], SamplingParams(max_tokens=10, stop_token_ids=(third,)))
    assert ended.token_ids == free.token_ids[: first_seen + 1] == stopped.token_ids
