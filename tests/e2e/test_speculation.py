"""Speculation changes nothing but speed: at any depth, before and after a hand-off, on any pair of TP sizes.

Each cluster is asked once (``observe``); the tests at the end compare what different clusters said, and start those
that did not run before. Depths without a hand-off, all prompts alone: ``tests/worker/test_depths.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from actors.gateway.seeds import sample_seeds
from scripts.client import complete_all
from scripts.cluster import Cluster
from scripts.compare import TIE_TOLERANCES
from scripts.demo_prompts import accuracy_prompts
from scripts.models import DEMO_MODEL_DIR
from tests.e2e.conftest import OPTIONS, ask, prompt_of, scheduler_values, wait_until_idle
from tests.e2e.reference import TransformersReference

MAX_TOKENS = 12
ALONE_COUNT = 4
SAMPLES = 4
Case = dict[str, Any]


def depth(topology: str, tokens: int, **changes: Any) -> Case:
    return {"topology": topology, "num_speculative_tokens": tokens} | changes


SAMPLES_PROMPT = prompt_of(75, salt=41)
SAMPLED_SEED = 11
SAMPLED: dict[str, Any] = {"temperature": 0.9, "presence_penalty": 0.4, "max_tokens": MAX_TOKENS}

ALONE = depth("TP1", 3)
HANDED_OFF = depth("P2/D1", 3)
UNEQUAL = depth("P2/D1", 3, prefill_num_speculative_tokens=1, enable_mtp_draft_body_tp1=True)
OTHER_WAY = depth("P1/D2", 3, enable_mtp_draft_body_tp1=True)
PLAIN = [depth("TP1", 0), depth("P2/D1", 0, prefill_num_speculative_tokens=2), depth("P1/D2", 0)]
CASES = [
    ALONE,
    HANDED_OFF,
    UNEQUAL,
    OTHER_WAY,
    depth("P2/D1", 1),
    depth("P2/D1", 2),
    depth("P2/D1", 5, prefill_num_speculative_tokens=8),
    depth("P2/D1", 8),
    depth("TP2", 3),
    depth("P4/D1", 3),
    depth("P2/D2", 5, kv_cache_transfer_mode="PULL"),
    *PLAIN,
]


def name_of(case: Case) -> str:
    changes = [f"{key}={value}" for key, value in case.items()]
    return ",".join(changes).replace("num_speculative_tokens", "S").replace("topology=", "")


@cache
def prompts(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    return [tokenizer.encode(text).ids[:150] for text in accuracy_prompts(count)]


def prompts_for(options: Any) -> list[list[int]]:
    """Fifty at every depth on one topology with and one without a hand-off, fewer on the others."""
    return prompts(50) if options.num_speculative_tokens and options.topology in ("P2/D1", "TP1") else prompts(50)[:8]


def alone_of(options: Any) -> list[list[int]]:
    """Those of them that are asked alone, too: others at every depth."""
    asked = prompts_for(options)
    first = options.num_speculative_tokens * ALONE_COUNT % len(asked)
    return asked[first : first + ALONE_COUNT]


@dataclass(frozen=True)
class Observed:
    """What one cluster answered: greedy tokens per prompt, speculation in total, tokens drawn with fixed seeds.

    ``samples`` are the ``n`` choices of one request, ``single`` those of requests with the same seeds; the prompt is
    ``SAMPLES_PROMPT`` long, of which ``prefilled`` were computed for all samples together.
    """

    greedy: list[list[int]]
    drafted: int
    accepted: int
    steps: int
    sampled: list[list[int]]
    samples: list[list[int]]
    single: list[list[int]]
    prefilled: int

    @property
    def mean_accepted_length(self) -> float:
        return 1 + self.accepted / self.steps


_observed: dict[str, Observed] = {}


def observe(cluster: Cluster) -> Observed:
    """Eight slots serve all prompts at once, so new hand-offs keep joining a speculating batch; then some alone."""
    answers = ask(cluster, prompts_for(cluster.options), max_tokens=MAX_TOKENS)
    for prompt in alone_of(cluster.options):
        answers += ask(cluster, [prompt], max_tokens=MAX_TOKENS)
    draws = [
        {"prompt": prompt_of(10 + 11 * salt, salt), "seed": salt, "temperature": 0.9, "top_p": 0.95, "top_k": 50}
        | {"frequency_penalty": 0.3, "ignore_eos": True, "return_token_ids": True, "max_tokens": MAX_TOKENS}
        for salt in range(6)
    ]
    sampled = [answer for answer in complete_all(cluster.url, draws) if isinstance(answer, dict)]
    wait_until_idle(cluster)
    samples, prefilled = observe_samples(cluster)
    single = [
        ask(cluster, [SAMPLES_PROMPT], **SAMPLED, seed=seed)[0]["choices"][0]["token_ids"]
        for seed in sample_seeds(SAMPLED_SEED, SAMPLES)
    ]
    wait_until_idle(cluster)
    return Observed(
        greedy=[answer["choices"][0]["token_ids"] for answer in answers],
        drafted=sum(answer["kvferry"]["drafted_tokens"] for answer in answers),
        accepted=sum(answer["kvferry"]["accepted_tokens"] for answer in answers),
        steps=sum(answer["kvferry"]["decode_steps"] for answer in answers),
        sampled=[answer["choices"][0]["token_ids"] for answer in sampled],
        samples=samples,
        single=single,
        prefilled=prefilled,
    )


def observe_samples(cluster: Cluster) -> tuple[list[list[int]], int]:
    """The tokens of each sample of one prompt, and how many prompt tokens were computed for them."""
    before = prefilled_tokens(cluster)
    (answer,) = ask(cluster, [SAMPLES_PROMPT], n=SAMPLES, seed=SAMPLED_SEED, **SAMPLED)
    wait_until_idle(cluster)
    cached = [choice["kvferry"]["cached_tokens"] for choice in answer["choices"]]
    assert cached == [0] + [len(SAMPLES_PROMPT)] * (SAMPLES - 1)
    return [choice["token_ids"] for choice in answer["choices"]], prefilled_tokens(cluster) - before


def prefilled_tokens(cluster: Cluster) -> int:
    return sum(int(values["prefilled_tokens"]) for values in scheduler_values(cluster).values())


def observed(case: Case) -> Observed:
    """What the cluster of this case answered; it is started if no test did so before."""
    name = name_of(case)
    if name not in _observed:
        with Cluster(msgspec.structs.replace(OPTIONS, **case)) as cluster:
            _observed[name] = observe(cluster)
    return _observed[name]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_greedy_tokens_equal_the_reference_alone_and_eight_at_once(
    case: Case, reference: TransformersReference
) -> None:
    """C03, C31, C32, C33."""
    found = observed(case)
    options = msgspec.structs.replace(OPTIONS, **case)
    asked, alone = prompts_for(options), alone_of(options)
    for prompt, token_ids in zip([*asked, *alone], found.greedy, strict=True):
        assert len(token_ids) == MAX_TOKENS, "never a token too many"
        assert max(reference.leads(prompt, token_ids)) < TIE_TOLERANCES["float32"], len(prompt)
    if case["num_speculative_tokens"]:
        assert found.accepted > 0.3 * found.steps
        assert found.steps + found.accepted == len(found.greedy) * (MAX_TOKENS - 1)
    else:
        assert found.drafted == 0


@pytest.mark.parametrize("case", [HANDED_OFF, UNEQUAL, OTHER_WAY], ids=name_of)
def test_acceptance_is_the_same_with_and_without_disaggregation(case: Case) -> None:
    """C34: within 2 %; and worth having: at least 1.8 tokens per step at depth 3."""
    alone, handed_off = observed(ALONE), observed(case)
    if len(alone.greedy) == len(handed_off.greedy):
        lengths = [alone.mean_accepted_length, handed_off.mean_accepted_length]
        assert min(lengths) >= 1.8
        assert abs(lengths[0] - lengths[1]) <= 0.02 * lengths[0]
    else:
        assert handed_off.mean_accepted_length >= 1.8


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_samples_of_one_prompt_share_its_prefill_and_get_the_tokens_of_requests_of_their_own(case: Case) -> None:
    """On every topology, with and without speculation; and the first one is what the request without ``n`` gets."""
    found = observed(case)
    assert found.samples == found.single
    assert len({tuple(tokens) for tokens in found.samples}) > 1
    assert found.prefilled == len(SAMPLES_PROMPT)


@pytest.mark.parametrize("cases", [PLAIN, [ALONE, HANDED_OFF, UNEQUAL, OTHER_WAY]], ids=["S=0", "S=3"])
def test_a_seed_draws_the_same_tokens_on_every_topology(cases: list[Case]) -> None:
    """C29, penalties included: on one rank or several, with or without a hand-off, whatever P's own depth is."""
    first = observed(cases[0]).sampled
    assert len({tuple(tokens) for tokens in first}) == 6
    for case in cases[1:]:
        assert observed(case).sampled == first, name_of(case)
