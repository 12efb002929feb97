"""Where every cache tensor of one rank lies: pure integers from geometry, TP size, rank and capacities.

The worker allocates by it, transfers plan on it, ``kvferry plan`` and the benchmarks use it without weights; so it
imports no torch. Shapes and their meaning are in ``docs/architecture.md``; in short, per rank:

* KEY, VALUE of an attention layer: ``[block_count, block_size, kv_heads, head_dim]``, addressed by block;
* CONV of a delta layer: ``[slot_count, K-1+S, channels]``, channels packed ``[Q, K, V]``, addressed by slot. Columns
  ``[j, j+K-1)`` are the convolution's window after token ``j`` of the last verify pass (``j`` = 0 after a prefill);
* SSM of a delta layer: ``[slot_count*(S+1), value_heads, dk, dv]``, row ``slot*(S+1)+j`` the state after that token;
* DRAFT KEY, VALUE of the MTP layer, like KEY and VALUE and on the same block ids; whole on every rank if replicated.

All of them lie in one region, each starting at a multiple of ``TENSOR_ALIGNMENT_BYTES``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.runtime.config import ConfigError
from messages.layout import Addressing, ModelGeometry, Namespace, Role, Span, TensorLayout

TENSOR_ALIGNMENT_BYTES = 2 << 20
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_AXIS = "kv_heads"
VALUE_HEAD_AXIS = "value_heads"


@dataclass(frozen=True)
class _Shape:
    """One cache tensor before it gets its place in the region."""

    namespace: Namespace
    layer: int
    role: Role
    addressed_by: Addressing
    dtype: str
    rows_per_resource: int
    live_rows: int
    row_units: int
    unit_bytes: int
    spans: tuple[Span, ...]
    axis_units: tuple[tuple[str, int], ...]

    @property
    def resource_bytes(self) -> int:
        return self.rows_per_resource * self.row_units * self.unit_bytes


def kv_head_span(kv_heads: int, tp_size: int, rank: int) -> tuple[int, int]:
    """(first KV head, how many) that ``rank`` holds. With fewer heads than ranks, consecutive ranks share one head."""
    if kv_heads >= tp_size:
        local = kv_heads // tp_size
        return rank * local, local
    return rank * kv_heads // tp_size, 1


def build_layout(
    geometry: ModelGeometry,
    tp_size: int,
    rank: int,
    *,
    block_size: int,
    block_count: int,
    slot_count: int,
    speculative_tokens: int = 0,
    draft_replicated: bool = False,
    region_id: str = "",
) -> tuple[tuple[TensorLayout, ...], int]:
    """(layouts of ``rank``'s cache tensors, bytes of the region that holds them).

    Draft tensors exist only when ``speculative_tokens`` > 0. Raises ``ConfigError`` when heads do not shard.
    """
    check_shards(geometry, tp_size)
    tensors: list[TensorLayout] = []
    end = 0
    for shape in _shapes(geometry, tp_size, rank, block_size, speculative_tokens, draft_replicated):
        base = _align(end)
        count = block_count if shape.addressed_by == "block" else slot_count
        end = base + count * shape.resource_bytes
        tensors.append(
            TensorLayout(
                name=f"{shape.namespace}.{shape.layer}.{shape.role}",
                namespace=shape.namespace,
                layer=shape.layer,
                role=shape.role,
                addressed_by=shape.addressed_by,
                dtype=shape.dtype,
                region_id=region_id,
                base_bytes=base,
                resource_count=count,
                rows_per_resource=shape.rows_per_resource,
                live_rows=shape.live_rows,
                row_units=shape.row_units,
                unit_bytes=shape.unit_bytes,
                resource_stride_bytes=shape.resource_bytes,
                row_stride_bytes=shape.row_units * shape.unit_bytes,
                spans=shape.spans,
                axis_units=shape.axis_units,
            )
        )
    return tuple(tensors), _align(end)


def block_bytes(
    geometry: ModelGeometry,
    tp_size: int,
    *,
    block_size: int,
    speculative_tokens: int = 0,
    draft_replicated: bool = False,
) -> int:
    """Bytes that one block takes on one rank, over all layers and the draft."""
    shapes = _shapes(geometry, tp_size, 0, block_size, speculative_tokens, draft_replicated)
    return sum(shape.resource_bytes for shape in shapes if shape.addressed_by == "block")


def slot_bytes(geometry: ModelGeometry, tp_size: int, *, speculative_tokens: int = 0) -> int:
    """Bytes that one state slot takes on one rank, over all layers."""
    shapes = _shapes(geometry, tp_size, 0, 1, speculative_tokens, False)
    return sum(shape.resource_bytes for shape in shapes if shape.addressed_by == "slot")


def block_count_for(
    geometry: ModelGeometry,
    tp_size: int,
    *,
    block_size: int,
    slot_count: int,
    cache_memory_mb: int,
    speculative_tokens: int = 0,
    draft_replicated: bool = False,
) -> int:
    """How many blocks fit into ``cache_memory_mb`` per rank beside ``slot_count`` state slots.

    Raises ``ConfigError`` when not even one sequence of one block fits.
    """
    per_block = block_bytes(
        geometry,
        tp_size,
        block_size=block_size,
        speculative_tokens=speculative_tokens,
        draft_replicated=draft_replicated,
    )
    slots = slot_count * slot_bytes(geometry, tp_size, speculative_tokens=speculative_tokens)
    count = ((cache_memory_mb << 20) - slots) // max(1, per_block)
    if count < 1:
        raise ConfigError(
            f"cache_memory_mb {cache_memory_mb} holds no block of {per_block} bytes beside {slot_count} state slots of "
            f"{slots} bytes together; raise cache_memory_mb or lower max_seqs_per_batch"
        )
    return count


def check_shards(geometry: ModelGeometry, tp_size: int) -> None:
    """Raise ``ConfigError`` unless every kind of head shards over ``tp_size`` ranks."""
    if tp_size < 1:
        raise ConfigError(f"tensor-parallel size {tp_size} is not a positive number of ranks (option: topology)")
    for what, count in (
        ("attention heads", geometry.attention_heads),
        ("linear key heads", geometry.linear_key_heads),
        ("linear value heads", geometry.linear_value_heads),
    ):
        if count % tp_size:
            raise ConfigError(f"TP{tp_size}: the model's {count} {what} do not divide by {tp_size} (option: topology)")
    if geometry.kv_heads % tp_size and tp_size % geometry.kv_heads:
        raise ConfigError(
            f"TP{tp_size}: {geometry.kv_heads} KV heads neither divide by {tp_size} nor can be replicated evenly "
            f"(option: topology)"
        )


def _align(offset: int) -> int:
    return -(-offset // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES


def _shapes(
    geometry: ModelGeometry, tp_size: int, rank: int, block_size: int, speculative_tokens: int, draft_replicated: bool
) -> list[_Shape]:
    shapes: list[_Shape] = []
    for layer, kind in enumerate(geometry.layer_kinds):
        if kind == "attention":
            shapes += _kv(geometry, "target", layer, tp_size, rank, block_size)
        else:
            shapes += _delta(geometry, layer, tp_size, rank, speculative_tokens)
    if speculative_tokens > 0:
        shard = (1, 0) if draft_replicated else (tp_size, rank)
        for layer in range(geometry.draft_layers):
            shapes += _kv(geometry, "draft", layer, *shard, block_size)
    return shapes


def _kv(
    geometry: ModelGeometry, namespace: Namespace, layer: int, tp_size: int, rank: int, block_size: int
) -> list[_Shape]:
    start, heads = kv_head_span(geometry.kv_heads, tp_size, rank)
    roles: tuple[Literal["KEY", "VALUE"], ...] = ("KEY", "VALUE")
    return [
        _Shape(
            namespace=namespace,
            layer=layer,
            role=role,
            addressed_by="block",
            dtype=geometry.cache_dtype,
            rows_per_resource=block_size,
            live_rows=block_size,
            row_units=heads,
            unit_bytes=geometry.head_dim * ITEM_BYTES[geometry.cache_dtype],
            spans=(Span(axis=KV_AXIS, start=start, length=heads, offset=0),),
            axis_units=((KV_AXIS, geometry.kv_heads),),
        )
        for role in roles
    ]


def _delta(geometry: ModelGeometry, layer: int, tp_size: int, rank: int, speculative_tokens: int) -> list[_Shape]:
    key_channels = geometry.linear_key_heads // tp_size * geometry.linear_key_dim
    value_heads = geometry.linear_value_heads // tp_size
    value_channels = value_heads * geometry.linear_value_dim
    window = geometry.conv_kernel - 1
    conv = _Shape(
        namespace="target",
        layer=layer,
        role="CONV",
        addressed_by="slot",
        dtype=geometry.cache_dtype,
        rows_per_resource=window + speculative_tokens,
        live_rows=window,
        row_units=2 * key_channels + value_channels,
        unit_bytes=ITEM_BYTES[geometry.cache_dtype],
        spans=(
            Span(axis="Q", start=rank * key_channels, length=key_channels, offset=0),
            Span(axis="K", start=rank * key_channels, length=key_channels, offset=key_channels),
            Span(axis="V", start=rank * value_channels, length=value_channels, offset=2 * key_channels),
        ),
        axis_units=(("Q", key_channels * tp_size), ("K", key_channels * tp_size), ("V", value_channels * tp_size)),
    )
    ssm = _Shape(
        namespace="target",
        layer=layer,
        role="SSM",
        addressed_by="slot",
        dtype=geometry.ssm_dtype,
        rows_per_resource=speculative_tokens + 1,
        live_rows=1,
        row_units=value_heads,
        unit_bytes=geometry.linear_key_dim * geometry.linear_value_dim * ITEM_BYTES[geometry.ssm_dtype],
        spans=(Span(axis=VALUE_HEAD_AXIS, start=rank * value_heads, length=value_heads, offset=0),),
        axis_units=((VALUE_HEAD_AXIS, geometry.linear_value_heads),),
    )
    return [conv, ssm]
