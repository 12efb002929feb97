"""A small world for oracle tests: ranks with real layouts, tagged bytes, and a data plane that copies byte by byte.

Every byte of every cache is a tag of (request, tensor, row, logical axis, logical unit, byte in the unit). What a rank
should hold follows from its spans alone, unit by unit, without any plan; so a wrong slice, row, block or slot, and
every byte written where none belongs, shows as a difference of whole regions.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from actors.worker.layout import build_layout
from messages.layout import Manifest, ModelGeometry, RegionDescriptor, TensorLayout
from transport.dataplane import DataPlaneError, Strided

UNTOUCHED = 0xEE


class NaivePlane:
    """The data plane on byte arrays, as slow and plain as possible; remembers who read and wrote what."""

    def __init__(self) -> None:
        self.regions: dict[str, np.ndarray] = {}
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.attached: set[str] = set()

    def create_region(self, region_id: str, size_bytes: int) -> RegionDescriptor:
        self.regions[region_id] = np.full(size_bytes, UNTOUCHED, dtype=np.uint8)
        return RegionDescriptor(region_id=region_id, size_bytes=size_bytes, backend="naive", location=region_id)

    def view(self, region_id: str) -> memoryview:
        return memoryview(self.regions[region_id])

    def attach(self, descriptor: RegionDescriptor) -> None:
        self.attached.add(descriptor.region_id)

    def detach(self, region_id: str) -> None:
        self.attached.discard(region_id)

    def write(self, local_region: str, local: Sequence[Strided], remote_region: str, remote: Sequence[Strided]) -> int:
        return self.copy(local_region, local, remote_region, remote)

    def read(self, remote_region: str, remote: Sequence[Strided], local_region: str, local: Sequence[Strided]) -> int:
        return self.copy(remote_region, remote, local_region, local)

    def copy(self, source_region: str, source: Sequence[Strided], target_region: str, target: Sequence[Strided]) -> int:
        moved = 0
        self.reads.append(source_region)
        self.writes.append(target_region)
        if len(source) != len(target):
            raise DataPlaneError("ranges do not pair up")
        for one, other in zip(source, target, strict=True):
            origin = self._bytes_of(source_region, one)
            place = self._bytes_of(target_region, other)
            if origin.size != place.size:
                raise DataPlaneError(f"{one} and {other} differ in size")
            self.regions[target_region][place] = self.regions[source_region][origin]
            moved += origin.size
        return moved

    def _bytes_of(self, region_id: str, piece: Strided) -> np.ndarray:
        offset, run, count, stride = piece
        places = (offset + np.arange(count)[:, None] * stride + np.arange(run)[None, :]).reshape(-1)
        if places.min() < 0 or places.max() >= self.regions[region_id].size:
            raise DataPlaneError(f"{piece} leaves region {region_id}")
        return places

    def close(self) -> None:
        self.regions.clear()


@dataclass(frozen=True)
class Request:
    """One prompt and where its state lies on both sides."""

    name: str
    tokens: int
    source_block_ids: tuple[int, ...]
    target_block_ids: tuple[int, ...]
    source_slot: int
    target_slot: int


def geometry(
    *,
    kv_heads: int = 2,
    key_heads: int = 4,
    value_heads: int = 8,
    key_dim: int = 3,
    value_dim: int = 5,
    head_dim: int = 2,
    dtype: str = "float32",
    layers: str = "da",
    draft_layers: int = 1,
) -> ModelGeometry:
    """A tiny model: ``layers`` is a string of d(elta) and a(ttention). Widths of q, k and v differ on purpose."""
    return ModelGeometry(
        model_fingerprint="tiny",
        layer_kinds=tuple({"d": "delta", "a": "attention"}[kind] for kind in layers),
        attention_heads=24,
        kv_heads=kv_heads,
        head_dim=head_dim,
        linear_key_heads=key_heads,
        linear_value_heads=value_heads,
        linear_key_dim=key_dim,
        linear_value_dim=value_dim,
        conv_kernel=4,
        draft_layers=draft_layers,
        cache_dtype=dtype,
    )


def instance(
    plane: NaivePlane,
    model: ModelGeometry,
    name: str,
    tp_size: int,
    *,
    block_size: int = 4,
    block_count: int = 12,
    slot_count: int = 3,
    speculative_tokens: int = 0,
    draft_replicated: bool = False,
    chunk_tokens: int = 6,
    incarnation: int = 1,
) -> list[Manifest]:
    """One instance's manifests, with a region per rank in ``plane`` that nobody has touched yet."""
    manifests = []
    for rank in range(tp_size):
        region_id = f"{name}.r{rank}.{incarnation}.caches"
        tensors, size = build_layout(
            model,
            tp_size,
            rank,
            block_size=block_size,
            block_count=block_count,
            slot_count=slot_count,
            speculative_tokens=speculative_tokens,
            draft_replicated=draft_replicated,
            region_id=region_id,
        )
        tensors, size = packed(tensors)
        manifests.append(
            Manifest(
                instance=name,
                incarnation=incarnation,
                rank=rank,
                tp_size=tp_size,
                model_fingerprint=model.model_fingerprint,
                block_size=block_size,
                block_count=block_count,
                slot_count=slot_count,
                speculative_tokens=speculative_tokens,
                regions=(plane.create_region(region_id, size),),
                tensors=tensors,
                max_tokens_per_chunk=chunk_tokens,
            )
        )
    return manifests


def packed(tensors: Sequence[TensorLayout], guard_bytes: int = 96) -> tuple[tuple[TensorLayout, ...], int]:
    """(the same tensors close together with guard bytes between them, the region's size). Real ones lie 2 MiB apart."""
    end, moved = guard_bytes, []
    for layout in tensors:
        moved.append(msgspec.structs.replace(layout, base_bytes=end))
        end += layout.resource_count * layout.resource_stride_bytes + guard_bytes
    return tuple(moved), end


def tag(request: str, tensor: str, row: int, axis: str, unit: int, unit_bytes: int) -> np.ndarray:
    """``unit_bytes`` bytes that tell this unit of this row from every other, with good probability."""
    seed = zlib.crc32(f"{request}/{tensor}/{row}/{axis}/{unit}".encode())
    mixed = (np.arange(unit_bytes, dtype=np.uint64) + 1) * np.uint64(seed * 2 + 1)
    tags = ((mixed >> np.uint64(7)) ^ (mixed >> np.uint64(19))).astype(np.uint8)
    return np.where(tags == UNTOUCHED, np.uint8(1), tags)


def fill(region: np.ndarray, layout: TensorLayout, request: Request, *, source: bool) -> None:
    """Write what this rank holds of ``request`` into its region, unit by unit: the oracle."""
    blocks = request.source_block_ids if source else request.target_block_ids
    slot = request.source_slot if source else request.target_slot
    for row in range(request.tokens if layout.addressed_by == "block" else layout.live_rows):
        if layout.addressed_by == "block":
            resource, inside = blocks[row // layout.rows_per_resource], row % layout.rows_per_resource
        else:
            resource, inside = slot, row
        start = layout.base_bytes + resource * layout.resource_stride_bytes + inside * layout.row_stride_bytes
        for span in layout.spans:
            for unit in range(span.length):
                at = start + (span.offset + unit) * layout.unit_bytes
                region[at : at + layout.unit_bytes] = tag(
                    request.name, layout.name, row, span.axis, span.start + unit, layout.unit_bytes
                )


def fill_instance(plane: NaivePlane, manifests: Sequence[Manifest], requests: Sequence[Request]) -> None:
    """Give every source rank its shards of every request."""
    for manifest in manifests:
        for layout in manifest.tensors:
            for request in requests:
                fill(plane.regions[layout.region_id], layout, request, source=True)


def expected(plane: NaivePlane, target: Manifest, requests: Sequence[Request]) -> np.ndarray:
    """What the target's region must be afterwards, to the last byte: live rows filled, all else untouched."""
    region = np.full_like(plane.regions[target.regions[0].region_id], UNTOUCHED)
    for layout in target.tensors:
        for request in requests:
            fill(region, layout, request, source=False)
    return region
