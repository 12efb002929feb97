"""How fast caches move: caches of real size between real rank processes, without a model, next to memcpy.

The rank nodes are real: their transfer and staging actors, executors and data plane are those of a served cluster. Only
the worker is a stand-in that fills its caches with noise and publishes their layout. This process plays schedulers and
engines. Two things are measured:

* **throughput**: the whole prompt is ready at once (as when a prefilled request is offered to a second decode instance)
  and the pull is asked for at once. ``total_ms`` is the time until every decode rank has restored, ``ratio`` compares
  it with one thread's memcpy of the same bytes;
* **restore time**: layers become ready at the pace of a prefill (``prefill_tokens_per_s``), and the time counts from
  ``FirstGeneration`` (here: ``PullKVCache``) to the last ``Restored``. Measured at ``prompt_tokens`` and at
  ``SHORT_TOKENS``.

memcpy runs between regions like those of the caches. Once, every restored byte is compared with its source.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actors.runtime.config import ConfigError, Options
from messages.handoff import TransferMode
from scripts.bench_ferry import Ferry, Sizes
from transport.dataplane import DataPlane

CHUNK_TOKENS = 8192
"""Prefill chunk of the instances: what an accelerator takes at once. It also sizes the staging windows."""

SHORT_TOKENS = 2048
"""The short prompt whose restore time the long one's is compared with."""

BLOCK_SIZE = 128
PREFILL_TOKENS_PER_S = 40_000.0
"""Pace of the prefill that the restore time is measured behind: a fast accelerator."""


def run(
    geometry: str = "qwen3.5-2b",
    topology: str = "P2/D1",
    prompt_tokens: int = 18592,
    kv_cache_transfer_mode: TransferMode = "PUSH",
    data_plane: Literal["shm", "tcp"] = "shm",
    *,
    repeats: int = 5,
    chunk_tokens: int = CHUNK_TOKENS,
    block_size: int = BLOCK_SIZE,
    speculative_tokens: int = 3,
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S,
    scattered: bool = False,
) -> dict[str, Any]:
    """Measure hand-offs (see the module); medians of ``repeats``. Times in ms, rates in 1e9 bytes per second.

    ``geometry`` is a name of ``scripts/geometries.py`` or a checkpoint; ``scattered`` shuffles the blocks on both
    sides, as after hours of serving, instead of what a fresh allocator gives. Raises ``ConfigError`` for what cannot
    be run.
    """
    sizes = parse_topology(topology)
    short_tokens = min(prompt_tokens, SHORT_TOKENS)
    options = Options(
        model=geometry,
        topology=topology,
        data_plane=data_plane,
        block_size=block_size,
        block_count=-(-prompt_tokens // block_size) + 8,
        max_seqs_per_batch=2,
        max_tokens_per_chunk_for_prefill=chunk_tokens,
        num_speculative_tokens=speculative_tokens,
        staging_leases=1,
        log_level="error",
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        ferry = Ferry(Path(folder), options, sizes, scattered)
        try:
            ferry.start()
            warm = ferry.carry(prompt_tokens, kv_cache_transfer_mode)
            verified = ferry.verify(prompt_tokens)
            moved = warm.bytes_moved
            memcpy = Memcpy(ferry.data_plane, moved)
            rounds, memcpy_ms = [], []
            for _ in range(repeats):
                rounds.append(ferry.carry(prompt_tokens, kv_cache_transfer_mode))
                memcpy_ms.append(memcpy.measure())
            paced = [ferry.carry(prompt_tokens, kv_cache_transfer_mode, prefill_tokens_per_s) for _ in range(repeats)]
            short = [ferry.carry(short_tokens, kv_cache_transfer_mode, prefill_tokens_per_s) for _ in range(repeats)]
        finally:
            ferry.stop()
    total_ms, copy_ms = statistics.median(r.total_ms for r in rounds), statistics.median(memcpy_ms)
    restore_ms = statistics.median(r.restore_ms for r in paced)
    restore_short_ms = statistics.median(r.restore_ms for r in short)
    return {
        "geometry": geometry,
        "topology": topology,
        "prompt_tokens": prompt_tokens,
        "mode": kv_cache_transfer_mode,
        "bytes": moved,
        "push_ms": statistics.median(r.push_ms for r in rounds),
        "pull_ms": statistics.median(r.pull_ms for r in rounds),
        "merge_ms": statistics.median(r.merge_ms for r in rounds),
        "total_ms": total_ms,
        "restore_ms": restore_ms,
        f"restore_{short_tokens}_ms": restore_short_ms,
        "restore_ratio": restore_ms / restore_short_ms,
        "gb_per_s": moved / total_ms / 1e6,
        "memcpy_gb_per_s": moved / copy_ms / 1e6,
        "ratio": total_ms / copy_ms,
        "verified_bytes": verified,
    }


def parse_topology(text: str) -> Sizes:
    """``P2/D1`` → sizes 2 and 1; one instance of each."""
    match = re.fullmatch(r"P([1-9]\d*)/D([1-9]\d*)", text)
    if match is None:
        raise ConfigError(f"topology {text!r}: the hand-off benchmark takes one instance of each, written like P2/D1")
    return Sizes(int(match[1]), int(match[2]))


class Memcpy:
    """One thread's copy between two buffers of the kind that caches lie in (regions), whose pages exist already."""

    def __init__(self, plane: DataPlane, size_bytes: int) -> None:
        buffers = []
        for name in ("source", "target"):
            plane.create_region(f"bench.memcpy.{name}", size_bytes)
            buffers.append(np.frombuffer(plane.view(f"bench.memcpy.{name}"), dtype=np.uint8))
        self._source, self._target = buffers
        self._source[:] = self._target[:] = 1
        self.measure()

    def measure(self) -> float:
        """Milliseconds of one copy."""
        began = time.perf_counter()
        np.copyto(self._target, self._source)
        return (time.perf_counter() - began) * 1e3
