"""Fast copies of strided byte ranges between buffers, with numpy views and without the GIL.

A run that is contiguous on both sides is one memcpy. A strided pair is one numpy assignment between two
one-dimensional views whose element is a whole run (an opaque item of ``run_bytes`` bytes, so alignment does not
matter): one memmove per run, in C. Pairs that continue each other are joined first, because a call costs about as much
as copying 2 KiB.

The lists are checked as a whole by ``check_pairs`` before anything is copied; ``copy_pairs`` trusts its input.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt

from transport.dataplane import COPY_ENVIRONMENT, DataPlaneError, Strided

Bytes = npt.NDArray[np.uint8]

LONG_RUN_BYTES = 1 << 16
"""From this length on, a run is worth a call of its own, without the GIL; memcpy bypasses the cache for large ones."""

FEW_RUNS = 3
"""So few shorter runs are copied one by one: a strided view costs more than they do."""

TILE_BYTES = 1 << 20
"""Interleaved ranges are put together in a buffer of this size, which stays in the cache, before they move on."""

STREAMING = dict(COPY_ENVIRONMENT).items() <= os.environ.items()
"""Whether this process copies long runs past the cache (see ``COPY_ENVIRONMENT``): only then tiles are faster."""

_scratch = threading.local()

Piece = tuple[int, int, int, int]
"""A ``Strided`` as the plain tuple that it is: making thousands of those is twice as fast."""

Pair = tuple[Piece, Piece]


def check_ranges(region_id: str, region_bytes: int, ranges: Sequence[Strided]) -> None:
    """Raise ``DataPlaneError`` unless every range lies inside its region and its runs do not overlap."""
    for offset, run_bytes, count, stride_bytes in ranges:
        if count == 1:
            last = offset + run_bytes
        elif count > 1 and stride_bytes >= run_bytes:
            last = offset + (count - 1) * stride_bytes + run_bytes
        else:
            raise DataPlaneError(
                f"range {offset}+{run_bytes}x{count} step {stride_bytes} of region {region_id}: "
                "needs at least one run, and a step no shorter than a run"
            )
        if offset < 0 or run_bytes < 1 or last > region_bytes:
            raise DataPlaneError(
                f"range {offset}+{run_bytes}x{count} step {stride_bytes} ends at byte {last}, "
                f"outside region {region_id} of {region_bytes} bytes"
            )


def check_pairs(source: Sequence[Strided], target: Sequence[Strided]) -> int:
    """Total bytes of the pairs; raises ``DataPlaneError`` when they do not match one to one."""
    if len(source) != len(target):
        raise DataPlaneError(f"{len(source)} source ranges for {len(target)} target ranges: they must pair up")
    total = 0
    for index, (one, other) in enumerate(zip(source, target, strict=True)):
        size = one[1] * one[2]
        if size != other[1] * other[2]:
            raise DataPlaneError(f"pair {index}: {one.size_bytes} source bytes for {other.size_bytes} target bytes")
        total += size
    return total


def _normal(piece: Strided) -> Strided:
    """The same bytes with one spelling: a contiguous range has ``count == 1``."""
    offset, run_bytes, count, stride_bytes = piece
    if count == 1 or stride_bytes == run_bytes:
        return Strided(offset, run_bytes * count, 1, 0)
    return piece


def _equal_runs(source: Strided, target: Strided) -> Iterable[Pair]:
    """A pair cut so that both sides of each part have equal runs and counts."""
    source, target = _normal(source), _normal(target)
    if source.run_bytes == target.run_bytes:
        yield source, target
    elif source.count == 1:
        run, count = target.run_bytes, target.count
        yield Strided(source.offset, run, count, run), target
    elif target.count == 1:
        run, count = source.run_bytes, source.count
        yield source, Strided(target.offset, run, count, run)
    else:
        yield from _split_by_common_run(source, target)


def _split_by_common_run(source: Strided, target: Strided) -> Iterable[Pair]:
    """Both sides strided with different runs: one part per piece of the pattern that repeats."""
    run = gcd(source.run_bytes, target.run_bytes)
    source_runs, target_runs = source.run_bytes // run, target.run_bytes // run
    period = source_runs * target_runs // gcd(source_runs, target_runs)  # in common runs; both sides start a run here
    repeats = source.size_bytes // run // period
    source_step = period // source_runs * source.stride_bytes
    target_step = period // target_runs * target.stride_bytes
    for index in range(period):
        source_at = source.offset + index // source_runs * source.stride_bytes + index % source_runs * run
        target_at = target.offset + index // target_runs * target.stride_bytes + index % target_runs * run
        yield Strided(source_at, run, repeats, source_step), Strided(target_at, run, repeats, target_step)


def coalesce(source: Sequence[Strided], target: Sequence[Strided]) -> list[Pair]:
    """The same copies as fewer pairs, each with equal runs and counts on both sides, in the same order.

    Contiguous pairs that continue each other become one; so do equal runs at equal distances. Written without calls on
    the common path: fragmented block tables make lists of thousands.
    """
    pairs: list[Pair] = []
    s_off = s_step = t_off = t_step = count = 0
    run = -1  # of the pair that is still growing; -1: none is
    for one, other in zip(source, target, strict=True):
        s_next, next_run, next_count, s_next_step = one
        t_next, t_run, t_count, t_next_step = other
        if next_run != t_run or next_count != t_count:
            if run > 0:
                pairs.append(((s_off, run, count, s_step), (t_off, run, count, t_step)))
                run = -1
            pairs.extend(_equal_runs(one, other))
            (s_off, run, count, s_step), (t_off, _, _, t_step) = pairs.pop()
            continue
        if next_count > 1 and s_next_step == t_next_step == next_run:
            next_run, next_count = next_run * next_count, 1
        if count == 1 == next_count and s_next == s_off + run and t_next == t_off + run:
            run += next_run
            continue
        if run == next_run:
            if count == 1:  # two equal runs define the steps
                s_new_step, t_new_step = s_next - s_off, t_next - t_off
                follows = s_new_step >= run and t_new_step >= run
            else:
                s_new_step, t_new_step = s_step, t_step
                follows = s_next == s_off + count * s_step and t_next == t_off + count * t_step
            if follows and (next_count == 1 or (s_next_step == s_new_step and t_next_step == t_new_step)):
                count += next_count
                s_step, t_step = s_new_step, t_new_step
                continue
        if run > 0:
            pairs.append(((s_off, run, count, s_step), (t_off, run, count, t_step)))
        s_off, t_off, run, count, s_step, t_step = s_next, t_next, next_run, next_count, s_next_step, t_next_step
    if run > 0:
        pairs.append(((s_off, run, count, s_step), (t_off, run, count, t_step)))
    return pairs


def _runs(buffer: Bytes, piece: Piece) -> npt.NDArray[np.void]:
    """A view of ``buffer`` with one opaque element per run."""
    offset, run_bytes, count, stride_bytes = piece
    return np.ndarray((count,), f"V{run_bytes}", buffer.data, offset, (stride_bytes,))


def copy_pairs(source: Bytes, target: Bytes, pairs: Sequence[Pair]) -> None:
    """Copy each pair (equal runs and counts, inside the buffers) from ``source`` to ``target``, in order."""
    source_view, target_view = source.data, target.data
    index = 0
    while index < len(pairs):
        from_piece, to_piece = pairs[index]
        s_at, run, count, s_step = from_piece
        t_at, _, _, t_step = to_piece
        if STREAMING and count * t_step >= TILE_BYTES:
            width = _interleaved(pairs, index)
            if width > 1:
                _copy_in_tiles(source, target, pairs[index : index + width])
                index += width
                continue
        index += 1
        if run >= LONG_RUN_BYTES:
            for _ in range(count):
                target[t_at : t_at + run] = source[s_at : s_at + run]
                s_at += s_step
                t_at += t_step
        elif count <= FEW_RUNS:  # a memoryview keeps the GIL, but for less time than numpy needs to begin
            for _ in range(count):
                target_view[t_at : t_at + run] = source_view[s_at : s_at + run]
                s_at += s_step
                t_at += t_step
        else:
            _runs(target, to_piece)[...] = _runs(source, from_piece)


def _interleaved(pairs: Sequence[Pair], first: int) -> int:
    """How many pairs from ``first`` on fill, run beside run, one contiguous stretch of the target; 0: they do not."""
    t_begin, run, count, t_step = pairs[first][1]
    t_next = t_begin + run
    for index in range(first + 1, len(pairs)):
        if t_next == t_begin + t_step:
            return index - first
        t_at, run, other_count, other_step = pairs[index][1]
        if t_at != t_next or other_count != count or other_step != t_step:
            return 0
        t_next += run
    return len(pairs) - first if t_next == t_begin + t_step else 0


def _tile(size_bytes: int) -> Bytes:
    """This thread's scratch memory; its pages stay mapped from one copy to the next."""
    tile: Bytes | None = getattr(_scratch, "tile", None)
    if tile is None or tile.size < size_bytes:
        tile = _scratch.tile = np.ones(max(size_bytes, TILE_BYTES), dtype=np.uint8)
    return tile


def _copy_in_tiles(source: Bytes, target: Bytes, pairs: Sequence[Pair]) -> None:
    """Copy interleaved pairs: some rows of all of them into a tile, then the tile to where it belongs."""
    _, (t_begin, _, count, t_step) = pairs[0]
    rows = max(1, TILE_BYTES // t_step)
    tile = _tile(rows * t_step)
    for first in range(0, count, rows):
        rows = min(rows, count - first)
        for (s_at, run, _, s_step), (t_at, _, _, _) in pairs:
            piece = _runs(source, (s_at + first * s_step, run, rows, s_step))
            _runs(tile, (t_at - t_begin, run, rows, t_step))[...] = piece
        begin = t_begin + first * t_step
        target[begin : begin + rows * t_step] = tile[: rows * t_step]


def copy_ranges(
    source: Bytes, source_ranges: Sequence[Strided], target: Bytes, target_ranges: Sequence[Strided]
) -> int:
    """Copy ranges already checked against their buffers; returns the bytes moved. Releases the GIL while copying."""
    total = check_pairs(source_ranges, target_ranges)
    copy_pairs(source, target, coalesce(source_ranges, target_ranges))
    return total
