"""Cache layouts as data: what each rank publishes so that a transfer can be planned before a byte moves.

A cache tensor is a stack of **resources** (blocks or state slots). A resource is ``rows_per_resource`` rows, and a row
is a run of **units** along the sharded axis: heads for KEY, VALUE and SSM, channels for CONV. ``Span`` says which piece
of the logical (unsharded) axis the rank holds and where in its own row it holds it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["KEY", "VALUE", "CONV", "SSM"]
Namespace = Literal["target", "draft"]
Addressing = Literal["block", "slot"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Units ``[start, start+length)`` of logical axis ``axis`` lie at units ``[offset, offset+length)`` of the row."""

    axis: str
    start: int
    length: int
    offset: int


class TensorLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One cache tensor of one rank.

    Byte address of row ``j`` of resource ``i`` in ``region_id``:
    ``base_bytes + i*resource_stride_bytes + j*row_stride_bytes``.
    Rows of a resource are contiguous: ``row_stride_bytes == row_units * unit_bytes``.
    ``live_rows`` is how many rows of a resource a hand-off moves: all token rows of a block, the first K-1 conv
    columns, checkpoint 0 of the recurrent state.
    """

    name: str  # "target.3.KEY"
    namespace: Namespace
    layer: int
    role: Role
    addressed_by: Addressing
    dtype: str  # "float32", "bfloat16", …
    region_id: str
    base_bytes: int
    resource_count: int
    rows_per_resource: int
    live_rows: int
    row_units: int
    unit_bytes: int
    resource_stride_bytes: int
    row_stride_bytes: int
    spans: tuple[Span, ...]
    axis_units: tuple[tuple[str, int], ...]  # logical length of each axis named in spans

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: ``row_units * unit_bytes``."""
        return self.row_units * self.unit_bytes


class RegionDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer finds a registered buffer. ``location`` is the backend's own address (segment name, host:port)."""

    region_id: str
    size_bytes: int
    backend: str
    location: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank publishes about its caches: identity, regions, and the layout of every tensor."""

    instance: str
    incarnation: int
    rank: int
    tp_size: int
    model_fingerprint: str
    block_size: int
    block_count: int
    slot_count: int
    speculative_tokens: int
    regions: tuple[RegionDescriptor, ...]
    tensors: tuple[TensorLayout, ...]
    staging_region_id: str = ""
    staging_bytes: int = 0
    max_tokens_per_chunk: int = 0
    max_model_len: int = 0  # tokens a sequence may have, as the worker resolved it; 0: it does not say


class ModelGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a Qwen3.5-class model that decide its cache layout. No weights, no torch."""

    model_fingerprint: str
    layer_kinds: tuple[Literal["attention", "delta"], ...]
    attention_heads: int
    kv_heads: int
    head_dim: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    draft_layers: int
    cache_dtype: str  # "float32" | "bfloat16"
    ssm_dtype: str = "float32"
    max_model_len: int = 0
