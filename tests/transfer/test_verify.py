"""The proof of a restore must notice a single wrong byte, on any tensor, and look at every replica."""

from __future__ import annotations

import numpy as np
import pytest

from actors.transfer.verify import RestoredDiffers, verify_restored
from actors.worker.layout import build_layout
from messages.layout import Manifest, ModelGeometry

GEOMETRY = ModelGeometry(
    model_fingerprint="f",
    layer_kinds=("delta", "attention"),
    attention_heads=4,
    kv_heads=2,
    head_dim=4,
    linear_key_heads=4,
    linear_value_heads=8,
    linear_key_dim=3,
    linear_value_dim=5,
    conv_kernel=4,
    draft_layers=1,
    cache_dtype="float32",
)


def rank(instance: str, rank: int, tp_size: int) -> tuple[Manifest, np.ndarray]:
    tensors, size = build_layout(
        GEOMETRY,
        tp_size,
        rank,
        block_size=4,
        block_count=6,
        slot_count=3,
        speculative_tokens=2,
        region_id=f"{instance}{rank}",
    )
    manifest = Manifest(
        instance=instance,
        incarnation=1,
        rank=rank,
        tp_size=tp_size,
        model_fingerprint="f",
        block_size=4,
        block_count=6,
        slot_count=3,
        speculative_tokens=2,
        regions=(),
        tensors=tensors,
    )
    return manifest, np.zeros(size, dtype=np.uint8)


def restored_pair() -> tuple[list[Manifest], Manifest, dict[str, np.ndarray]]:
    """A TP4 source whose live rows are tagged, and a TP1 target holding them in the right places."""
    sources = [rank("p", r, 4) for r in range(4)]
    target, target_bytes = rank("d", 0, 1)
    regions = {f"p{m.rank}": data for m, data in sources} | {"d0": target_bytes}
    for layout in target.tensors:
        pairs = [(1, 4), (3, 0)] if layout.addressed_by == "block" else [(2, 1)]
        for source_resource, target_resource in pairs:
            for row in range(layout.live_rows):
                for unit in range(layout.row_units):
                    tag = np.frombuffer(f"{layout.name}{source_resource}{row}{unit}".encode() * 40, np.uint8)[
                        : layout.unit_bytes
                    ]
                    at = layout.base_bytes + target_resource * layout.resource_stride_bytes + row * layout.row_bytes
                    target_bytes[at + unit * layout.unit_bytes :][: layout.unit_bytes] = tag
                    axis, logical = next(
                        (s.axis, s.start + unit - s.offset)
                        for s in layout.spans
                        if s.offset <= unit < s.offset + s.length
                    )
                    for manifest, data in sources:
                        theirs = next(t for t in manifest.tensors if t.name == layout.name)
                        for span in theirs.spans:
                            if span.axis == axis and span.start <= logical < span.start + span.length:
                                at = (
                                    theirs.base_bytes
                                    + source_resource * theirs.resource_stride_bytes
                                    + row * theirs.row_bytes
                                )
                                at += (span.offset + logical - span.start) * theirs.unit_bytes
                                data[at : at + theirs.unit_bytes] = tag
    return [m for m, _ in sources], target, regions


def verify(sources: list[Manifest], target: Manifest, regions: dict[str, np.ndarray], tokens: int = 6) -> int:
    return verify_restored(
        lambda region, offset, size: regions[region][offset : offset + size],
        sources,
        target,
        source_block_ids=(1, 3),
        source_slot=2,
        target_block_ids=(4, 0),
        target_slot=1,
        token_count=tokens,
    )


def test_a_restored_cache_equals_every_replica_of_its_source() -> None:
    sources, target, regions = restored_pair()
    kv = 2 * 2 * 6 * 2 * 4 * 4 * 2  # namespaces, roles, tokens, heads, dims, item bytes, replicas at TP4
    conv = 3 * (2 * 12 + 40) * 4
    ssm = 8 * 3 * 5 * 4
    assert verify(sources, target, regions) == kv + conv + ssm


@pytest.mark.parametrize("role", ["target.1.KEY", "target.1.VALUE", "target.0.CONV", "target.0.SSM", "draft.0.KEY"])
def test_one_wrong_byte_of_any_tensor_is_found_and_named(role: str) -> None:
    sources, target, regions = restored_pair()
    layout = next(t for t in target.tensors if t.name == role)
    resource = 0 if layout.addressed_by == "block" else 1
    regions["d0"][layout.base_bytes + resource * layout.resource_stride_bytes + layout.row_bytes - 1] ^= 1
    with pytest.raises(RestoredDiffers, match=role):
        verify(sources, target, regions)


def test_a_replica_that_disagrees_is_found_even_if_it_was_not_the_one_that_was_read() -> None:
    sources, target, regions = restored_pair()
    layout = next(t for t in sources[1].tensors if t.name == "target.1.KEY")
    regions["p1"][layout.base_bytes + 1 * layout.resource_stride_bytes] ^= 1
    with pytest.raises(RestoredDiffers, match="source rank 1"):
        verify(sources, target, regions)


def test_rows_behind_the_last_token_are_not_compared() -> None:
    sources, target, regions = restored_pair()
    layout = next(t for t in target.tensors if t.name == "target.1.KEY")
    regions["d0"][layout.base_bytes + 2 * layout.row_bytes] ^= 1  # token 6, in block 0 row 2
    assert verify(sources, target, regions) > 0
