"""C29 on real processes, with drafts: a seed repeats its tokens under memory pressure and after a death.

Float32 on the demo model with fixed seeds: what is computed again differs in its last bits only, and none of these
draws lies as near to a limit. Every step boundary and depth: ``tests/worker/test_repeats.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from scripts.client import complete_all
from scripts.cluster import Cluster
from tests.e2e.conftest import OPTIONS, prompt_of, scheduler_values, wait_until_idle

MAX_TOKENS = 40
REQUESTS: list[dict[str, Any]] = [
    {"prompt": prompt_of(20 + 9 * salt, salt), "seed": salt, "temperature": 0.8 + 0.1 * salt}
    | {"max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True}
    for salt in range(5)
]


@contextmanager
def serving(topology: str, **changes: Any) -> Iterator[Cluster]:
    fixed = {"topology": topology, "num_speculative_tokens": 3, "dtype": "float32"}
    with Cluster(msgspec.structs.replace(OPTIONS, **fixed, **changes)) as cluster:
        yield cluster
        wait_until_idle(cluster, timeout_s=60.0)


def answers_of(cluster: Cluster) -> list[dict[str, Any]]:
    answers = [answer for answer in complete_all(cluster.url, REQUESTS) if isinstance(answer, dict)]
    assert len(answers) == len(REQUESTS)
    return answers


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    with serving("TP1") as cluster:
        answers = answers_of(cluster)
    assert sum(answer["kvferry"]["accepted_tokens"] for answer in answers) > 10
    return tokens_of(answers)


def test_a_decode_instance_without_blocks_for_all_repeats_every_token(undisturbed: list[list[int]]) -> None:
    with serving("P2/D1", block_size=4, block_count=40) as cluster:
        assert tokens_of(answers_of(cluster)) == undisturbed
        assert scheduler_values(cluster)["d0.ctl/scheduler"]["preempted"] > 0


def test_a_stream_goes_on_with_the_same_tokens_when_its_decode_instance_dies(undisturbed: list[list[int]]) -> None:
    with serving("P2/D1x2", faults="kill sent=Generation nth=4 node=d0.ctl", drain_timeout_ms=3_000) as cluster:
        answers = answers_of(cluster)
    assert max(answer["kvferry"]["attempts"] for answer in answers) > 1
    assert tokens_of(answers) == undisturbed
