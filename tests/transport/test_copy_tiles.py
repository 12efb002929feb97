"""Interleaved ranges that are put together in a tile first land where plain copies would put them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import copy
from transport.copy import copy_ranges
from transport.dataplane import Strided


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[list[Strided], list[Strided], int]:
    """Some sources whose runs, side by side, fill rows of a target; sometimes with a hole, or in another order."""
    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    count = draw(st.integers(1, 12))
    hole = draw(st.sampled_from([0, 0, 3]))
    step = sum(widths) + hole
    begin = draw(st.integers(0, 5))
    source, target, at = [], [], 0
    offset = 0
    for width in widths:
        padding = draw(st.integers(0, 2))
        source.append(Strided(at, width, count, width + padding) if padding else Strided(at, width * count))
        target.append(Strided(begin + offset, width, count, step))
        at += (width + padding) * count
        offset += width
    order = draw(st.permutations(range(len(widths)))) if draw(st.booleans()) else range(len(widths))
    return [source[i] for i in order], [target[i] for i in order], begin + step * count


@settings(max_examples=300, deadline=None)
@given(st.lists(interleaved(), min_size=1, max_size=3), st.integers(1, 40))
def test_tiles_of_any_size_change_nothing(groups: list[tuple[list[Strided], list[Strided], int]], tile: int) -> None:
    source_ranges, target_ranges, source_end, target_end = [], [], 0, 0
    for source, target, size in groups:
        source_ranges += [piece._replace(offset=piece.offset + source_end) for piece in source]
        target_ranges += [piece._replace(offset=piece.offset + target_end) for piece in target]
        source_end += 400
        target_end += size
    data = np.random.default_rng(1).integers(0, 256, source_end, dtype=np.uint8)
    results = []
    for streaming in (False, True):
        out = np.zeros(target_end, dtype=np.uint8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copy, "STREAMING", streaming)
            patch.setattr(copy, "TILE_BYTES", tile)
            copy_ranges(data, source_ranges, out, target_ranges)
        results.append(out)
    assert np.array_equal(*results)
