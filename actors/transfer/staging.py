"""Where staging leases lie: an allocator over the staging region, and how large leases and the region must be. Pure.

A lease is, for each source rank, one range of ``windows`` windows; every range starts at a multiple of 2 MiB (a huge
page, and what remote-memory hardware likes to register), windows within it at multiples of a page.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from actors.transfer.routes import TransferPlan
from messages.handoff import SourceLease, WindowRange
from messages.layout import Manifest

RANGE_ALIGNMENT_BYTES = 2 << 20
WINDOW_ALIGNMENT_BYTES = 4096
SOURCES_MAX = 8
"""How many source ranks the size of the staging region allows for; with more of them, fewer leases fit."""


def align(size_bytes: int, alignment_bytes: int) -> int:
    """``size_bytes`` rounded up to a multiple of ``alignment_bytes``."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def range_bytes(window_bytes: int, window_count: int) -> int:
    """Bytes of one source rank's range in a lease."""
    return align(align(window_bytes, WINDOW_ALIGNMENT_BYTES) * window_count, RANGE_ALIGNMENT_BYTES)


def lease_bytes(plan: TransferPlan, window_count: int) -> int:
    """Bytes of one lease under ``plan``: exact."""
    return sum(range_bytes(window.size_bytes, window_count) for window in plan.windows.values())


def cut(source_ranks: Sequence[int], window_bytes: Sequence[int], window_count: int, offset: int) -> list[SourceLease]:
    """The windows of a lease that starts at byte ``offset``."""
    leases = []
    for rank, size in zip(source_ranks, window_bytes, strict=True):
        step = align(size, WINDOW_ALIGNMENT_BYTES)
        windows = tuple(WindowRange(offset_bytes=offset + i * step, size_bytes=size) for i in range(window_count))
        leases.append(SourceLease(source_rank=rank, windows=windows))
        offset += range_bytes(size, window_count)
    return leases


class StagingSize:
    """What the staging region of one decode rank must hold, from that rank's own layout.

    Whatever the sources' TP size: each unit of a target row has one writer, so all sources' windows together hold at
    most one whole target row of each token of a chunk, plus the live rows of one slot.
    """

    def __init__(self, manifest: Manifest, window_count: int) -> None:
        chunk_tokens = manifest.max_tokens_per_chunk
        rows = {"block": chunk_tokens, "slot": 0}
        window = sum(layout.row_bytes * (rows[layout.addressed_by] or layout.live_rows) for layout in manifest.tensors)
        heads = [layout.row_units for layout in manifest.tensors if layout.role != "CONV"]
        sources = min(SOURCES_MAX, max(heads, default=1))
        self.lease_min_bytes = window * window_count
        """Below this no lease fits, whatever the sources."""
        self.lease_bytes = range_bytes(window, window_count) + sources * RANGE_ALIGNMENT_BYTES
        """Room for one lease of up to ``SOURCES_MAX`` sources."""


class StagingSpace:
    """A first-fit allocator over ``[0, size_bytes)`` whose ranges start at multiples of 2 MiB."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: list[tuple[int, int]] = [(0, size_bytes)] if size_bytes else []  # (offset, size), by offset
        self._taken: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes in granted ranges."""
        return sum(self._taken.values())

    def take(self, size_bytes: int) -> int | None:
        """The offset of a new range, or None when no free range is long enough."""
        size_bytes = align(max(1, size_bytes), RANGE_ALIGNMENT_BYTES)
        for index, (offset, free_bytes) in enumerate(self._free):
            if free_bytes >= size_bytes:
                rest = (offset + size_bytes, free_bytes - size_bytes)
                self._free[index : index + 1] = [rest] if rest[1] else []
                self._taken[offset] = size_bytes
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free the range at ``offset``; joins its neighbours. Raises ``KeyError`` when it was not taken."""
        size_bytes = self._taken.pop(offset)
        insort(self._free, (offset, size_bytes))
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._free = joined
