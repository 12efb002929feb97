"""A short run directory: paths of Unix sockets are limited to 107 bytes, and pytest's own are long."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvf-"))
    yield path
    shutil.rmtree(path)
