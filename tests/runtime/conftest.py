"""A short run directory: paths of Unix sockets are limited to 107 bytes, and pytest's own are long."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvf-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def free_ports() -> list[int]:
    """Two TCP ports that nobody listened at a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return [one.getsockname()[1], other.getsockname()[1]]
