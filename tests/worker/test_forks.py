"""Samples of one prompt on the worker: tokens are those of requests of their own, caches are copied or shared."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from messages.batch import BatchRow, RowResult, SequenceStart
from messages.requests import SamplingParams
from tests.worker.harness import LocalEngine, Request, prompts_of

BLOCK = 16
SEEDS = (5, 6, 7, 8)


def params(seed: int, **changes: object) -> SamplingParams:
    return msgspec.structs.replace(
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.9, seed=seed, logprobs=1), **changes
    )


class Samples:
    """The samples of one prompt on one engine: ``tables`` and slots as a scheduler would give them."""

    def __init__(self, engine: LocalEngine, prompt: list[int], samplings: list[SamplingParams], shared: int) -> None:
        self.engine = engine
        self.requests = []
        for index, sampling in enumerate(samplings):
            request = Request(prompt=tuple(prompt), sampling=sampling, name=f"s{index}")
            engine.reserve(request)
            if index:
                request.blocks[:shared] = self.requests[0].blocks[:shared]
            self.requests.append(request)

    def fork(self, request: Request) -> BatchRow:
        return BatchRow(
            request_id=request.name,
            epoch=0,
            token_ids=(),
            start=len(request.prompt),
            block_ids=tuple(request.blocks),
            samples=True,
            is_prefill=True,
            fork_of="s0",
        )

    def starts(self) -> list[SequenceStart]:
        return [self.engine._start(request) for request in self.requests]

    def begin(self, chunk_tokens: int) -> tuple[RowResult, ...]:
        """Prefill the first one by chunks and take the others along with the last."""
        leader, *others = self.requests
        opened = self.starts()
        while True:
            row = self.engine._row(leader, chunk_tokens)
            rows = [row, *(self.fork(request) for request in others)] if row.samples else [row]
            result = self.engine.execute(rows, opened)
            opened = []
            self.engine._absorb(leader, row, result.rows[0])
            if row.samples:
                break
        for request, outcome in zip(others, result.rows[1:], strict=True):
            request.opened = True
            request.computed = len(request.prompt)
            request.outputs += outcome.token_ids
            request.result.token_ids += outcome.token_ids
            request.result.error = outcome.error
        leader.opened = True
        return result.rows


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("speculative_tokens", [0, 3])
@pytest.mark.parametrize("length", [5, 32, 45])
def test_samples_of_one_prompt_get_the_tokens_of_requests_of_their_own(
    model_dir: Path, tp_size: int, speculative_tokens: int, length: int
) -> None:
    (prompt,) = prompts_of([length])
    samplings = [params(seed) for seed in SEEDS] + [params(9, temperature=0.0, frequency_penalty=0.5)]
    with LocalEngine(model_dir, tp_size, speculative_tokens=speculative_tokens) as engine:
        expected = [one.token_ids for one in engine.generate([prompt] * len(samplings), samplings)]
        samples = Samples(engine, prompt, samplings, shared=(length - 1) // BLOCK)
        samples.begin(chunk_tokens=20)
        engine.run(samples.requests)
        assert [request.result.token_ids for request in samples.requests] == expected
    assert len({tuple(tokens) for tokens in expected}) > 2


def test_a_fork_of_a_prompt_that_does_not_run_in_this_step_fails_alone(model_dir: Path) -> None:
    prompts = prompts_of([20, 20])
    with LocalEngine(model_dir) as engine:
        samples = Samples(engine, prompts[0], [params(1), params(2)], shared=1)
        other = Request(prompt=tuple(prompts[1]), sampling=params(3), name="other")
        engine.reserve(other)
        leader, follower = samples.requests
        row = engine._row(leader, 0)
        absent = msgspec.structs.replace(samples.fork(follower), fork_of="nobody")
        strange = msgspec.structs.replace(samples.fork(follower), request_id="other", block_ids=tuple(other.blocks))
        result = engine.execute([row, absent, strange], [*samples.starts(), engine._start(other)])
        assert not result.rows[0].error
        assert "nobody" in result.rows[1].error
        assert "does not begin where the prompt of s0 ends" in result.rows[2].error


def test_samples_that_share_everything_copy_nothing_and_carry_the_bootstrap(model_dir: Path) -> None:
    """As on a prefill instance: same blocks, same slot."""
    (prompt,) = prompts_of([21])
    with LocalEngine(model_dir, speculative_tokens=2) as engine:
        samples = Samples(engine, prompt, [params(1), params(2)], shared=0)
        leader, follower = samples.requests
        spare, follower.blocks, follower.slot = list(follower.blocks), leader.blocks, leader.slot
        before = bytes(engine.regions[0])
        rows = samples.begin(chunk_tokens=0)
        assert rows[0].bootstrap_hidden == rows[1].bootstrap_hidden != b""
        assert all(row.logprobs for row in rows)
        changed = bytes(engine.regions[0])
        cache = engine.runners[0]._caches.layers[3]
        assert before != changed
        for block in spare:
            assert not cache.key[block * BLOCK : (block + 1) * BLOCK].any()  # type: ignore[union-attr]
