"""Tokens equal ``transformers`` and restored caches equal their source, on every topology, mode and batch."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.cluster import Cluster
from scripts.compare import equal_by_tie_rule
from tests.e2e.conftest import BLOCK_SIZE, CHUNK_TOKENS, ask, prompt_of, wait_until_idle
from tests.e2e.reference import TransformersReference

LENGTHS = (
    1,
    2,
    BLOCK_SIZE - 1,
    BLOCK_SIZE,
    BLOCK_SIZE + 1,
    2 * BLOCK_SIZE,
    CHUNK_TOKENS - 1,
    CHUNK_TOKENS,
    CHUNK_TOKENS + 1,
    3 * CHUNK_TOKENS + 5,
    100,
    7,
    61,
    2 * CHUNK_TOKENS,
    33,
    130,
)
"""One token, a block and its neighbours, several blocks, chunks that end inside blocks (C01, C02, C10)."""

TOPOLOGIES: list[Any] = [
    "TP1",
    "TP2",
    "TP4",
    "P1/D1",
    "P2/D1",
    "P4/D1",
    "P2/D2",
    "P1/D2",
    "P4/D2",
    "P2x2/D1",
    {"topology": "P2/D1", "kv_cache_transfer_mode": "PULL"},
    {"topology": "P1/D2", "kv_cache_transfer_mode": "PULL", "enable_pd_parallel_shard_pull": False},
    {"topology": "P2/D1", "enable_chunked_prefill": False, "max_tokens_per_batch": 512},
]


def name_of(topology: Any) -> str:
    return topology if isinstance(topology, str) else "-".join(str(value) for value in topology.values())


@pytest.mark.parametrize("cluster", TOPOLOGIES, indirect=True, ids=name_of)
class TestEveryTopology:
    def test_sixteen_requests_of_mixed_lengths_at_once_equal_the_reference(
        self, cluster: Cluster, reference: TransformersReference
    ) -> None:
        prompts = [prompt_of(length, salt) for salt, length in enumerate(LENGTHS)]
        self._check(cluster, reference, prompts, ask(cluster, prompts))

    def test_a_request_alone_equals_the_reference(self, cluster: Cluster, reference: TransformersReference) -> None:
        for length in (1, 3 * CHUNK_TOKENS + 5):
            prompt = prompt_of(length, salt=99)
            self._check(cluster, reference, [prompt], ask(cluster, [prompt]))

    def test_nothing_is_held_when_nothing_is_in_flight(self, cluster: Cluster) -> None:
        ask(cluster, [prompt_of(40, salt=5)])
        wait_until_idle(cluster)

    def _check(
        self,
        cluster: Cluster,
        reference: TransformersReference,
        prompts: list[list[int]],
        answers: list[dict[str, Any]],
    ) -> None:
        disaggregated = any(plan.role == "DECODE" for plan in cluster.topology.instances)
        for prompt, answer in zip(prompts, answers, strict=True):
            choice = answer["choices"][0]
            expected = reference.greedy(prompt, 12)
            assert equal_by_tie_rule(expected.token_ids, choice["token_ids"], expected.gaps), len(prompt)
            assert choice["finish_reason"] == "length"
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 12)
            if disaggregated:
                measured = answer["kvferry"]
                assert measured["decode_instance"].startswith("d")
                assert measured["prefill_instance"].startswith("p")
                assert measured["verified_bytes"] >= measured["bytes_moved"] > 0
