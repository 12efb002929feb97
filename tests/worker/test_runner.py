"""Rows that cannot run are answered one by one; guard bytes stay; the command stream is applied in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.worker.caches import KVCache
from messages.batch import BatchRow, SequenceStart
from messages.requests import SamplingParams
from tests.worker.harness import LocalEngine, Reference, Request, prompts_of

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def opened(engine: LocalEngine, name: str, prompt: list[int]) -> tuple[Request, SequenceStart, BatchRow]:
    request = Request(prompt=tuple(prompt), sampling=PARAMS, name=name)
    engine.reserve(request)
    return request, engine._start(request), engine._row(request, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"request_id": "nobody"}, "not open"),
        ({"epoch": 3}, "epoch 3"),
        ({"start": 4}, "0 tokens are computed"),
        ({"token_ids": (1, 2, 3)}, "not the sequence's"),
        ({"block_ids": (0,)}, "do not cover"),
        ({"block_ids": (0, 1, 2, 9999)}, "block 9999 does not exist"),
        ({"is_prefill": False}, "one token and a prefilled state"),
    ],
)
def test_a_row_that_cannot_run_is_answered_and_the_others_stand(
    model_dir: Path, reference: Reference, changes: dict[str, Any], text: str
) -> None:
    prompts = prompts_of([20, 33])
    with LocalEngine(model_dir) as engine:
        _, bad_start, bad_row = opened(engine, "bad", prompts[0])
        good, good_start, good_row = opened(engine, "good", prompts[1])
        rows = [msgspec.structs.replace(bad_row, **changes), good_row]
        result = engine.execute(rows, [bad_start, good_start])
        assert text in result.rows[0].error and not result.rows[0].token_ids
        assert not result.rows[1].error
        reference.assert_greedy(good.prompt, result.rows[1].token_ids)


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"slot": 99}, "slot 99"), ({"prompt_token_ids": (1, 5000, 2)}, "5000 is outside the vocabulary")],
)
def test_a_sequence_that_cannot_be_opened_fails_with_its_first_row(
    model_dir: Path, changes: dict[str, Any], text: str
) -> None:
    with LocalEngine(model_dir) as engine:
        _, start, row = opened(engine, "bad", prompts_of([3])[0])
        start = msgspec.structs.replace(start, **changes)
        row = msgspec.structs.replace(row, token_ids=start.prompt_token_ids)
        assert text in engine.execute([row], [start]).rows[0].error


def test_a_sequence_whose_logits_are_not_finite_fails_alone_and_poisons_nobody(
    model_dir: Path, reference: Reference
) -> None:
    """NaN in one sequence's caches must not reach the others, nor the next owner of its blocks and slot."""
    prompts = prompts_of([30, 30])
    with LocalEngine(model_dir, block_count=8, slot_count=2) as engine:
        first, start_a, row_a = opened(engine, "a", prompts[0])
        second, start_b, row_b = opened(engine, "b", prompts[1])
        result = engine.execute([row_a, row_b], [start_a, start_b])
        for request, row, outcome in ((first, row_a, result.rows[0]), (second, row_b, result.rows[1])):
            engine._absorb(request, row, outcome)
        cache = engine.runners[0]._caches.layers[3]
        assert isinstance(cache, KVCache)
        cache.value[first.blocks[0] * 16] = float("nan")
        result = engine.execute([engine._row(first, 0), engine._row(second, 0)])
        assert "not finite" in result.rows[0].error
        assert not result.rows[1].error
        reference.assert_greedy(second.prompt, [*second.outputs, *result.rows[1].token_ids])
        engine.execute((), closed=["a", "b"])
        engine.release(first)
        engine.release(second)
        (after,) = engine.generate(prompts_of([50]), PARAMS)
    reference.assert_greedy(prompts_of([50])[0], after.token_ids)


@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_nothing_is_written_outside_the_region_or_into_blocks_of_nobody(
    model_dir: Path, speculative_tokens: int
) -> None:
    guard = 4096
    with LocalEngine(model_dir, 2, region_guard=guard, speculative_tokens=speculative_tokens) as engine:
        for region in engine.regions:
            region[-guard:] = b"\xa5" * guard
        held = set(range(40, 128))  # blocks that no request of this run gets
        engine._free_blocks = [block for block in engine._free_blocks if block not in held]
        engine.generate(prompts_of([20, 3, 50]), PARAMS, chunk_tokens=16)
        for rank, region in enumerate(engine.regions):
            assert region[-guard:] == b"\xa5" * guard
            for tensor in engine.runners[rank].plan.tensors:
                if tensor.addressed_by == "block":
                    begin = tensor.base_bytes + 40 * tensor.resource_stride_bytes
                    assert not any(region[begin : begin + 88 * tensor.resource_stride_bytes])


def test_closing_comes_before_opening_so_that_a_name_can_be_used_again(model_dir: Path, reference: Reference) -> None:
    prompts = prompts_of([20, 25])
    with LocalEngine(model_dir) as engine:
        _, start, row = opened(engine, "same", prompts[0])
        engine.execute([row], [start])
        again, start, row = opened(engine, "same", prompts[1])
        result = engine.execute([row], [start], closed=["same"])
    reference.assert_greedy(again.prompt, result.rows[0].token_ids)


def test_an_empty_step_is_a_step(model_dir: Path) -> None:
    with LocalEngine(model_dir, 2) as engine:
        assert engine.execute(()).rows == ()


def test_a_rank_holds_its_share_of_the_model_only(model_dir: Path) -> None:
    from actors.worker.model.config import load_config
    from actors.worker.model.weights import load_weights

    def elements(tp_size: int) -> int:
        weights = load_weights(
            load_config(model_dir),
            tp_size=tp_size,
            rank=0,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            with_draft=False,
            draft_replicated=False,
        )
        return weights.embedding.numel()

    assert elements(4) * 4 == elements(1)
