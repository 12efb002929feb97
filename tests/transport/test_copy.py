"""Strided copies against a naive byte-by-byte oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.copy import LONG_RUN_BYTES, check_ranges, coalesce, copy_ranges
from transport.dataplane import DataPlaneError, Strided


def positions(ranges: list[Strided]) -> list[int]:
    """Every byte position of the ranges, in order."""
    return [
        piece.offset + run * piece.stride_bytes + byte
        for piece in ranges
        for run in range(piece.count)
        for byte in range(piece.run_bytes)
    ]


def oracle(source: np.ndarray, source_ranges: list[Strided], target: np.ndarray, target_ranges: list[Strided]) -> None:
    for one, other in zip(positions(source_ranges), positions(target_ranges), strict=True):
        target[other] = source[one]


@st.composite
def layout(draw: st.DrawFn, sizes: list[int]) -> list[Strided]:
    """Disjoint ranges of the given sizes, in shuffled order of position."""
    order = draw(st.permutations(range(len(sizes))))
    placed: dict[int, Strided] = {}
    at = draw(st.integers(0, 5))
    for index in order:
        size = sizes[index]
        run = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        stride = run + draw(st.integers(0, 4))
        piece = Strided(at, run, size // run, stride)
        placed[index] = piece
        at += (piece.count - 1) * stride + run + draw(st.sampled_from([0, 0, 1, 7]))
    return [placed[index] for index in range(len(sizes))]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_pairs_equal_the_oracle_and_touch_no_other_byte(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 36), min_size=1, max_size=6))
    source_ranges, target_ranges = data.draw(layout(sizes)), data.draw(layout(sizes))
    source = np.arange(600, dtype=np.uint32).astype(np.uint8)
    target, expected = np.full(600, 0xEE, np.uint8), np.full(600, 0xEE, np.uint8)
    oracle(source, source_ranges, expected, target_ranges)
    assert copy_ranges(source, source_ranges, target, target_ranges) == sum(sizes)
    assert bytes(target) == bytes(expected)


def test_adjacent_contiguous_ranges_become_one() -> None:
    source = [Strided(64 * i, 64) for i in range(10)]
    target = [Strided(1000 + 64 * i, 64) for i in range(10)]
    assert coalesce(source, target) == [(Strided(0, 640, 1, 0), Strided(1000, 640, 1, 0))]


def test_blocks_at_a_constant_distance_become_one_strided_pair() -> None:
    source = [Strided(64 * i, 64) for i in range(10)]
    target = [Strided(128 * i, 64) for i in range(10)]
    assert coalesce(source, target) == [(Strided(0, 64, 10, 64), Strided(0, 64, 10, 128))]


def test_strided_ranges_of_adjacent_blocks_become_one() -> None:
    source = [Strided(4 * 64 * i, 64, 4, 64) for i in range(8)]
    target = [Strided(4 * 128 * i, 64, 4, 128) for i in range(8)]
    assert coalesce(source, target) == [(Strided(0, 64, 32, 64), Strided(0, 64, 32, 128))]


def test_ranges_that_go_backwards_are_not_joined() -> None:
    source = [Strided(64, 64), Strided(0, 64)]
    assert len(coalesce(source, source)) == 2


def test_long_runs_are_copied_whole() -> None:
    run = LONG_RUN_BYTES
    source = np.random.default_rng(0).integers(0, 256, 3 * run, dtype=np.uint8)
    target = np.zeros(6 * run, np.uint8)
    copy_ranges(source, [Strided(0, 3 * run)], target, [Strided(0, run, 3, 2 * run)])
    assert (target.reshape(3, 2, run)[:, 0] == source.reshape(3, run)).all()
    assert not target.reshape(3, 2, run)[:, 1].any()


@pytest.mark.parametrize(
    "piece",
    [
        Strided(-1, 4),
        Strided(97, 4),
        Strided(0, 0),
        Strided(0, 4, 0, 4),
        Strided(0, 4, 3, 3),
        Strided(0, 4, 2, 97),
        Strided(0, 4, -2, 8),
        Strided(1 << 40, 4),
        Strided(0, 1, 1 << 40, 1),
    ],
)
def test_a_range_outside_its_region_or_overlapping_itself_is_refused(piece: Strided) -> None:
    with pytest.raises(DataPlaneError, match="region cache"):
        check_ranges("cache", 100, [piece])


def test_unequal_pairs_are_refused() -> None:
    buffer = np.zeros(100, np.uint8)
    with pytest.raises(DataPlaneError, match="pair 0"):
        copy_ranges(buffer, [Strided(0, 4)], buffer, [Strided(8, 5)])
    with pytest.raises(DataPlaneError, match="pair up"):
        copy_ranges(buffer, [Strided(0, 4)], buffer, [])
