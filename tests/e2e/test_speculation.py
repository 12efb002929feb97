"""Speculation changes nothing but speed: at any depth, before and after a hand-off, on any pair of TP sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from scripts.cluster import Cluster
from scripts.compare import equal_by_tie_rule
from scripts.demo_prompts import accuracy_prompts
from scripts.models import DEMO_MODEL_DIR
from tests.e2e.conftest import ask, wait_until_idle
from tests.e2e.reference import TransformersReference

MAX_TOKENS = 20


def prompts(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(Path(DEMO_MODEL_DIR) / "tokenizer.json"))
    return [tokenizer.encode(text).ids[:150] for text in accuracy_prompts(count)]


def depth(topology: str, tokens: int, **changes: Any) -> dict[str, Any]:
    return {"topology": topology, "num_speculative_tokens": tokens} | changes


CASES = [
    depth("TP1", 3),
    depth("TP2", 3),
    depth("P2/D1", 1),
    depth("P2/D1", 2),
    depth("P2/D1", 3),
    depth("P2/D1", 5),
    depth("P2/D1", 8),
    depth("P4/D1", 3),
    depth("P1/D2", 3, enable_mtp_draft_body_tp1=True),
    depth("P2/D2", 5, kv_cache_transfer_mode="PULL"),
    depth("P2/D1", 3, enable_mtp_draft_body_tp1=True),
]

MEASURED: dict[str, dict[str, int]] = {}
"""Speculation counters of each case, for the comparison between topologies."""


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("cluster", CASES, indirect=True, ids=name_of)
def test_greedy_with_drafts_equals_the_reference_alone_and_eight_at_once(
    cluster: Cluster, reference: TransformersReference
) -> None:
    """C03, C31, C32, C34: eight slots serve fifty prompts, so new hand-offs keep joining a speculating batch."""
    asked = prompts(50 if cluster.options.num_speculative_tokens == 3 else 16)
    answers = ask(cluster, asked, max_tokens=MAX_TOKENS) + ask(cluster, asked[:1], max_tokens=MAX_TOKENS)
    totals = {"drafted_tokens": 0, "accepted_tokens": 0, "decode_steps": 0}
    for prompt, answer in zip([*asked, asked[0]], answers, strict=True):
        expected = reference.greedy(prompt, MAX_TOKENS)
        token_ids = answer["choices"][0]["token_ids"]
        assert len(token_ids) == MAX_TOKENS, "never a token too many"
        assert equal_by_tie_rule(expected.token_ids, token_ids, expected.gaps), len(prompt)
        for name in totals:
            totals[name] += answer["kvferry"][name]
    assert totals["decode_steps"] < len(answers) * (MAX_TOKENS - 1), "drafts were accepted"
    MEASURED[f"{cluster.options.topology}-{cluster.options.num_speculative_tokens}"] = totals
    wait_until_idle(cluster)


def test_acceptance_is_the_same_with_and_without_disaggregation() -> None:
    """C34: within 2 %; and worth having: at least 1.8 tokens per step at depth 3."""
    alone, handed_off = MEASURED["TP1-3"], MEASURED["P2/D1-3"]
    lengths = [1 + found["accepted_tokens"] / found["decode_steps"] for found in (alone, handed_off)]
    assert min(lengths) >= 1.8
    assert abs(lengths[0] - lengths[1]) <= 0.02 * lengths[0]
