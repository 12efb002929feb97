"""The indices of one step, as tensors: computed once, used by every layer.

A step's tokens are one flat batch: first the decode part, a rectangle of ``rows`` sequences times ``width`` tokens
(1, or up to S+1 when drafts are verified), then the prefill rows one after another. Nothing per sequence is left for
the layers to compute for the decode part; a prefill row is one call per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

GROUP_WASTE_MAX = 2.0
"""Decode rows share one padded attention call while padding at most doubles the context that is read."""


@dataclass(frozen=True)
class RowSpec:
    """One sequence's part of a step. ``live`` is the checkpoint its state stands at, -1 for a sequence without state.

    ``width`` tokens at positions ``start…``; ``blocks`` is its block table; ``slot`` its state slot.
    """

    start: int
    width: int
    slot: int
    live: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class AttentionGroup:
    """Decode rows that attend in one call over ``length`` context tokens, padded to the longest row's blocks.

    ``rows`` are indices into the decode part, None for all of it. ``blocks`` [rows · blocks per row].
    ``mask`` [rows, 1, group·width, length] adds 0 or -inf, query heads of one KV head folded before the width;
    broadcast over the fold when ``width`` is 1; None when all rows may see all of ``length``.
    """

    rows: torch.Tensor | None
    row_count: int
    blocks: torch.Tensor
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class StateIndices:
    """Where a decode part's recurrent states lie.

    ``conv_read`` [rows · (K-1)], ``conv_write`` [rows · (K-2+width)]: rows of the flat CONV cache.
    ``ssm_read`` [rows]; ``ssm_write`` [rows · width]: the checkpoint after each token.
    ``neighbours``: (first, last + 1) of the slots when they lie next to each other.
    ``in_place``: the same when states are also updated where they lie, one token on; the indices are empty then.
    """

    conv_read: torch.Tensor
    conv_write: torch.Tensor
    ssm_read: torch.Tensor
    ssm_write: torch.Tensor
    neighbours: tuple[int, int] | None
    in_place: tuple[int, int] | None


class DecodePart:
    """``rows`` sequences times ``width`` tokens at the front of the flat batch.

    Indices are made when a layer first asks for them: the compiled kernels need none of them. ``checkpoints``: SSM rows
    per slot.
    """

    def __init__(self, geometry: PlanGeometry, specs: Sequence[RowSpec], width: int) -> None:
        self.specs = tuple(specs)
        self.rows = len(self.specs)
        self.width = width
        self.checkpoints = geometry.checkpoints
        self.block_size = geometry.block_size
        self._geometry = geometry

    @cached_property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """The attention calls that cover all rows."""
        return _attention_groups(self._geometry, self.specs, self.width)

    @cached_property
    def states(self) -> StateIndices:
        """Of every row, in order."""
        return _state_indices(self._geometry, self.specs, self.width)


@dataclass(frozen=True)
class PrefillPart:
    """Tokens ``[begin, end)`` of the flat batch: a chunk of one prompt that starts at position ``start``.

    ``blocks`` cover ``[0, start + end - begin)``; ``mask`` [tokens, context] is None when the chunk starts the prompt.
    ``conv_row`` and ``ssm_row`` are the first rows of the slot; ``fresh`` means that no earlier state exists.
    """

    begin: int
    end: int
    start: int
    blocks: torch.Tensor
    mask: torch.Tensor | None
    conv_row: int
    ssm_read: int
    ssm_row: int
    fresh: bool
    conv_read: int


@dataclass(frozen=True)
class StepPlan:
    """``positions`` [N]; ``kv_write`` [M] token rows of the KV caches; ``kv_tokens`` [M]: whose (None: all N)."""

    token_count: int
    positions: torch.Tensor
    kv_write: torch.Tensor
    kv_tokens: torch.Tensor | None
    decode: DecodePart | None
    prefills: tuple[PrefillPart, ...]


@dataclass(frozen=True)
class PlanGeometry:
    """What the indices depend on besides the rows. ``group``: query heads per KV head on this rank."""

    block_size: int
    conv_kernel: int
    conv_columns: int
    checkpoints: int
    group: int
    device: torch.device
    dtype: torch.dtype


def plan_step(
    geometry: PlanGeometry, decode: Sequence[RowSpec], prefills: Sequence[RowSpec], *, width: int = 1
) -> StepPlan:
    """Indices for ``decode`` rows (each padded to ``width`` tokens) followed by ``prefills``.

    A decode row narrower than ``width`` computes its padding too but writes no KEY or VALUE for it; its padding's CONV
    columns and SSM checkpoints are never alive.
    """
    positions: list[int] = []
    kv_write: list[int] = []
    kv_tokens: list[int] = []
    for spec, padded in [(spec, width) for spec in decode] + [(spec, spec.width) for spec in prefills]:
        first = len(positions)
        positions.extend(range(spec.start, spec.start + padded))
        kv_tokens.extend(range(first, first + spec.width))
        kv_write.extend(_token_rows(spec, geometry.block_size))
    device = geometry.device
    all_written = len(kv_tokens) == len(positions)
    parts = []
    begin = len(decode) * width
    for spec in prefills:
        parts.append(_prefill_part(geometry, spec, begin))
        begin += spec.width
    return StepPlan(
        token_count=len(positions),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        kv_write=torch.tensor(kv_write, dtype=torch.int64, device=device),
        kv_tokens=None if all_written else torch.tensor(kv_tokens, dtype=torch.int64, device=device),
        decode=DecodePart(geometry, decode, width) if decode else None,
        prefills=tuple(parts),
    )


def _token_rows(spec: RowSpec, block_size: int) -> list[int]:
    blocks = spec.blocks
    return [
        blocks[position // block_size] * block_size + position % block_size
        for position in range(spec.start, spec.start + spec.width)
    ]


def _prefill_part(geometry: PlanGeometry, spec: RowSpec, begin: int) -> PrefillPart:
    length = spec.start + spec.width
    block_count = -(-length // geometry.block_size)
    mask = None
    if spec.start:
        mask = torch.zeros(spec.width, length, dtype=geometry.dtype, device=geometry.device)
        blocked = torch.ones(spec.width, spec.width, dtype=torch.bool, device=geometry.device).triu_(1)
        mask[:, spec.start :].masked_fill_(blocked, float("-inf"))
    return PrefillPart(
        begin=begin,
        end=begin + spec.width,
        start=spec.start,
        blocks=torch.tensor(spec.blocks[:block_count], dtype=torch.int64, device=geometry.device),
        mask=mask,
        conv_row=spec.slot * geometry.conv_columns,
        conv_read=spec.slot * geometry.conv_columns + max(0, spec.live),
        ssm_row=spec.slot * geometry.checkpoints,
        ssm_read=spec.slot * geometry.checkpoints + max(0, spec.live),
        fresh=spec.live < 0,
    )


def _state_indices(geometry: PlanGeometry, specs: Sequence[RowSpec], width: int) -> StateIndices:
    device = geometry.device
    neighbours = _neighbours(specs)
    in_place = neighbours if width == 1 and geometry.checkpoints == 1 else None
    if in_place is not None:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return StateIndices(none, none, none, none, neighbours, in_place)
    slots = torch.tensor([spec.slot for spec in specs], dtype=torch.int64, device=device)
    live = torch.tensor([spec.live for spec in specs], dtype=torch.int64, device=device)
    window = geometry.conv_kernel - 1
    conv_base = slots * geometry.conv_columns
    conv_read = (conv_base + live)[:, None] + torch.arange(window, device=device)
    conv_write = conv_base[:, None] + torch.arange(window + width - 1, device=device)
    ssm_base = slots * geometry.checkpoints
    return StateIndices(
        conv_read=conv_read.flatten(),
        conv_write=conv_write.flatten(),
        ssm_read=ssm_base + live,
        ssm_write=(ssm_base[:, None] + torch.arange(width, device=device)).flatten(),
        neighbours=neighbours,
        in_place=None,
    )


def _neighbours(specs: Sequence[RowSpec]) -> tuple[int, int] | None:
    """(first, last + 1) of the rows' slots if they lie next to each other in order."""
    first = specs[0].slot
    if any(spec.slot != first + index for index, spec in enumerate(specs)):
        return None
    return first, first + len(specs)


def _attention_groups(geometry: PlanGeometry, specs: Sequence[RowSpec], width: int) -> tuple[AttentionGroup, ...]:
    """One padded call for all rows, or several when contexts differ so much that padding would dominate."""
    lengths = [spec.start + spec.width for spec in specs]
    longest = max(lengths)
    if longest * len(specs) <= GROUP_WASTE_MAX * sum(lengths):
        return (_group(geometry, specs, None, width),)
    order = sorted(range(len(specs)), key=lambda index: lengths[index])
    groups: list[list[int]] = [[]]
    for index in order:
        current = groups[-1]
        if current and lengths[index] > GROUP_WASTE_MAX * lengths[current[0]]:
            current = []
            groups.append(current)
        current.append(index)
    return tuple(_group(geometry, [specs[i] for i in rows], rows, width) for rows in groups)


def _group(geometry: PlanGeometry, specs: Sequence[RowSpec], rows: list[int] | None, width: int) -> AttentionGroup:
    device = geometry.device
    lengths = [spec.start + spec.width for spec in specs]
    block_count = -(-max(lengths) // geometry.block_size)
    padded = block_count * geometry.block_size
    blocks: list[int] = []
    for spec, length in zip(specs, lengths, strict=True):
        used = list(spec.blocks[: -(-length // geometry.block_size)])
        blocks += used + [used[-1]] * (block_count - len(used))
    row_index = None if rows is None else torch.tensor(rows, dtype=torch.int64, device=device)
    block_index = torch.tensor(blocks, dtype=torch.int64, device=device)
    if width == 1 and min(lengths) == max(lengths):
        return AttentionGroup(row_index, len(specs), block_index, lengths[0], None)
    last = torch.tensor([spec.start for spec in specs], device=device)[:, None] + torch.arange(width, device=device)
    # Padding tokens of a narrow row attend to what its real tokens may see: their output is never read.
    last = last.minimum(torch.tensor(lengths, device=device)[:, None] - 1)
    seen = torch.arange(padded, device=device) <= last[:, :, None]  # [rows, width, padded]
    mask = torch.zeros(len(specs), 1, width, padded, dtype=geometry.dtype, device=device)
    mask.masked_fill_(~seen[:, None], float("-inf"))
    if width > 1:
        mask = mask.unsqueeze(2).expand(-1, -1, geometry.group, -1, -1).flatten(2, 3)
    return AttentionGroup(row_index, len(specs), block_index, padded, mask)
