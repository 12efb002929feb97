"""Rows that were sent before the token that they feed was known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from messages.batch import BatchRow
from messages.requests import SamplingParams
from tests.worker.harness import LocalEngine, Request, prompts_of

PROMPTS = prompts_of([3, 16, 40])
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=5, repetition_penalty=1.2, logprobs=2)


class AheadEngine(LocalEngine):
    """Leaves out of its decode rows what they feed."""

    def _row(self, request: Request, chunk_tokens: int) -> BatchRow:
        row = super()._row(request, chunk_tokens)
        return row if row.is_prefill else msgspec.structs.replace(row, token_ids=())


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_sampled_token_is_fed_as_if_it_had_been_sent(model_dir: Path, tp_size: int) -> None:
    with LocalEngine(model_dir, tp_size) as engine, AheadEngine(model_dir, tp_size) as ahead:
        assert ahead.generate(PROMPTS, SAMPLED) == engine.generate(PROMPTS, SAMPLED)


def test_a_row_after_one_that_failed_fails_for_the_same_reason_and_alone(model_dir: Path) -> None:
    with AheadEngine(model_dir) as engine:
        requests = [Request(prompt=tuple(prompt), sampling=SAMPLED) for prompt in PROMPTS]
        for request in requests:
            engine.reserve(request)
        rows = [engine._row(request, 0) for request in requests]
        results = engine.execute(rows, [engine._start(request) for request in requests]).rows
        following = [
            BatchRow(
                request_id=row.request_id,
                epoch=0,
                token_ids=(),
                start=len(row.token_ids),
                block_ids=row.block_ids,
                samples=True,
            )
            for row in rows
        ]
        assert not any(result.error for result in results)
        engine.runners[0].sequences._open[rows[1].request_id].error = "its last row failed"
        assert [row.error for row in engine.execute(following).rows] == ["", "its last row failed", ""]


@pytest.mark.parametrize("start", [17, 1_000])
def test_a_row_ahead_of_what_is_known_is_refused(model_dir: Path, start: int) -> None:
    with AheadEngine(model_dir) as engine:
        request = Request(prompt=tuple(PROMPTS[1]), sampling=SAMPLED)
        engine.reserve(request)
        engine.execute([engine._row(request, 0)], [engine._start(request)])
        row = BatchRow(
            request_id=request.name,
            epoch=0,
            token_ids=(),
            start=start,
            block_ids=tuple(request.blocks),
            samples=True,
        )
        assert engine.execute([row]).rows[0].error
