"""A checkpoint, a fake cluster on it, and the real server in front of that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from actors.gateway.server import HttpServer
from tests.gateway.checkpoint import write_checkpoint
from tests.gateway.fake_cluster import WAIT_S, FakeCluster


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gateway") / "checkpoint")


@pytest.fixture
def cluster(checkpoint: Path) -> Iterator[FakeCluster]:
    cluster = FakeCluster(checkpoint)
    yield cluster
    cluster.close()


@pytest.fixture
def url(cluster: FakeCluster) -> Iterator[str]:
    """The server's address. A test that leaves a thread behind fails."""
    before = set(threading.enumerate())
    server = HttpServer("127.0.0.1", 0)
    server.start(cluster.app)
    yield server.url
    server.stop()
    left = {thread for thread in threading.enumerate() if thread not in before and "asyncio_" not in thread.name}
    assert not left


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For requests that wait while the test plays the instances."""
    with ThreadPoolExecutor(4) as pool:
        yield pool
