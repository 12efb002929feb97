"""The failure rules on real processes: a plan breaks a P2/D1x2 cluster, and no client notices more than a pause."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import msgspec
import pytest

from scripts.cluster import Cluster
from scripts.compare import equal_by_tie_rule
from scripts.models import DEMO_MODEL_DIR
from tests.e2e.conftest import OPTIONS, ask, prompt_of, scheduler_values, wait_until_idle
from tests.e2e.reference import TransformersReference

MAX_TOKENS = 24


class Scenario(NamedTuple):
    """One fault plan (as one line) and what the failure rules say about it."""

    name: str
    faults: str
    prefilled_once: bool
    options: dict[str, Any] = {}


SCENARIOS = [
    Scenario("a decode rank killed when it should pull (rule 2)", "kill handled=PullKVCache node=d0.r0", True),
    Scenario(
        "a decode control node killed at FirstGeneration (rule 2)", "kill handled=FirstGeneration node=d0.ctl", True
    ),
    Scenario("a decode instance killed while it streams (rule 3)", "kill sent=Generation nth=3 node=d0.ctl", False),
    Scenario("a prefill rank killed between two chunks (rule 4)", "kill handled=ExecuteBatch nth=2 node=p0.r1", False),
    Scenario(
        "a prefill control node killed at RequestAccepted (rule 4)", "kill handled=RequestAccepted node=p0.ctl", False
    ),
    Scenario("a write of a chunk fails (rule 5)", "fail write operation=write nth=3 node=p0.r0", True),
    Scenario("a merge fails (rule 5)", "fail write operation=copy nth=2 node=d0.r0", True),
    Scenario(
        "a decode rank that hangs when it should pull",
        "hang handled=PullKVCache node=d0.r0",
        True,
        {"hang_timeout_ms": 4_000},
    ),
    Scenario(
        "FirstGeneration lost twice",
        "drop type=FirstGeneration receiver=d0.ctl times=2",
        True,
        {"handoff_timeout_ms": 3_000},
    ),
    Scenario(
        "the same under PULL with drafts",
        "kill handled=PullKVCache node=d0.r0",
        True,
        {"kv_cache_transfer_mode": "PULL", "num_speculative_tokens": 3},
    ),
]


@pytest.fixture(scope="module")
def reference() -> TransformersReference:
    return TransformersReference(DEMO_MODEL_DIR)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_clients_get_every_token_and_everything_is_freed(scenario: Scenario, reference: TransformersReference) -> None:
    options = msgspec.structs.replace(
        OPTIONS, topology="P2/D1x2", faults=scenario.faults, drain_timeout_ms=3_000, **scenario.options
    )
    prompts = [prompt_of(60 + 7 * salt, salt) for salt in range(6)]
    with Cluster(options) as cluster:
        assert cluster.run_dir is not None
        run_id = cluster.run_dir.run_id
        answers = ask(cluster, prompts, max_tokens=MAX_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = reference.greedy(prompt, MAX_TOKENS)
            token_ids = answer["choices"][0]["token_ids"]
            assert equal_by_tie_rule(expected.token_ids, token_ids, expected.gaps)
            assert answer["usage"]["completion_tokens"] == MAX_TOKENS
        attempts = max(answer["kvferry"]["attempts"] for answer in answers)
        assert (attempts == 1) is scenario.prefilled_once, "a request is submitted again only when its prefill is lost"
        wait_until_idle(cluster, timeout_s=60.0)
    assert not [name for name in os.listdir("/dev/shm") if run_id in name]


@pytest.mark.slow
@pytest.mark.parametrize("node", ["d0.r0", "d0.ctl"])
def test_an_instance_that_died_before_its_first_request_takes_it_in_its_next_life(node: str) -> None:
    """Nothing of the hand-off is lost on links that were never used: no offer and no hand-off has to time out."""
    options = msgspec.structs.replace(OPTIONS, topology="P2/D1", handoff_timeout_ms=600_000)
    with Cluster(options) as cluster:

        def unit() -> dict[str, Any]:
            found: dict[str, Any] = cluster.observer.status()["units"]["d0"]
            return found

        os.kill(cluster.observer.status()["nodes"][node]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (unit()["incarnation"], unit()["state"]) != (2, "running"):
            assert time.monotonic() < deadline, unit()
        answers = ask(cluster, [prompt_of(60, salt) for salt in range(2)], max_tokens=4)
        assert [answer["kvferry"]["attempts"] for answer in answers] == [1, 1]
        assert "silent" not in str(scheduler_values(cluster)["p0.ctl/scheduler"])
