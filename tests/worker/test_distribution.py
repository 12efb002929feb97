"""With temperature, speculation keeps the target's distribution: chi-square against exact probabilities, fixed seeds.

Every test counts outcomes of a few thousand seeds and compares Pearson's statistic with the value that a right sampler
exceeds once in a thousand times. The seeds are fixed, so a test either always passes or always fails.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from actors.worker.random_streams import Stream, uniform
from actors.worker.sampler import invert
from actors.worker.sampling_rules import History
from actors.worker.sequences import OpenSequence
from actors.worker.speculation import Proposal, verify
from messages.requests import SamplingParams
from tests.worker.harness import LocalEngine, Reference, prompts_of

EXPECTED_LEAST = 5.0
"""Outcomes expected more rarely are counted together, as Pearson's approximation needs."""

Z_OF_ONE_IN_A_THOUSAND = 3.09


def chi_square_limit(freedom: int) -> float:
    """What a chi-square variable exceeds with probability 0.001 (Wilson and Hilferty, 1931)."""
    part = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - part + Z_OF_ONE_IN_A_THOUSAND * math.sqrt(part)) ** 3)


def excess(found: Mapping[tuple[int, ...], int], exact: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's statistic over its limit; above 1 the sample does not follow ``exact``."""
    total = sum(found.values())
    assert set(found) <= set(exact), "an outcome that cannot be"
    cells = [(found.get(outcome, 0), total * share) for outcome, share in exact.items()]
    rare = [cell for cell in cells if cell[1] < EXPECTED_LEAST]
    cells = [cell for cell in cells if cell[1] >= EXPECTED_LEAST]
    if sum(expected for _, expected in rare) >= EXPECTED_LEAST:
        cells.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return statistic / chi_square_limit(len(cells) - 1)


# -- the rule alone: five tokens, two drafts ---------------------------------------------------------------------------

TARGET = torch.tensor([[0.40, 0.30, 0.15, 0.10, 0.05], [0.05, 0.10, 0.20, 0.30, 0.35], [0.2, 0.2, 0.2, 0.2, 0.2]])
DRAFT = torch.tensor([[0.05, 0.40, 0.35, 0.00, 0.20], [0.30, 0.30, 0.10, 0.10, 0.20]], dtype=torch.float64)
TRIALS = 3000


def trial(seed: int) -> tuple[list[int], list[int]]:
    """(drafts, verified tokens) of one seed."""
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True)
    history = History(sampling, 5, (), (1,), torch.device("cpu"))
    sequence = OpenSequence("x", 0, 0, sampling, (0,), [1], history, live=0, computed=1, reports_prompt=False)
    drafts = [invert(DRAFT[index : index + 1], [uniform(seed, 1 + index, Stream.DRAFT)])[0] for index in range(2)]
    logits = TARGET.log()
    verdict = verify(logits, sequence, Proposal(drafts, list(DRAFT)), logits.argmax(-1).tolist())
    return drafts, verdict.tokens


@pytest.fixture(scope="module")
def trials() -> list[tuple[list[int], list[int]]]:
    return [trial(seed) for seed in range(TRIALS)]


def test_rejection_sampling_gives_the_targets_distribution_at_every_position(
    trials: list[tuple[list[int], list[int]]],
) -> None:
    for position in range(3):
        exact = {(token,): float(TARGET[position, token]) for token in range(5)}
        found = Counter((tokens[position],) for _, tokens in trials if len(tokens) > position)
        assert excess(found, exact) <= 1.0, (position, found)
    rate = sum(len(tokens) > 1 for _, tokens in trials) / TRIALS
    expected = float(torch.minimum(TARGET[0].double(), DRAFT[0]).sum())
    assert rate == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / TRIALS))


def test_the_statistic_tells_a_wrong_rule_from_the_right_one(trials: list[tuple[list[int], list[int]]]) -> None:
    """Drafts taken as they are, or residuals that are not subtracted, would be noticed by far."""
    exact = {(token,): float(TARGET[0, token]) for token in range(5)}
    every_draft = Counter((drafts[0],) for drafts, _ in trials)
    assert excess(every_draft, exact) > 10.0
    careless: Counter[tuple[int, ...]] = Counter()
    for seed, (drafts, tokens) in enumerate(trials):
        rejected = len(tokens) == 1
        again = invert(TARGET[:1].double(), [uniform(seed, 1, Stream.RESIDUAL)])[0]
        careless[(again if rejected else drafts[0],)] += 1
    assert excess(careless, exact) > 10.0


# -- the whole runner: three tokens of a model -------------------------------------------------------------------------

CHOICES = (3, 50, 111, 200)
BIAS = 60.0
"""Added to four tokens' logits: nothing else is ever drawn, neither by the target nor by the draft."""


def exact_probabilities(
    reference: Reference, prompt: Sequence[int], count: int, temperature: float, frequency_penalty: float
) -> dict[tuple[int, ...], float]:
    """Of every sequence of ``count`` tokens, from ``transformers``' logits."""
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, share in exact.items():
            logits = reference.logits([*prompt, *tokens])[-1].double()
            penalised = [float(logits[token]) - frequency_penalty * tokens.count(token) for token in CHOICES]
            weights = torch.softmax(torch.tensor(penalised, dtype=torch.float64) / temperature, -1).tolist()
            for token, weight in zip(CHOICES, weights, strict=True):
                longer[(*tokens, token)] = share * weight
        exact = longer
    return exact


@pytest.mark.parametrize("frequency_penalty", [0.0, 1.0])
def test_a_speculating_rank_samples_what_the_model_says(
    model_dir: Path, reference: Reference, frequency_penalty: float
) -> None:
    """The joint distribution of a request's first three tokens, penalties along drafted positions included."""
    (prompt,) = prompts_of([12])
    sampling = SamplingParams(
        temperature=1.3,
        frequency_penalty=frequency_penalty,
        logit_bias=tuple((token, BIAS) for token in CHOICES),
        max_tokens=4,
        ignore_eos=True,
    )
    trials = 1000
    samplings = [msgspec.structs.replace(sampling, seed=seed) for seed in range(trials)]
    with LocalEngine(model_dir, speculative_tokens=3, slot_count=100, block_count=200) as engine:
        results = engine.generate([prompt] * trials, samplings, batch_rows=100)
    exact = exact_probabilities(reference, prompt, 3, sampling.temperature, frequency_penalty)
    assert excess(Counter(tuple(result.token_ids[:3]) for result in results), exact) <= 1.0
    accepted = sum(result.accepted for result in results) / sum(result.drafted for result in results)
    assert 0.05 < accepted < 0.95, "both ways of choosing were taken"


def test_draft_and_target_draw_from_streams_of_their_own() -> None:
    """No number of a seed serves twice: not for another token, not for another purpose."""
    points = [uniform(7, token, stream) for token, stream in itertools.product(range(64), Stream)]
    assert len(set(points)) == len(points)
    pairs = [(uniform(seed, 3, Stream.DRAFT), uniform(seed, 3, Stream.TARGET)) for seed in range(1000)]
    mean = sum((first - 0.5) * (second - 0.5) for first, second in pairs) / len(pairs)
    assert abs(mean) * 12 < 4 / math.sqrt(len(pairs)), "uncorrelated"
