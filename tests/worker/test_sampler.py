"""The sampling rules against a naive restatement, and draws that depend on nothing but their own row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from actors.worker.random_streams import Stream, philox, uniform
from actors.worker.sampler import choose, invert, token_logprobs
from actors.worker.sampling_rules import Draw, History, adjust, probabilities
from messages.requests import SamplingParams

VOCAB = 12
CPU = torch.device("cpu")


def draw(
    sampling: SamplingParams, prompt: Sequence[int] = (), outputs: Sequence[int] = (), drafts: Sequence[int] = ()
) -> Draw:
    return Draw(sampling, History(sampling, VOCAB, prompt, outputs, CPU), tuple(drafts))


def logits(rows: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.0


def naive_adjusted(row: list[float], d: Draw, prompt: Sequence[int], outputs: Sequence[int]) -> list[float]:
    """The rules one token at a time, as the OpenAI and vLLM documents state them."""
    s = d.sampling
    row = list(row)
    ends = {*s.stop_token_ids, *(() if s.ignore_eos else s.eos_token_ids)}
    for token in range(VOCAB):
        if len(outputs) < s.min_tokens and token in ends:
            row[token] = -math.inf
        row[token] += dict(s.logit_bias).get(token, 0.0)
        if token in prompt or token in outputs:
            row[token] = row[token] / s.repetition_penalty if row[token] > 0 else row[token] * s.repetition_penalty
        count = list(outputs).count(token)
        row[token] -= s.frequency_penalty * count + s.presence_penalty * (count > 0)
    return row


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(frequency_penalty=0.7),
        SamplingParams(presence_penalty=-1.2),
        SamplingParams(logit_bias=((1, 5.0), (4, -100.0))),
        SamplingParams(min_tokens=5, eos_token_ids=(2, 3), stop_token_ids=(6,)),
        SamplingParams(min_tokens=5, eos_token_ids=(2, 3), stop_token_ids=(6,), ignore_eos=True),
        SamplingParams(min_tokens=4, eos_token_ids=(2, 3)),
        SamplingParams(
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=0.4,
            logit_bias=((7, 1.0),),
            min_tokens=9,
            eos_token_ids=(0,),
        ),
    ],
)
def test_masks_biases_and_penalties_follow_the_rules_with_drafts_as_history(sampling: SamplingParams) -> None:
    prompt, outputs, drafts = [1, 5, 5, 8], [4, 4, 9], [9, 2]
    row = logits()
    before = row.clone()
    made = adjust(row, [draw(sampling, prompt, outputs, drafts)])[0].tolist()
    wanted = naive_adjusted(row[0].tolist(), draw(sampling), prompt, outputs + drafts)
    assert made == pytest.approx(wanted, abs=1e-5)
    assert torch.equal(row, before), "raw logits are needed afterwards"


def test_rows_without_rules_are_not_touched_and_cost_no_copy() -> None:
    rows = logits(2)
    assert adjust(rows, [draw(SamplingParams()), draw(SamplingParams(temperature=0.7))]) is rows
    mixed = adjust(rows, [draw(SamplingParams()), draw(SamplingParams(logit_bias=((0, 1.0),)))])
    assert torch.equal(mixed[0], rows[0]) and not torch.equal(mixed[1], rows[1])


def naive_probabilities(row: Sequence[float], s: SamplingParams) -> list[float]:
    scaled = [value / s.temperature for value in row]
    best = max(scaled)
    weights = [math.exp(value - best) for value in scaled]
    kept = [index for index in range(len(row)) if weights[index] >= s.min_p]
    kept.sort(key=lambda index: (-weights[index], index))
    if s.top_k:
        kept = [index for index in kept if weights[index] >= weights[kept[min(s.top_k, len(kept)) - 1]]]
    whole = sum(weights[index] for index in kept)
    nucleus, total = [], 0.0
    for index in kept:
        if nucleus and total >= s.top_p:
            break
        nucleus.append(index)
        total += weights[index] / whole
    share = sum(weights[index] for index in nucleus)
    return [weights[index] / share if index in nucleus else 0.0 for index in range(len(row))]


NARROWINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=3),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=500),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.3, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=6, top_p=0.8, min_p=0.01),
]


@pytest.mark.parametrize("sampling", NARROWINGS)
def test_temperature_min_p_top_k_and_top_p_keep_what_they_should(sampling: SamplingParams) -> None:
    row = logits()
    assert probabilities(row, [sampling])[0].tolist() == pytest.approx(
        naive_probabilities(row[0].double().tolist(), sampling), abs=1e-9
    )


def test_rows_of_one_batch_are_narrowed_each_by_its_own_parameters() -> None:
    rows = logits(len(NARROWINGS) + 1)
    together = probabilities(rows, [*NARROWINGS, SamplingParams(temperature=0.0)])
    for index, sampling in enumerate(NARROWINGS):
        alone = probabilities(rows[index : index + 1], [sampling])[0]
        torch.testing.assert_close(together[index], alone, rtol=0, atol=1e-12)
    greedy = torch.zeros(VOCAB, dtype=torch.float64)
    greedy[int(rows[-1].argmax())] = 1.0
    assert torch.equal(together[-1], greedy)


def test_ties_at_the_kth_token_are_kept() -> None:
    row = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    kept = probabilities(row, [SamplingParams(temperature=1.0, top_k=2)])[0] > 0
    assert kept.tolist() == [True, True, True, False]


def test_draws_follow_the_distribution() -> None:
    """20,000 seeds; every frequency within five standard deviations of its probability."""
    row = logits()
    sampling = [SamplingParams(temperature=1.2, top_k=8, seed=seed) for seed in range(20_000)]
    wanted = probabilities(row, sampling[:1])[0]
    points = [uniform(s.seed, 3, Stream.TARGET) for s in sampling]
    tokens = invert(wanted.expand(len(points), -1).contiguous(), points)
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    bound = 5 * (wanted * (1 - wanted) * len(points)).sqrt() + 1e-9
    assert ((counts - wanted * len(points)).abs() <= bound).all()
    assert counts[wanted == 0].sum() == 0


def test_a_row_draws_the_same_token_next_to_any_neighbours() -> None:
    """C29 at the sampler: the token depends on the row's logits, parameters, seed and index only."""
    rows = logits(6)
    samplings = [
        SamplingParams(temperature=0.8 + index * 0.1, seed=40 + index, top_p=1.0 - 0.05 * index) for index in range(5)
    ] + [SamplingParams()]
    draws = [draw(sampling, outputs=[1] * index) for index, sampling in enumerate(samplings)]
    together = choose(rows, draws)
    assert together == [choose(rows[i : i + 1], [draws[i]])[0] for i in range(6)]
    assert together == choose(rows.flip(0), draws[::-1])[::-1]
    assert together[-1] == int(rows[-1].argmax())


def test_inversion_never_yields_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    assert invert(weights, [0.0]) == [1]
    assert invert(weights, [0.25]) == [3]
    assert invert(weights, [1.0 - 2**-53]) == [3]
    assert invert(weights * 1e-3, [1.0 - 2**-53]) == [3]


def test_philox_gives_the_published_answers() -> None:
    """Known answers of Random123's Philox4x32-10."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_streams_indices_and_seeds_give_different_numbers_in_range() -> None:
    points = [
        uniform(seed, index, stream) for seed in (0, 1, -1, 1 << 63) for index in (0, 1, 1 << 33) for stream in Stream
    ]
    assert len(set(points)) == len(points)
    assert all(0.0 <= point < 1.0 for point in points)
    assert uniform(-1, 0, Stream.TARGET) == uniform((1 << 64) - 1, 0, Stream.TARGET)


def test_logprobs_are_the_models_own_with_rank_and_alternatives() -> None:
    rows = logits(3)
    expected = torch.log_softmax(rows, -1)
    entries = token_logprobs(rows, [4, 0, 7], [2, 0, VOCAB + 5])
    for index, (entry, token) in enumerate(zip(entries, (4, 0, 7), strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[index, token]), abs=1e-6)
        assert entry.rank == 1 + int((expected[index] > expected[index, token]).sum())
    assert [len(entry.top) for entry in entries] == [2, 0, VOCAB]
    assert [token for token, _ in entries[0].top] == expected[0].topk(2).indices.tolist()
    values = [value for _, value in entries[2].top]
    assert values == sorted(values, reverse=True)
