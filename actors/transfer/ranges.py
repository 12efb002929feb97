"""From a route, block ids and a token range to byte ranges: the last computation before bytes move.

Rows are exact: a chunk may begin in the middle of a block and end in the middle of another, and only rows that it
holds are touched. Blocks that lie next to each other on both sides become one range, so a long prompt in adjacent
blocks is a handful of ranges, and nothing here loops over tokens.

Three places can be addressed: a cache tensor (rows in blocks or in a slot), a staging window (dense rows of one chunk
or of one slot), and both ends of a copy are lists of ``Strided`` that pair up one to one. Offsets are exact int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.transfer.routes import Route, TransferPlan
from messages.layout import TensorLayout
from transport.dataplane import Strided

Ints = npt.NDArray[np.int64]


class Ranges(NamedTuple):
    """Byte ranges of a copy; ``source[i]`` and ``target[i]`` hold the same number of bytes."""

    source: list[Strided]
    target: list[Strided]

    def extend(self, other: Ranges) -> None:
        """Append the other copy's ranges to this one's."""
        self.source.extend(other.source)
        self.target.extend(other.target)

    @property
    def size_bytes(self) -> int:
        """Bytes that the copy moves."""
        return sum(run * count for _, run, count, _ in self.source)


class TokenRange(NamedTuple):
    """Tokens ``[start, start+size)`` of a request."""

    start: int
    size: int


class _Rows(NamedTuple):
    """Groups of rows: ``first`` is each group's first byte, and rows follow each other ``stride_bytes`` apart."""

    first: Ints
    stride_bytes: int


def block_ranges(
    route: Route, source_block_ids: Sequence[int], target_block_ids: Sequence[int], tokens: TokenRange
) -> Ranges:
    """Rows of ``tokens`` from the source's blocks straight into the target's blocks (a route in place)."""
    rows = _rows_per_block(tokens, route.target.rows_per_resource)
    source = _in_blocks(route.source, source_block_ids, tokens)
    target = _in_blocks(route.target, target_block_ids, tokens)
    return _compile(rows, source, target, [(run.source_bytes, run.target_bytes, run.size_bytes) for run in route.runs])


def block_to_window(route: Route, source_block_ids: Sequence[int], tokens: TokenRange, area_offset: int) -> Ranges:
    """Rows of ``tokens`` from the source's blocks into the area at byte ``area_offset`` of the staging region."""
    rows = _rows_per_block(tokens, route.target.rows_per_resource)
    source = _in_blocks(route.source, source_block_ids, tokens)
    target = _dense(rows, route.row_bytes, area_offset)
    return _compile(rows, source, target, [(run.source_bytes, run.staged_bytes, run.size_bytes) for run in route.runs])


def window_to_block(route: Route, target_block_ids: Sequence[int], tokens: TokenRange, area_offset: int) -> Ranges:
    """The merge of what ``block_to_window`` brought: from the area into the target's blocks."""
    rows = _rows_per_block(tokens, route.target.rows_per_resource)
    source = _dense(rows, route.row_bytes, area_offset)
    target = _in_blocks(route.target, target_block_ids, tokens)
    return _compile(rows, source, target, [(run.staged_bytes, run.target_bytes, run.size_bytes) for run in route.runs])


def slot_ranges(route: Route, source_slot: int, target_slot: int) -> Ranges:
    """The live rows of a state slot from source to target (a route in place)."""
    rows = np.array([route.target.live_rows])
    source, target = _in_slot(route.source, source_slot), _in_slot(route.target, target_slot)
    return _compile(rows, source, target, [(run.source_bytes, run.target_bytes, run.size_bytes) for run in route.runs])


def slot_to_window(route: Route, source_slot: int, area_offset: int) -> Ranges:
    """The live rows of a state slot into a window's area."""
    rows = np.array([route.target.live_rows])
    source, target = _in_slot(route.source, source_slot), _dense(rows, route.row_bytes, area_offset)
    return _compile(rows, source, target, [(run.source_bytes, run.staged_bytes, run.size_bytes) for run in route.runs])


def window_to_slot(route: Route, target_slot: int, area_offset: int) -> Ranges:
    """The merge of what ``slot_to_window`` brought: from the area into the target's slot."""
    rows = np.array([route.target.live_rows])
    source, target = _dense(rows, route.row_bytes, area_offset), _in_slot(route.target, target_slot)
    return _compile(rows, source, target, [(run.staged_bytes, run.target_bytes, run.size_bytes) for run in route.runs])


def area_offset(plan: TransferPlan, route: Route, window_offset: int) -> int:
    """Byte of the staging region at which a staged route's area of the window at ``window_offset`` starts."""
    return window_offset + plan.windows[route.source_rank].offsets[route.name]


# -- places -------------------------------------------------------------------------------------------------------


def _rows_per_block(tokens: TokenRange, block_size: int) -> Ints:
    """How many of the tokens lie in each block they touch, in order."""
    if tokens.size < 1 or tokens.start < 0:
        raise ValueError(f"a range of {tokens.size} tokens from {tokens.start} moves nothing")
    end = tokens.start + tokens.size
    first, last = tokens.start // block_size, (end - 1) // block_size
    edges = np.arange(first, last + 2, dtype=np.int64) * block_size
    edges[0], edges[-1] = tokens.start, end
    return np.diff(edges)


def _in_blocks(layout: TensorLayout, block_ids: Sequence[int], tokens: TokenRange) -> _Rows:
    """The tokens' rows in a block tensor; ``block_ids`` is the request's whole block table."""
    block_size = layout.rows_per_resource
    first, last = tokens.start // block_size, (tokens.start + tokens.size - 1) // block_size
    if last >= len(block_ids):
        raise ValueError(
            f"{layout.name}: token {tokens.start + tokens.size - 1} lies in block {last} of its request, whose block "
            f"table has {len(block_ids)} entries"
        )
    ids = np.array(block_ids[first : last + 1], dtype=np.int64)
    if ids.min() < 0 or ids.max() >= layout.resource_count:
        raise ValueError(f"{layout.name}: a block id outside [0, {layout.resource_count}): {ids.min()} … {ids.max()}")
    starts = layout.base_bytes + ids * layout.resource_stride_bytes
    starts[0] += tokens.start % block_size * layout.row_stride_bytes
    return _Rows(starts, layout.row_stride_bytes)


def _in_slot(layout: TensorLayout, slot: int) -> _Rows:
    if not 0 <= slot < layout.resource_count:
        raise ValueError(f"{layout.name}: slot {slot} outside [0, {layout.resource_count})")
    start = layout.base_bytes + slot * layout.resource_stride_bytes
    return _Rows(np.array([start], dtype=np.int64), layout.row_stride_bytes)


def _dense(rows: Ints, row_bytes: int, offset: int) -> _Rows:
    """Rows one behind the other from ``offset`` on, cut into the same groups as the other side."""
    return _Rows(offset + (np.cumsum(rows) - rows) * row_bytes, row_bytes)


# -- ranges -------------------------------------------------------------------------------------------------------


def _compile(rows: Ints, source: _Rows, target: _Rows, runs: list[tuple[int, int, int]]) -> Ranges:
    """Ranges for groups of rows: groups that continue each other on both sides are one."""
    continues = (source.first[1:] == source.first[:-1] + rows[:-1] * source.stride_bytes) & (
        target.first[1:] == target.first[:-1] + rows[:-1] * target.stride_bytes
    )
    heads = np.flatnonzero(np.concatenate(([True], ~continues)))
    counts = np.add.reduceat(rows, heads).tolist()
    source_first, target_first = source.first[heads].tolist(), target.first[heads].tolist()
    result = Ranges([], [])
    for source_run, target_run, size in runs:
        result.source.extend(_strided(source_first, counts, source_run, size, source.stride_bytes))
        result.target.extend(_strided(target_first, counts, target_run, size, target.stride_bytes))
    return result


def _strided(first: list[int], counts: list[int], run_offset: int, size: int, stride: int) -> list[Strided]:
    """One ``Strided`` per group of rows; whole rows are one contiguous run."""
    if size == stride:
        return [Strided(start + run_offset, size * count) for start, count in zip(first, counts, strict=True)]
    return [Strided(start + run_offset, size, count, stride) for start, count in zip(first, counts, strict=True)]
