"""Byte ranges of a route: exact rows, adjacent blocks joined, offsets of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.transfer.ranges import (
    Ranges,
    TokenRange,
    block_ranges,
    block_to_window,
    slot_ranges,
    slot_to_window,
    window_to_block,
    window_to_slot,
)
from actors.transfer.routes import Route, Segment, writes_one_run_per_resource
from messages.layout import Role, Span, TensorLayout
from transport.dataplane import Strided


def layout(
    *,
    units: int,
    unit_bytes: int = 4,
    block_size: int = 4,
    count: int = 64,
    base: int = 0,
    padding: int = 0,
    role: Role = "KEY",
    rows: int = 0,
    live: int = 0,
) -> TensorLayout:
    """A tensor of ``count`` resources; ``padding`` bytes follow each of them."""
    row_bytes = units * unit_bytes
    rows = rows or block_size
    return TensorLayout(
        name=f"target.0.{role}",
        namespace="target",
        layer=0,
        role=role,
        addressed_by="block" if role in ("KEY", "VALUE") else "slot",
        dtype="float32",
        region_id="r",
        base_bytes=base,
        resource_count=count,
        rows_per_resource=rows,
        live_rows=live or rows,
        row_units=units,
        unit_bytes=unit_bytes,
        resource_stride_bytes=rows * row_bytes + padding,
        row_stride_bytes=row_bytes,
        spans=(Span(axis="a", start=0, length=units, offset=0),),
        axis_units=(("a", units),),
    )


def route(source: TensorLayout, target: TensorLayout, *segments: tuple[int, int, int]) -> Route:
    """A route of (source offset, target offset, length) segments."""
    parts = tuple(Segment("a", at, length, at, to) for at, to, length in segments)
    return Route(0, source, target, parts, writes_one_run_per_resource(parts, target))


def bytes_of(pieces: list[Strided]) -> list[int]:
    """Every byte that the ranges name, in order."""
    places: list[int] = []
    for offset, run, count, stride in pieces:
        places += [offset + index * stride + byte for index in range(count) for byte in range(run)]
    return places


def pairs_of(ranges: Ranges) -> dict[int, int]:
    """Target byte → source byte; fails when a target byte is named twice or the sides do not pair up."""
    assert [run * count for _, run, count, _ in ranges.source] == [run * count for _, run, count, _ in ranges.target]
    source, target = bytes_of(ranges.source), bytes_of(ranges.target)
    assert len(set(target)) == len(target)
    return dict(zip(target, source, strict=True))


def test_adjacent_blocks_of_whole_rows_become_one_contiguous_range() -> None:
    same = route(layout(units=2), layout(units=2), (0, 0, 2))
    ranges = block_ranges(same, tuple(range(3, 40)), tuple(range(5, 42)), TokenRange(0, 37 * 4))
    assert ranges.source == [Strided(3 * 32, 37 * 32)]
    assert ranges.target == [Strided(5 * 32, 37 * 32)]


def test_an_interleaved_merge_of_adjacent_blocks_is_one_strided_range() -> None:
    part = route(layout(units=1), layout(units=2), (0, 1, 1))
    ranges = window_to_block(part, tuple(range(5, 15)), TokenRange(0, 40), 4096)
    assert ranges.source == [Strided(4096, 4, 40, 4)], "the same runs on both sides"
    assert ranges.target == [Strided(5 * 32 + 4, 4, 40, 8)]


def test_scattered_blocks_stay_apart_and_a_tail_moves_only_its_filled_rows() -> None:
    same = route(layout(units=1), layout(units=1), (0, 0, 1))
    ranges = block_ranges(same, (9, 3, 4), (2, 6, 7), TokenRange(0, 10))
    assert ranges.source == [Strided(9 * 16, 16), Strided(3 * 16, 24)]
    assert ranges.target == [Strided(2 * 16, 16), Strided(6 * 16, 24)]


def test_a_chunk_that_starts_inside_a_block_touches_no_row_before_it() -> None:
    same = route(layout(units=1), layout(units=1), (0, 0, 1))
    ranges = block_ranges(same, (9, 3, 5), (2, 6, 8), TokenRange(3, 4))
    assert ranges.source == [Strided(9 * 16 + 12, 4), Strided(3 * 16, 12)]
    assert ranges.target == [Strided(2 * 16 + 12, 4), Strided(6 * 16, 12)]


@pytest.mark.parametrize("base", [(1 << 31) - 8, 1 << 31, (1 << 32) - 8, 1 << 32, (1 << 40) + 16])
def test_offsets_beyond_two_and_four_gigabytes_are_exact(base: int) -> None:
    source = layout(units=1, unit_bytes=1024, block_size=128, count=1 << 20, base=base)
    target = layout(units=2, unit_bytes=1024, block_size=128, count=1 << 20, base=base + 1024)
    part = route(source, target, (0, 1, 1))
    block = (1 << 20) - 2
    ranges = window_to_block(part, (block,), TokenRange(0, 128), base)
    assert ranges.source == [Strided(base, 1024, 128, 1024)]
    assert ranges.target == [Strided(base + 1024 + block * 128 * 2048 + 1024, 1024, 128, 2048)]
    pushed = block_to_window(part, (block,), TokenRange(5, 7), base)
    assert pushed.source == [Strided(base + block * 128 * 1024 + 5 * 1024, 7 * 1024)]


def test_a_block_beyond_the_tensor_or_the_table_is_refused() -> None:
    same = route(layout(units=1, count=8), layout(units=1, count=8), (0, 0, 1))
    with pytest.raises(ValueError, match="block id outside"):
        block_ranges(same, (8,), (0,), TokenRange(0, 4))
    with pytest.raises(ValueError, match="block table has 1 entries"):
        block_ranges(same, (1,), (0, 1), TokenRange(0, 5))
    with pytest.raises(ValueError, match="moves nothing"):
        block_ranges(same, (1,), (0,), TokenRange(0, 0))


def test_a_slot_beyond_the_tensor_is_refused() -> None:
    ssm = layout(units=2, role="SSM", rows=4, live=1, count=3)
    with pytest.raises(ValueError, match="slot 3 outside"):
        slot_ranges(route(ssm, ssm, (0, 0, 2)), 3, 0)


def test_only_live_rows_of_a_slot_move_when_depths_differ() -> None:
    source = layout(units=2, role="SSM", rows=4, live=1, count=5)
    target = layout(units=2, role="SSM", rows=2, live=1, count=5)
    ranges = slot_ranges(route(source, target, (0, 0, 2)), 3, 4)
    assert (ranges.source, ranges.target) == ([Strided(3 * 4 * 8, 8)], [Strided(4 * 2 * 8, 8)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Route, tuple[int, ...], tuple[int, ...], TokenRange]:
    block_size = draw(st.integers(1, 5))
    source_units, target_units = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    source = layout(
        units=source_units, block_size=block_size, base=draw(st.integers(0, 50)), padding=draw(st.sampled_from([0, 8]))
    )
    target = layout(
        units=target_units, block_size=block_size, base=draw(st.integers(0, 50)), padding=draw(st.sampled_from([0, 8]))
    )
    segments, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        at += draw(st.integers(0, 1))
        length = draw(st.integers(1, 2))
        if at + length > target_units or length > source_units:
            break
        segments.append((draw(st.integers(0, source_units - length)), at, length))
        at += length
    if not segments:
        segments = [(0, 0, 1)]
    blocks = draw(st.integers(1, 8))
    ids = st.lists(st.integers(0, 63), min_size=blocks, max_size=blocks, unique=True)
    runs = st.integers(0, 63 - blocks).map(lambda first: list(range(first, first + blocks)))
    start = draw(st.integers(0, blocks * block_size - 1))
    size = draw(st.integers(1, blocks * block_size - start))
    return route(source, target, *segments), tuple(draw(ids | runs)), tuple(draw(ids | runs)), TokenRange(start, size)


def row_place(tensor: TensorLayout, block_ids: tuple[int, ...], token: int) -> int:
    block, row = block_ids[token // tensor.rows_per_resource], token % tensor.rows_per_resource
    return tensor.base_bytes + block * tensor.resource_stride_bytes + row * tensor.row_stride_bytes


@settings(max_examples=300, deadline=None)
@given(cases())
def test_ranges_name_exactly_the_bytes_of_the_rows_and_segments(
    case: tuple[Route, tuple[int, ...], tuple[int, ...], TokenRange],
) -> None:
    path, source_ids, target_ids, tokens = case
    naive: dict[int, int] = {}
    staged: dict[int, int] = {}
    merged: dict[int, int] = {}
    area = 1000
    for token in range(tokens.start, tokens.start + tokens.size):
        place = area + (token - tokens.start) * path.row_bytes
        for segment in path.segments:
            for byte in range(segment.length * 4):
                source = row_place(path.source, source_ids, token) + segment.source_offset * 4 + byte
                target = row_place(path.target, target_ids, token) + segment.target_offset * 4 + byte
                naive[target], staged[place], merged[target] = source, source, place
                place += 1
    assert pairs_of(block_ranges(path, source_ids, target_ids, tokens)) == naive
    assert pairs_of(block_to_window(path, source_ids, tokens, area)) == staged
    assert pairs_of(window_to_block(path, target_ids, tokens, area)) == merged


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))
def test_a_slot_through_a_window_arrives_where_a_direct_copy_would_put_it(
    live: int, more: int, more_there: int, slot: int, slot_there: int
) -> None:
    source = layout(units=3, role="CONV", rows=live + more, live=live, count=4)
    target = layout(units=6, role="CONV", rows=live + more_there, live=live, count=4, base=7)
    path = route(source, target, (0, 0, 1), (1, 2, 1), (2, 4, 1))
    direct = pairs_of(slot_ranges(path, slot, slot_there))
    into, out_of = pairs_of(slot_to_window(path, slot, 64)), pairs_of(window_to_slot(path, slot_there, 64))
    assert direct == {place: into[staged] for place, staged in out_of.items()}
    assert len(direct) == live * path.row_bytes


def test_a_long_prompt_compiles_without_a_range_per_token() -> None:
    part = route(layout(units=1, block_size=128, count=512), layout(units=2, block_size=128, count=512), (0, 1, 1))
    scattered = tuple(np.random.default_rng(5).permutation(512)[:146].tolist())
    ranges = block_ranges(part, scattered, scattered, TokenRange(0, 18592))
    assert len(ranges.source) <= 146
    assert ranges.size_bytes == 18592 * 4
