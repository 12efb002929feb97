"""Proof that a restored cache is its source, byte by byte (``--verify-handoffs``).

Deliberately not built on the transfer plan: it looks up, unit by unit of the published spans, every source rank that
holds a unit, reads it again and compares. A mistake in planning, staging or merging shows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from messages.layout import Manifest, Span, TensorLayout

Bytes = npt.NDArray[np.uint8]


class RestoredDiffers(Exception):
    """A restored byte is not the source's byte."""


class ReadResource(Protocol):
    """Reads ``size_bytes`` at ``offset_bytes`` of a region, local or a peer's."""

    def __call__(self, region_id: str, offset_bytes: int, size_bytes: int) -> Bytes: ...


def verify_restored(
    read: ReadResource,
    sources: Sequence[Manifest],
    target: Manifest,
    *,
    source_block_ids: Sequence[int],
    source_slot: int,
    target_block_ids: Sequence[int],
    target_slot: int,
    token_count: int,
) -> int:
    """Compare every live row of every target tensor with every source replica of it; returns the bytes compared.

    Raises ``RestoredDiffers`` naming the tensor, the source rank and the first row that differs.
    """
    compared = 0
    for layout in target.tensors:
        holders = [(s.rank, t) for s in sources for t in s.tensors if t.name == layout.name]
        for source_resource, target_resource, rows in _resources(
            layout, source_block_ids, source_slot, target_block_ids, target_slot, token_count
        ):
            restored = _rows(read, layout, target_resource, rows)
            for rank, source in holders:
                shared = _shared_units(source.spans, layout.spans)
                if not shared:
                    continue
                original = _rows(read, source, source_resource, rows)
                for source_unit, target_unit, units in shared:
                    expected = original[:, source_unit : source_unit + units]
                    found = restored[:, target_unit : target_unit + units]
                    if not np.array_equal(expected, found):
                        row = int(np.argwhere((expected != found).any(axis=(1, 2)))[0, 0])
                        raise RestoredDiffers(
                            f"{layout.name}: row {row} of resource {target_resource} on rank {target.rank} is not what "
                            f"source rank {rank} holds in resource {source_resource}"
                        )
                    compared += expected.size
    return compared


def _resources(
    layout: TensorLayout,
    source_block_ids: Sequence[int],
    source_slot: int,
    target_block_ids: Sequence[int],
    target_slot: int,
    token_count: int,
) -> list[tuple[int, int, int]]:
    """(source resource, target resource, live rows) of one tensor for one request."""
    if layout.addressed_by == "slot":
        return [(source_slot, target_slot, layout.live_rows)]
    block_size = layout.rows_per_resource
    blocks = -(-token_count // block_size)
    return [
        (source_block_ids[i], target_block_ids[i], min(block_size, token_count - i * block_size)) for i in range(blocks)
    ]


def _rows(read: ReadResource, layout: TensorLayout, resource: int, rows: int) -> Bytes:
    """``[rows, row_units, unit_bytes]`` of one resource."""
    start = layout.base_bytes + resource * layout.resource_stride_bytes
    return read(layout.region_id, start, rows * layout.row_bytes).reshape(rows, layout.row_units, layout.unit_bytes)


def _shared_units(source: Sequence[Span], target: Sequence[Span]) -> list[tuple[int, int, int]]:
    """(unit in the source row, unit in the target row, count) of what both rows hold."""
    shared = []
    for theirs in source:
        for ours in target:
            start = max(theirs.start, ours.start)
            end = min(theirs.start + theirs.length, ours.start + ours.length)
            if theirs.axis == ours.axis and start < end:
                shared.append((theirs.offset + start - theirs.start, ours.offset + start - ours.start, end - start))
    return shared
