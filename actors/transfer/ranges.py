"""From a route, block ids and a token range to byte ranges: the last computation before bytes move.

Rows are exact: a chunk may begin in the middle of a block and end in the middle of another, and only rows that it
holds are touched. Blocks that lie next to each other on both sides become one range, so a long prompt in adjacent
blocks is a handful of ranges, and nothing here loops over tokens.

Three places can be addressed: a cache tensor (rows in blocks or in a slot), a staging window (dense rows of one chunk
or of one slot), and both ends of a copy are lists of ``Strided`` that pair up one to one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from actors.transfer.routes import Blocks, Route, TransferPlan
from messages.layout import TensorLayout
from transport.dataplane import Strided

GROUPS_CACHED = 512
"""Chunks whose row groups are remembered: those under way, over all requests, both directions."""


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


_Groups = tuple[tuple[int, int, int], ...]
"""(first byte in the source, first byte in the target, rows) of groups of rows that lie evenly spaced on both sides;
the offsets are relative to where each side begins."""


def block_ranges(
    route: Route, source_block_ids: tuple[int, ...], target_block_ids: tuple[int, ...], tokens: TokenRange
) -> Ranges:
    """Rows of ``tokens`` from the source's blocks straight into the target's blocks (a route in place)."""
    source, target = route.source, route.target
    source_ids, target_ids = _touched(source, source_block_ids, tokens), _touched(target, target_block_ids, tokens)
    groups = _groups(tokens, route.source_blocks, source_ids, route.target_blocks, target_ids)
    return _emit(
        groups,
        source.base_bytes,
        source.row_stride_bytes,
        target.base_bytes,
        target.row_stride_bytes,
        route.runs_in_place,
    )


def block_to_window(route: Route, source_block_ids: tuple[int, ...], tokens: TokenRange, area_offset: int) -> Ranges:
    """Rows of ``tokens`` from the source's blocks into the area at byte ``area_offset`` of the staging region."""
    source = route.source
    touched = _touched(source, source_block_ids, tokens)
    groups = _groups(tokens, route.source_blocks, touched, route.staged_blocks, ())
    return _emit(groups, source.base_bytes, source.row_stride_bytes, area_offset, route.row_bytes, route.runs_to_window)


def window_to_block(route: Route, target_block_ids: tuple[int, ...], tokens: TokenRange, area_offset: int) -> Ranges:
    """The merge of what ``block_to_window`` brought: from the area into the target's blocks."""
    target = route.target
    touched = _touched(target, target_block_ids, tokens)
    groups = _groups(tokens, route.staged_blocks, (), route.target_blocks, touched)
    return _emit(
        groups, area_offset, route.row_bytes, target.base_bytes, target.row_stride_bytes, route.runs_from_window
    )


def slot_ranges(route: Route, source_slot: int, target_slot: int) -> Ranges:
    """The live rows of a state slot from source to target (a route in place)."""
    source, target = route.source, route.target
    at, to = _slot_offset(source, source_slot), _slot_offset(target, target_slot)
    return _emit(_slot(route), at, source.row_stride_bytes, to, target.row_stride_bytes, route.runs_in_place)


def slot_to_window(route: Route, source_slot: int, area_offset: int) -> Ranges:
    """The live rows of a state slot into a window's area."""
    at = _slot_offset(route.source, source_slot)
    return _emit(_slot(route), at, route.source.row_stride_bytes, area_offset, route.row_bytes, route.runs_to_window)


def window_to_slot(route: Route, target_slot: int, area_offset: int) -> Ranges:
    """The merge of what ``slot_to_window`` brought: from the area into the target's slot."""
    to = _slot_offset(route.target, target_slot)
    return _emit(_slot(route), area_offset, route.row_bytes, to, route.target.row_stride_bytes, route.runs_from_window)


def area_offset(plan: TransferPlan, route: Route, window_offset: int) -> int:
    """Byte of the staging region at which a staged route's area of the window at ``window_offset`` starts."""
    return window_offset + plan.windows[route.source_rank].offsets[route.name]


# -- places -------------------------------------------------------------------------------------------------------


def _touched(layout: TensorLayout, block_ids: tuple[int, ...], tokens: TokenRange) -> tuple[int, ...]:
    """The blocks, of a request's whole block table, in which the tokens lie."""
    if tokens.size < 1 or tokens.start < 0:
        raise ValueError(f"a range of {tokens.size} tokens from {tokens.start} moves nothing")
    block_size = layout.rows_per_resource
    first, last = tokens.start // block_size, (tokens.start + tokens.size - 1) // block_size
    if last >= len(block_ids):
        raise ValueError(
            f"{layout.name}: token {tokens.start + tokens.size - 1} lies in block {last} of its request, whose block "
            f"table has {len(block_ids)} entries"
        )
    return block_ids[first : last + 1]


def _slot_offset(layout: TensorLayout, slot: int) -> int:
    if not 0 <= slot < layout.resource_count:
        raise ValueError(f"{layout.name}: slot {slot} outside [0, {layout.resource_count})")
    return layout.base_bytes + slot * layout.resource_stride_bytes


def _slot(route: Route) -> _Groups:
    return ((0, 0, route.target.live_rows),)


# -- ranges -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=GROUPS_CACHED)
def _groups(
    tokens: TokenRange, source: Blocks, source_ids: tuple[int, ...], target: Blocks, target_ids: tuple[int, ...]
) -> _Groups:
    """Rows that continue each other on both sides, as few groups as possible.

    Equal for all layers and both roles of a chunk, hence cached. No ids: that side is dense.
    """
    counts = _rows_per_block(tokens, source.rows)
    source_first = _in_blocks(source, source_ids, tokens) if source_ids else _dense_rows(source, counts)
    target_first = _in_blocks(target, target_ids, tokens) if target_ids else _dense_rows(target, counts)
    groups: list[tuple[int, int, int]] = []
    next_at = next_to = -1  # where rows would lie that continue the last group
    for at, to, count in zip(source_first, target_first, counts, strict=True):
        if at == next_at and to == next_to:
            source_at, target_at, before = groups[-1]
            groups[-1] = (source_at, target_at, before + count)
        else:
            groups.append((at, to, count))
        next_at = at + count * source.row_stride_bytes
        next_to = to + count * target.row_stride_bytes
    return tuple(groups)


def _rows_per_block(tokens: TokenRange, block_size: int) -> list[int]:
    """How many of the tokens lie in each block they touch, in order."""
    skipped, end = tokens.start % block_size, tokens.start % block_size + tokens.size
    blocks = -(-end // block_size)
    counts = [block_size] * blocks
    counts[-1] -= blocks * block_size - end
    counts[0] -= skipped
    return counts


def _in_blocks(blocks: Blocks, ids: tuple[int, ...], tokens: TokenRange) -> list[int]:
    """The first byte of the tokens' rows in each block."""
    if min(ids) < 0 or max(ids) >= blocks.resource_count:
        raise ValueError(f"a block id outside [0, {blocks.resource_count}): {min(ids)} … {max(ids)}")
    stride = blocks.resource_stride_bytes
    first = [index * stride for index in ids]
    first[0] += tokens.start % blocks.rows * blocks.row_stride_bytes
    return first


def _dense_rows(blocks: Blocks, counts: list[int]) -> list[int]:
    """Where dense rows begin that are cut into the same groups as the other side."""
    stride = blocks.row_stride_bytes
    return [rows * stride for rows in accumulate(counts[:-1], initial=0)]


def _emit(
    groups: _Groups,
    source_offset: int,
    source_stride: int,
    target_offset: int,
    target_stride: int,
    runs: tuple[tuple[int, int, int], ...],
) -> Ranges:
    """The groups as ranges, for each run (source offset, target offset, bytes) of a row.

    Both ranges of a pair have equal runs, unless they are one contiguous run: so nobody has to cut them again.
    """
    result = Ranges([], [])
    add_source, add_target = result.source.append, result.target.append
    for source_run, target_run, size in runs:
        source_at, target_at = source_offset + source_run, target_offset + target_run
        whole = size == source_stride == target_stride
        for source_first, target_first, count in groups:
            if whole:
                add_source(Strided(source_first + source_at, size * count))
                add_target(Strided(target_first + target_at, size * count))
            else:
                add_source(Strided(source_first + source_at, size, count, source_stride))
                add_target(Strided(target_first + target_at, size, count, target_stride))
    return result
