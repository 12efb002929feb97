"""Fast copies of strided byte ranges between buffers, with numpy views and without the GIL.

A run that is contiguous on both sides is one memcpy. A strided pair is one numpy assignment between two
one-dimensional views whose element is a whole run (an opaque item of ``run_bytes`` bytes, so alignment does not
matter): one memmove per run, in C. Pairs that continue each other are joined first, because a call costs about as much
as copying 2 KiB.

The lists are checked as a whole by ``check_pairs`` before anything is copied; ``copy_pairs`` trusts its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt

from transport.dataplane import DataPlaneError, Strided

Bytes = npt.NDArray[np.uint8]

LONG_RUN_BYTES = 1 << 18
"""From this length on, a run is worth a call of its own: memcpy bypasses the cache for large copies."""

Pair = tuple[Strided, Strided]


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


def normal(piece: Strided) -> Strided:
    """The same bytes with one spelling: a contiguous range has ``count == 1``."""
    offset, run_bytes, count, stride_bytes = piece
    if count == 1 or stride_bytes == run_bytes:
        return Strided(offset, run_bytes * count, 1, 0)
    return piece


def _same_runs(source: Strided, target: Strided) -> Iterable[Pair]:
    """The pair cut so that both sides of each part have equal runs and counts."""
    source, target = normal(source), normal(target)
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


def _joined(pair: Pair, following: Pair) -> Pair | None:
    """Both pairs as one, when the second continues the first on both sides; else None."""
    (s_off, run, count, s_step), (t_off, _, _, t_step) = pair
    (s_next, next_run, next_count, s_next_step), (t_next, _, _, t_next_step) = following
    if count == 1 and next_count == 1 and s_next == s_off + run and t_next == t_off + run:
        return Strided(s_off, run + next_run), Strided(t_off, run + next_run)
    if run != next_run:
        return None
    if count == 1:  # two equal runs at some distance: they define the steps
        s_step, t_step = s_next - s_off, t_next - t_off
        if s_step < run or t_step < run:
            return None
    elif s_next != s_off + count * s_step or t_next != t_off + count * t_step:
        return None
    if next_count > 1 and (s_next_step != s_step or t_next_step != t_step):
        return None
    total = count + next_count
    return Strided(s_off, run, total, s_step), Strided(t_off, run, total, t_step)


def coalesce(source: Sequence[Strided], target: Sequence[Strided]) -> list[Pair]:
    """The same copies as fewer pairs, each with equal runs and counts on both sides, in the same order."""
    pairs: list[Pair] = []
    for one, other in zip(source, target, strict=True):
        for pair in _same_runs(one, other):
            joined = _joined(pairs[-1], pair) if pairs else None
            if joined is None:
                pairs.append(pair)
            else:
                pairs[-1] = joined
    return pairs


def _runs(buffer: Bytes, piece: Strided) -> npt.NDArray[np.void]:
    """A view of ``buffer`` with one opaque element per run."""
    offset, run_bytes, count, stride_bytes = piece
    return np.ndarray((count,), f"V{run_bytes}", buffer.data, offset, (stride_bytes,))


def copy_pairs(source: Bytes, target: Bytes, pairs: Iterable[Pair]) -> None:
    """Copy each pair (equal runs and counts, inside the buffers) from ``source`` to ``target``, in order."""
    for (s_off, run, count, s_step), (t_off, _, _, t_step) in pairs:
        if count == 1:
            target[t_off : t_off + run] = source[s_off : s_off + run]
        elif run >= LONG_RUN_BYTES:
            for index in range(count):
                s_at, t_at = s_off + index * s_step, t_off + index * t_step
                target[t_at : t_at + run] = source[s_at : s_at + run]
        else:
            _runs(target, Strided(t_off, run, count, t_step))[...] = _runs(source, Strided(s_off, run, count, s_step))


def copy_ranges(
    source: Bytes, source_ranges: Sequence[Strided], target: Bytes, target_ranges: Sequence[Strided]
) -> int:
    """Copy ranges already checked against their buffers; returns the bytes moved. Releases the GIL while copying."""
    total = check_pairs(source_ranges, target_ranges)
    copy_pairs(source, target, coalesce(source_ranges, target_ranges))
    return total
