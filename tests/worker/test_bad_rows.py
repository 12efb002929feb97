"""One bad request never harms another: whatever is wrong with a row is told in that row, and the rank goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.worker import sampling_rules
from actors.worker.sampling_rules import Draw
from messages.batch import SequenceStart
from messages.requests import SamplingParams
from tests.worker.harness import TINY, Generated, LocalEngine, Request, prompts_of

PROMPTS = prompts_of([9, 21, 30])
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
POISON = (5, 1.25)
"""A logit bias that the broken rule of these tests cannot digest."""


@pytest.fixture(scope="module")
def tokens(model_dir: Path) -> list[list[int]]:
    """What the prompts give when nothing is wrong."""
    with LocalEngine(model_dir) as engine:
        return [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(params=[(1, 0), (1, 3), (2, 3)], ids=["TP1", "TP1-S3", "TP2-S3"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[LocalEngine]:
    tp_size, depth = request.param
    with LocalEngine(model_dir, tp_size, speculative_tokens=depth) as engine:
        yield engine


def break_rule_for_poison(monkeypatch: pytest.MonkeyPatch, from_token: int = 0) -> None:
    """From its ``from_token``-th output on, a poisoned row raises inside the rules of sampling."""
    original: Callable[[torch.Tensor, Draw], None] = sampling_rules._adjust_row

    def adjust_row(row: torch.Tensor, draw: Draw) -> None:
        if POISON in draw.sampling.logit_bias and draw.token_index >= from_token:
            raise ZeroDivisionError("nobody foresaw\nthis value")
        original(row, draw)

    monkeypatch.setattr(sampling_rules, "_adjust_row", adjust_row)


@pytest.mark.parametrize("from_token", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_sampling_raises_fails_alone_at_its_first_token_or_later(
    engine: LocalEngine,
    tokens: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    from_token: int,
    temperature: float,
) -> None:
    """Also while its drafts are drawn and verified, and on every rank alike (the engine compares them)."""
    break_rule_for_poison(monkeypatch, from_token)
    poisoned = msgspec.structs.replace(GREEDY, logit_bias=(POISON,), temperature=temperature, seed=3)
    results = engine.generate(PROMPTS, [GREEDY, poisoned, GREEDY])
    assert results[1].error == "sampling failed for this sequence: ZeroDivisionError: nobody foresaw this value"
    assert len(results[1].token_ids) <= from_token
    assert [results[0].token_ids, results[2].token_ids] == [tokens[0], tokens[2]]
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == tokens, "the rank lives"


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rules",
    [
        {"min_tokens": 4, "stop_token_ids": tuple(range(TINY.vocab_size))},
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e39},
    ],
    ids=["every token excluded", "no numbers", "overflow"],
)
def test_rules_that_leave_no_token_fail_their_row_alone(
    engine: LocalEngine, tokens: list[list[int]], rules: dict[str, Any], temperature: float, penalty: float
) -> None:
    """Whatever the rules, a row draws a token of the vocabulary or fails: an index beyond it would break the step."""
    excluded = msgspec.structs.replace(GREEDY, temperature=temperature, seed=3, frequency_penalty=penalty, **rules)
    results = engine.generate(PROMPTS, [GREEDY, excluded, GREEDY])
    assert results[1].error.startswith("sampling failed for this sequence") and results[1].token_ids == []
    assert [results[0].token_ids, results[2].token_ids] == [tokens[0], tokens[2]]
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == tokens, "the rank lives"


def test_prompt_logprobs_that_raise_fail_their_row_alone(
    engine: LocalEngine, tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> list[Any]:
        raise ValueError("no logprobs today")

    monkeypatch.setattr("actors.worker.runner.token_logprobs", broken)
    asking = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    results = engine.generate(PROMPTS, [GREEDY, asking, GREEDY])
    assert "no logprobs today" in results[1].error
    assert [results[0].token_ids, results[2].token_ids] == [tokens[0], tokens[2]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_token_ids": (1, 2, 10_000)}, "token id 10000 is outside the vocabulary of 320"),
        ({"output_token_ids": (-7,)}, "token id -7 is outside the vocabulary of 320"),
        ({"slot": 99}, "state slot 99 does not exist"),
        ({"sampling": SamplingParams(repetition_penalty="x")}, "sampling parameters cannot be used"),  # type: ignore[arg-type]
    ],
)
def test_a_sequence_that_cannot_be_opened_answers_its_own_rows(
    engine: LocalEngine,
    tokens: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    reason: str,
) -> None:
    def history(sampling: SamplingParams, *arguments: Any) -> sampling_rules.History:
        if isinstance(sampling.repetition_penalty, str):
            raise TypeError("a word is no number")
        return sampling_rules.History(sampling, *arguments)

    monkeypatch.setattr("actors.worker.sequences.History", history)
    penalties = SamplingParams(frequency_penalty=0.5, max_tokens=8, ignore_eos=True)
    start = SequenceStart(request_id="bad", epoch=0, slot=15, sampling=penalties, prompt_token_ids=tuple(PROMPTS[1]))
    bad = Request(tuple(PROMPTS[1]), penalties, start=msgspec.structs.replace(start, **changes), name="bad")
    others = [Request(tuple(prompt), GREEDY) for prompt in (PROMPTS[0], PROMPTS[2])]
    engine.run([others[0], bad, others[1]])
    assert reason in bad.result.error
    assert [other.result.token_ids for other in others] == [tokens[0], tokens[2]]


# -- the bootstrap of a hand-off ---------------------------------------------------------------------------------------


def hand_over(engine: LocalEngine, prompt: Sequence[int], change: Callable[[SequenceStart], SequenceStart]) -> Request:
    """A request whose prompt is computed here, then closed and opened again as a hand-off's target would open it.

    Its caches stay where they are: only the start message crosses, changed by ``change``.
    """
    request = Request(tuple(prompt), GREEDY, name="source")
    engine.reserve(request)
    source = Request(tuple(prompt), GREEDY, name="source", blocks=request.blocks, slot=request.slot)
    start = engine._start(source)
    row = engine._row(source, 0)
    first = engine.execute([row], [start]).rows[0]
    engine.execute((), closed=["source"])
    restored = msgspec.structs.replace(
        start,
        request_id="target",
        epoch=1,
        output_token_ids=first.token_ids,
        bootstrap_hidden=first.bootstrap_hidden,
        bootstrap_dtype=first.bootstrap_dtype,
        restored=True,
    )
    request.name, request.outputs, request.computed = "target", list(first.token_ids), len(prompt)
    request.result = Generated(token_ids=list(first.token_ids))
    request.start = msgspec.structs.replace(change(restored), epoch=0)
    return request


def without_bootstrap(start: SequenceStart) -> SequenceStart:
    return msgspec.structs.replace(start, bootstrap_hidden=b"", bootstrap_dtype="")


def too_short(start: SequenceStart) -> SequenceStart:
    return msgspec.structs.replace(start, bootstrap_hidden=start.bootstrap_hidden[:-4])


def of_another_dtype(start: SequenceStart) -> SequenceStart:
    return msgspec.structs.replace(start, bootstrap_dtype="bfloat16")


def not_finite(start: SequenceStart) -> SequenceStart:
    return msgspec.structs.replace(start, bootstrap_hidden=b"\xff" * len(start.bootstrap_hidden))


def without_first_token(start: SequenceStart) -> SequenceStart:
    return msgspec.structs.replace(start, output_token_ids=())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_bootstrap, "carried no MTP bootstrap state"),
        (too_short, "has 252 bytes, this model needs 256"),
        (of_another_dtype, "is bfloat16, this instance computes in float32 (option: dtype)"),
        (not_finite, "is not finite"),
        (without_first_token, "must come with its first output token"),
    ],
)
def test_a_missing_or_mismatched_bootstrap_fails_that_request_clearly_and_the_rank_lives(
    model_dir: Path,
    tokens: list[list[int]],
    change: Callable[[SequenceStart], SequenceStart],
    reason: str,
) -> None:
    """C35."""
    with LocalEngine(model_dir, speculative_tokens=3) as engine:
        good = hand_over(engine, PROMPTS[0], lambda start: start)
        engine.run([good])
        assert good.result.token_ids == tokens[0]
        assert good.result.accepted <= good.result.drafted > 0, "the first step after a hand-off speculates"
        bad = hand_over(engine, PROMPTS[1], change)
        other = Request(tuple(PROMPTS[2]), GREEDY)
        engine.run([other, bad])
        assert reason in bad.result.error
        assert other.result.token_ids == tokens[2]
        assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == tokens


def test_without_speculation_no_bootstrap_is_needed(model_dir: Path, tokens: list[list[int]]) -> None:
    """C33: a target that does not draft takes what any source sends, or nothing."""
    with LocalEngine(model_dir) as engine:
        request = hand_over(engine, PROMPTS[0], without_bootstrap)
        engine.run([request])
        assert request.result.token_ids == tokens[0]
