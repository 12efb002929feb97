"""The cache tensors of one rank, as torch views over one registered buffer.

Nothing is allocated here: the buffer belongs to the node's data plane, peers read and write it, and the views follow
the published layout. Shapes are flattened to what the kernels index: token rows for KEY and VALUE, slot rows for CONV,
checkpoint rows for SSM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from messages.layout import TensorLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class KVCache:
    """``key`` and ``value``: [block_count · block_size, kv_heads · head_dim], token rows of consecutive blocks."""

    key: torch.Tensor
    value: torch.Tensor
    block_size: int
    heads: int

    def gather(self, blocks: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``blocks`` [sequences · n] as [sequences, heads, n · block_size, head_dim]; copies."""
        width = self.block_size * self.key.shape[1]
        shape = (sequences, -1, self.heads, self.key.shape[1] // self.heads)
        key = self.key.view(-1, width).index_select(0, blocks).view(shape).transpose(1, 2)
        value = self.value.view(-1, width).index_select(0, blocks).view(shape).transpose(1, 2)
        return key, value


@dataclass(frozen=True)
class DeltaCache:
    """``conv`` [slot_count · columns, channels] with ``columns`` = K-1+S; ``ssm`` [slot_count · (S+1), hv, dk, dv]."""

    conv: torch.Tensor
    ssm: torch.Tensor


@dataclass(frozen=True)
class RankCaches:
    """Every cache of a rank: one entry per target layer, one per draft layer (empty without speculation)."""

    layers: tuple[KVCache | DeltaCache, ...]
    draft: tuple[KVCache, ...]
    block_size: int
    speculative_tokens: int
    conv_columns: int  # K-1+S; 0 for a model without delta layers

    def copy_prompt(self, slot: int, to_slot: int, blocks: Sequence[int], to_blocks: Sequence[int]) -> None:
        """Copy what a prefill has left: blocks where the two tables differ, and the slot's live state (checkpoint 0 and
        the convolution columns before it), unless it is the same slot."""
        pairs = [(source, target) for source, target in zip(blocks, to_blocks, strict=True) if source != target]
        for cache in (*self.layers, *self.draft):
            if isinstance(cache, DeltaCache):
                if slot != to_slot:
                    self._copy_state(cache, slot, to_slot)
            elif pairs:
                sources, targets = torch.tensor(pairs, device=cache.key.device).unbind(1)
                for tensor in (cache.key, cache.value):
                    table = tensor.view(-1, cache.block_size * tensor.shape[1])
                    table.index_copy_(0, targets, table.index_select(0, sources))

    def _copy_state(self, cache: DeltaCache, slot: int, to_slot: int) -> None:
        live = self.conv_columns - self.speculative_tokens
        begin, to_begin = slot * self.conv_columns, to_slot * self.conv_columns
        cache.conv[to_begin : to_begin + live] = cache.conv[begin : begin + live]
        stride = self.speculative_tokens + 1
        cache.ssm[to_slot * stride] = cache.ssm[slot * stride]


def copy_caches(caches: RankCaches, device: torch.device) -> RankCaches:
    """The same caches in memory of their own on ``device``."""

    def attention(cache: KVCache) -> KVCache:
        return replace(cache, key=cache.key.to(device, copy=True), value=cache.value.to(device, copy=True))

    def layer(cache: KVCache | DeltaCache) -> KVCache | DeltaCache:
        if isinstance(cache, KVCache):
            return attention(cache)
        return DeltaCache(cache.conv.to(device, copy=True), cache.ssm.to(device, copy=True))

    return replace(caches, layers=tuple(map(layer, caches.layers)), draft=tuple(map(attention, caches.draft)))


def bind_caches(buffer: memoryview, tensors: Sequence[TensorLayout], *, linear_key_dim: int) -> RankCaches:
    """View ``buffer`` (writable, at least the layout's bytes) as the tensors of ``tensors``."""
    by_key = {(t.namespace, t.layer, t.role): t for t in tensors}
    slots = [t for t in tensors if t.role == "SSM"]
    convs = [t for t in tensors if t.role == "CONV"]
    blocks = [t for t in tensors if t.role == "KEY"]

    def view(layout: TensorLayout) -> torch.Tensor:
        rows = layout.resource_count * layout.rows_per_resource
        dtype = DTYPES[layout.dtype]
        count = rows * layout.row_bytes // dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=layout.base_bytes)
        return flat.view(rows, layout.row_bytes // dtype.itemsize)

    def attention(namespace: str, layer: int) -> KVCache:
        key, value = by_key[namespace, layer, "KEY"], by_key[namespace, layer, "VALUE"]  # type: ignore[index]
        return KVCache(view(key), view(value), key.rows_per_resource, key.row_units)

    layers: list[KVCache | DeltaCache] = []
    for layer in sorted({t.layer for t in tensors if t.namespace == "target"}):
        if ("target", layer, "KEY") in by_key:
            layers.append(attention("target", layer))
            continue
        conv, ssm = by_key["target", layer, "CONV"], by_key["target", layer, "SSM"]
        rows = ssm.resource_count * ssm.rows_per_resource
        layers.append(DeltaCache(view(conv), view(ssm).view(rows, ssm.row_units, linear_key_dim, -1)))
    draft = tuple(attention("draft", layer) for layer in sorted({t.layer for t in tensors if t.namespace == "draft"}))
    speculative = slots[0].rows_per_resource - 1 if slots else 0
    columns = convs[0].rows_per_resource if convs else 0
    return RankCaches(tuple(layers), draft, blocks[0].rows_per_resource if blocks else 1, speculative, columns)
