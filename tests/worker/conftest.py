"""One random checkpoint and its reference for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.harness import Reference, one_thread, tiny_checkpoint


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tests run beside each other: one torch thread each."""
    with one_thread():
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint with MTP weights: dk ≠ dv, more value heads than key heads, two KV heads."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    """``transformers`` on the same checkpoint."""
    return Reference(model_dir)
