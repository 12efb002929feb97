"""Whole clusters of real processes, and the reference they are compared with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.runtime.config import Options
from scripts.client import complete_all
from scripts.cluster import Cluster
from scripts.models import DEMO_MODEL_DIR
from scripts.observe import NoAnswerError
from tests.conftest import nothing_left
from tests.e2e.reference import TransformersReference

BLOCK_SIZE = 16
CHUNK_TOKENS = 24  # not a multiple of the block: chunks end inside blocks

OPTIONS = Options(
    port=0,
    dtype="float32",  # as the reference computes; "auto" is bfloat16 on CPUs that are fast in it
    block_size=BLOCK_SIZE,
    block_count=160,
    max_model_len=512,
    max_tokens_per_batch=96,
    max_seqs_per_batch=8,
    max_tokens_per_chunk_for_prefill=CHUNK_TOKENS,
    verify_handoffs=True,
    threads_per_rank=1,
    log_level="warning",
)


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """For a module as a whole: its clusters outlive a test, and make regions and links when they first need them."""
    yield from nothing_left()


@pytest.fixture(scope="session")
def reference() -> TransformersReference:
    return TransformersReference(DEMO_MODEL_DIR)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt of ``length`` ordinary tokens, different for every ``salt``."""
    return [300 + (salt * 977 + i * i * 31 + i * 7) % 1500 for i in range(length)]


def ask(cluster: Cluster, prompts: list[list[int]], **fields: Any) -> list[dict[str, Any]]:
    """All prompts at once; every answer must be good."""
    defaults: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 12}
    answers = complete_all(cluster.url, [defaults | fields | {"prompt": prompt} for prompt in prompts])
    good = [answer for answer in answers if isinstance(answer, dict)]
    assert len(good) == len(answers), answers
    return good


def scheduler_values(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Counters and gauges of every instance's scheduler."""
    addresses = [f"{plan.name}.ctl/scheduler" for plan in cluster.topology.instances]
    return {address: dict(cluster.observer.report(address).values) for address in addresses}


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running cluster; parametrise indirectly with a topology or with a dict of options."""
    changes = {"topology": request.param} if isinstance(request.param, str) else request.param
    with Cluster(msgspec.structs.replace(OPTIONS, **changes)) as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


def wait_until_idle(cluster: Cluster, timeout_s: float = 20.0) -> None:
    """I4: every block and slot of every instance becomes free, within a bound; restarting instances are waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            held = held_now(cluster)
        except NoAnswerError as error:
            held = {"unanswered": str(error)}
        if not held:
            return
        assert time.monotonic() < deadline, f"still held (blocks, slots): {held}"


def held_now(cluster: Cluster) -> dict[str, Any]:
    """(blocks, slots) that are not free, of every instance that holds any."""
    held = {}
    for address, found in scheduler_values(cluster).items():
        counts = (found["blocks_total"] - found["blocks_free"], found["slots_total"] - found["slots_free"])
        if any(counts):
            held[address] = counts
    return held
