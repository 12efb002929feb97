"""The hand-off benchmark moves real bytes between real rank processes, on every backend and in both modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.runtime.config import ConfigError
from scripts.bench_handoff import run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "mode", "data_plane"),
    [("P2/D1", "PUSH", "shm"), ("P1/D2", "PULL", "shm"), ("P2/D1", "PUSH", "tcp"), ("P4/D2", "PULL", "tcp")],
)
def test_every_byte_arrives_and_every_figure_is_reported(topology: str, mode: Any, data_plane: Any) -> None:
    figures = run("tiny", topology, 700, mode, data_plane, repeats=1, chunk_tokens=256, block_size=16, scattered=True)
    assert figures["verified_bytes"] >= figures["bytes"] > 0
    for name in ("total_ms", "restore_ms", "gb_per_s", "memcpy_gb_per_s", "ratio"):
        assert figures[name] > 0
    assert figures["push_ms"] > 0 if mode == "PUSH" else figures["pull_ms"] > 0
    assert not list(Path("/dev/shm").glob("kvferry-bench*"))


@pytest.mark.parametrize("topology", ["P2x2/D1", "TP2", "P0/D1", "D1"])
def test_a_topology_that_is_no_pair_is_refused(topology: str) -> None:
    with pytest.raises(ConfigError, match="one instance of each"):
        run("tiny", topology, 10)
