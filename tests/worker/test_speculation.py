"""Speculation changes nothing but speed: every depth, every accepted count, alone and in mixed batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.worker.runner import ModelRunner
from actors.worker.sequences import OpenSequence
from actors.worker.speculation import Drafter, Proposal
from messages.batch import BatchRow
from messages.requests import SamplingParams
from tests.worker.draft_oracle import DraftOracle
from tests.worker.harness import TINY, LocalEngine, Reference, Request, prompts_of

DEPTHS = [1, 2, 3, 5, 8]


def greedy(max_tokens: int = 16, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> dict[str, list[list[int]]]:
    """Tokens without speculation, by name of the prompt set."""
    sets = {"mixed": prompts_of([1, 15, 16, 17, 40, 5, 70, 33])}
    with LocalEngine(model_dir) as engine:
        return {name: [r.token_ids for r in engine.generate(prompts, greedy())] for name, prompts in sets.items()}


class Steered:
    """Replaces what the draft proposes: as many right tokens as ``counts`` says in turn, then wrong ones."""

    def __init__(self, engine: LocalEngine, continuations: dict[str, Sequence[int]], counts: Sequence[int]) -> None:
        self._continuations, self._counts = continuations, counts
        for runner in engine.runners:
            self._steer(runner)

    def _steer(self, runner: ModelRunner) -> None:
        drafter = runner._drafter
        assert drafter is not None
        original = drafter.propose
        counts = itertools.cycle(self._counts)

        def propose(rows: Sequence[tuple[OpenSequence, BatchRow]]) -> list[Proposal]:
            proposals = original(rows)
            for (sequence, _), proposal in zip(rows, proposals, strict=True):
                right = next(counts)
                following = self._continuations[sequence.request_id][len(sequence.outputs) :]
                for index in range(len(proposal.tokens)):
                    token = following[index] if index < len(following) else 0
                    proposal.tokens[index] = token if index < right else (token + 1) % TINY.vocab_size
            return proposals

        drafter.propose = propose  # type: ignore[method-assign]


@pytest.mark.parametrize("speculative_tokens", DEPTHS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_any_depth_gives_the_tokens_of_no_speculation(
    model_dir: Path, plain: dict[str, list[list[int]]], tp_size: int, speculative_tokens: int
) -> None:
    """C31, alone in the batch and joined by others while it verifies."""
    prompts = prompts_of([1, 15, 16, 17, 40, 5, 70, 33])
    with LocalEngine(model_dir, tp_size, speculative_tokens=speculative_tokens) as engine:
        together = engine.generate(prompts, greedy(), chunk_tokens=20, arrivals=[0, 0, 1, 2, 3, 5, 8, 9])
        alone = engine.generate(prompts[-1:], greedy())
    assert [result.token_ids for result in together] == plain["mixed"]
    assert alone[0].token_ids == plain["mixed"][-1]
    assert all(result.drafted > 0 for result in together)


@pytest.mark.parametrize("replicated", [False, True])
def test_four_ranks_with_replicated_kv_heads_and_either_draft_body(
    model_dir: Path, plain: dict[str, list[list[int]]], replicated: bool
) -> None:
    prompts = prompts_of([1, 15, 16, 17, 40, 5, 70, 33])
    with LocalEngine(model_dir, 4, speculative_tokens=3, draft_replicated=replicated) as engine:
        results = engine.generate(prompts, greedy(), chunk_tokens=50)
    assert [result.token_ids for result in results] == plain["mixed"]


@pytest.mark.parametrize("count", range(6))
def test_each_accepted_count_goes_on_from_the_right_checkpoint(
    model_dir: Path, plain: dict[str, list[list[int]]], count: int
) -> None:
    """C32: none, all, and each count between, forced; the tokens stay those without speculation."""
    prompts = prompts_of([1, 15, 16, 17, 40, 5, 70, 33])
    with LocalEngine(model_dir, speculative_tokens=5) as engine:
        requests = [
            Request(prompt=tuple(prompt), sampling=greedy(), name=f"r{index}") for index, prompt in enumerate(prompts)
        ]
        Steered(engine, {f"r{index}": tokens for index, tokens in enumerate(plain["mixed"])}, [count])
        engine.run(requests)
    for request, tokens in zip(requests, plain["mixed"], strict=True):
        assert request.outputs == tokens
        if count == 0:
            assert request.result.accepted == 0
        else:
            assert request.result.accepted >= request.result.drafted * (count - 1) // 5
        if count == 5:
            assert request.result.accepted == request.result.drafted
            assert request.result.decode_steps == 3  # 1 from prefill, then 6 + 6 + 3


@pytest.mark.parametrize("tp_size", [1, 2])
def test_rows_with_different_accepted_counts_in_one_batch(
    model_dir: Path, plain: dict[str, list[list[int]]], tp_size: int
) -> None:
    prompts = prompts_of([1, 15, 16, 17, 40, 5, 70, 33])
    with LocalEngine(model_dir, tp_size, speculative_tokens=3) as engine:
        requests = [
            Request(prompt=tuple(prompt), sampling=greedy(), name=f"r{index}") for index, prompt in enumerate(prompts)
        ]
        Steered(engine, {f"r{index}": tokens for index, tokens in enumerate(plain["mixed"])}, [3, 0, 1, 2, 2, 3, 1])
        engine.run(requests, chunk_tokens=30, arrivals=[0, 1, 1, 2, 4, 4, 5, 6])
    assert [request.outputs for request in requests] == plain["mixed"]


@pytest.mark.parametrize(
    ("tp_size", "replicated", "chunk"), [(1, False, 0), (1, False, 7), (2, False, 0), (2, True, 9)]
)
def test_drafts_are_those_of_the_naive_head(
    model_dir: Path,
    reference: Reference,
    tp_size: int,
    replicated: bool,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft's cache holds, for every position, what computing the head from scratch would see."""
    oracle = DraftOracle(model_dir, reference)
    seen: list[tuple[list[int], list[int]]] = []
    original = Drafter.propose

    def propose(self: Drafter, rows: Sequence[tuple[OpenSequence, BatchRow]]) -> list[Proposal]:
        proposals = original(self, rows)
        for (sequence, _), proposal in zip(rows, proposals, strict=True):
            seen.append(([*sequence.prompt, *sequence.outputs], list(proposal.tokens)))
        return proposals

    monkeypatch.setattr(Drafter, "propose", propose)
    with LocalEngine(model_dir, tp_size, speculative_tokens=3, draft_replicated=replicated) as engine:
        engine.generate(prompts_of([20, 1, 33]), greedy(8), chunk_tokens=chunk)
    assert len(seen) > 10
    for tokens, drafts in seen[::2]:
        assert drafts == oracle.drafts(tokens, len(drafts))


def test_a_cap_on_a_rows_drafts_is_kept_and_changes_no_token(
    model_dir: Path, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with 3, 1 and 0 drafts side by side, and a row whose draft sits out for long."""
    from tests.worker import harness

    original = harness.LocalEngine._row
    calls = iter(range(1 << 30))

    def row(self: LocalEngine, request: Request, chunk_tokens: int) -> BatchRow:
        import msgspec

        made = original(self, request, chunk_tokens)
        cap = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 1)[next(calls) // 3 % 12]
        return msgspec.structs.replace(made, speculative_tokens=min(cap, made.speculative_tokens))

    monkeypatch.setattr(harness.LocalEngine, "_row", row)
    prompts = prompts_of([1, 15, 16, 17, 40, 5, 70, 33])
    with LocalEngine(model_dir, speculative_tokens=3) as engine:
        results = engine.generate(prompts, greedy())
    assert [result.token_ids for result in results] == plain["mixed"]


def test_acceptance_stops_at_max_tokens_and_at_the_end_of_sequence(
    model_dir: Path, plain: dict[str, list[list[int]]]
) -> None:
    (prompt,) = prompts_of([1, 15, 16, 17, 40, 5, 70, 33])[4:5]
    tokens = plain["mixed"][4]
    for max_tokens in (2, 3, 5, 7):
        with LocalEngine(model_dir, speculative_tokens=5) as engine:
            request = Request(prompt=tuple(prompt), sampling=greedy(max_tokens), name="r")
            Steered(engine, {"r": tokens}, [5])
            engine.run([request])
        assert request.outputs == tokens[:max_tokens]
    stop = tokens[5]
    end = tokens.index(stop) + 1
    sampling = SamplingParams(max_tokens=16, eos_token_ids=(stop,))
    with LocalEngine(model_dir, speculative_tokens=5) as engine:
        request = Request(prompt=tuple(prompt), sampling=sampling, name="r")
        Steered(engine, {"r": tokens}, [5])
        engine.run([request])
    assert request.outputs == tokens[:end]


def test_penalties_min_tokens_and_logprobs_hold_along_drafted_positions(model_dir: Path) -> None:
    """Everything that looks at the history must see the accepted drafts, and the forced ones too."""
    prompts = prompts_of([30, 12, 25, 7])
    samplings = [
        greedy(18, repetition_penalty=1.4, logprobs=3),
        greedy(18, frequency_penalty=0.8, presence_penalty=0.5, logprobs=0),
        SamplingParams(max_tokens=18, min_tokens=9, eos_token_ids=tuple(range(40)), logprobs=2),
        greedy(18, logit_bias=((5, 4.0), (9, -100.0))),
    ]
    with LocalEngine(model_dir) as engine:
        expected = engine.generate(prompts, samplings)
    with LocalEngine(model_dir, speculative_tokens=4) as engine:
        requests = [
            Request(prompt=tuple(prompt), sampling=sampling, name=f"r{index}")
            for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        Steered(engine, {f"r{i}": result.token_ids for i, result in enumerate(expected)}, [4, 2, 3, 0])
        engine.run(requests)
    for request, wanted in zip(requests, expected, strict=True):
        assert request.outputs == wanted.token_ids
        assert request.result.accepted > 0
        assert len(request.result.logprobs) == len(wanted.logprobs)
        for ours, theirs in zip(request.result.logprobs, wanted.logprobs, strict=True):
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_stop_inside_an_accepted_run_leaves_the_slot_clean_for_the_next(
    model_dir: Path, reference: Reference, plain: dict[str, list[list[int]]]
) -> None:
    prompts = prompts_of([1, 15, 16, 17, 40, 5, 70, 33])
    with LocalEngine(model_dir, speculative_tokens=5, slot_count=1, block_count=8) as engine:
        first = Request(prompt=tuple(prompts[6]), sampling=greedy(7), name="a")
        Steered(engine, {"a": plain["mixed"][6], "b": plain["mixed"][7]}, [5])
        engine.run([first])
        second = Request(prompt=tuple(prompts[7]), sampling=greedy(), name="b")
        engine.run([second])
    assert second.outputs == plain["mixed"][7]
    reference.assert_greedy(second.prompt, second.outputs)
