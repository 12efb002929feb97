"""Cache tensors of a simulated rank: rows of tags instead of numbers.

A unit of a cached row (a head, or a channel of CONV) holds one integer that says whose it is: request, layer, role,
which unit of the unsharded axis, which token. A row is made as one integer; rows are the same in every run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from mmap import mmap
from typing import Final, NamedTuple

from messages.batch import SequenceStart
from messages.layout import Span, TensorLayout

SAMPLE_SHIFT: Final = 128
"""Positions behind the prompt are shifted by this much per sample in tags: sequences here are shorter."""
DRAFT_FLAG: Final = 1 << 15
"""Set in the tags of rejected drafts: nobody may read them."""

ROWS_AT_ONCE: Final = 48
"""Rows of a request are made for so many positions at once."""
ROWS_CACHED: Final = 8192
"""Requests times tensors whose rows are remembered from run to run."""

RAMPS_CACHED: Final = 1024
"""Kinds of rows, and lengths, for which the rows of nobody in particular are remembered."""

_ROLES: Final = {"KEY": 1, "VALUE": 2, "CONV": 3, "SSM": 4}
_AXES: Final = {"Q": 0, "K": 16, "V": 32}


class Whose(NamedTuple):
    """Whose rows: request ``r17``'s sample ``r17-2`` is number 17, sample 2. All samples share the rows of the prompt,
    which has ``prompt`` tokens (0 for sample 0, for which it does not matter)."""

    number: int
    sample: int
    prompt: int

    @classmethod
    def of(cls, start: SequenceStart) -> Whose:
        number, _, text = start.request_id[1:].partition("-")
        sample = int(text or 0)
        return cls(int(number), sample, len(start.prompt_token_ids) if sample else 0)


Stretch = tuple[int, int, int]
"""(row of a tensor, first position, end position): positions of a request in rows that follow each other."""


def stretches(blocks: Sequence[int], block_size: int, begin: int, end: int) -> list[Stretch]:
    """Where positions ``[begin, end)`` lie, in every tensor that is addressed by these blocks."""
    found: list[Stretch] = []
    while begin < end:
        index = begin // block_size
        row, first = blocks[index] * block_size + begin % block_size, begin
        begin = (index + 1) * block_size
        while begin < end and blocks[index + 1] == blocks[index] + 1:
            index += 1
            begin += block_size
        begin = min(begin, end)
        found.append((row, first, begin))
    return found


@cache
def _bases(spans: tuple[Span, ...], row_units: int, layer: int, role: str, is_draft: bool) -> tuple[int, int]:
    """A row as one integer, without request and position; and the integer that puts a tag into each of its units."""
    units = [0] * row_units
    for span in spans:
        for index in range(span.length):
            units[span.offset + index] = _AXES.get(span.axis, 0) + span.start + index
    if role == "CONV":  # 32-bit tags: position 10 bits, request 12, unit 6, one bit that is always set
        bits, units = 32, [unit << 22 | 1 << 31 for unit in units]
    else:
        kind = _ROLES[role] | (8 if is_draft else 0)
        bits, units = 64, [unit << 16 | layer << 24 | kind << 32 for unit in units]
    base = sum(unit << bits * index for index, unit in enumerate(units))
    return base, sum(1 << bits * index for index in range(row_units))


def _row(
    base: int, ones: int, stride: int, whose: Whose, shared: int, position: int, flag: int, is_conv: bool
) -> bytes:
    number, sample, prompt = whose
    if sample and position >= prompt + shared:
        position += SAMPLE_SHIFT * sample
    tag = (number & 0xFFF) << 10 | position & 0x3FF if is_conv else number << 40 | position | flag
    return (base + tag * ones).to_bytes(stride, "little")


@lru_cache(maxsize=ROWS_CACHED)
def _rows(base: int, ones: int, stride: int, whose: Whose, shared: int, count: int, is_conv: bool) -> bytes:
    """The rows of a sequence's first ``count`` positions; the same in every run."""
    number, sample, prompt = whose
    split = min(count, max(0, prompt + shared)) if sample else count
    rows = b""
    for first, end, shift in ((0, split, 0), (split, count, SAMPLE_SHIFT * sample)):
        if is_conv and (first + shift) % 0x400 + end - first > 0x400:  # the position's bits overflow on the way
            rows += b"".join(
                _row(base, ones, stride, whose, shared, position, 0, True) for position in range(first, end)
            )
            continue
        tag = (number & 0xFFF) << 10 | (first + shift) & 0x3FF if is_conv else number << 40 | first + shift
        untagged, units = _ramp(base, ones, stride, end - first)
        rows += (untagged + units * tag).to_bytes(stride * (end - first), "little")
    return rows


@lru_cache(maxsize=RAMPS_CACHED)
def _ramp(base: int, ones: int, stride: int, count: int) -> tuple[int, int]:
    """``count`` rows whose tags rise by one from 0, and a 1 in each of their units, as integers."""
    bits = 8 * stride
    rows = sum(base + ones * index << bits * index for index in range(count))
    return rows, sum(ones << bits * index for index in range(count))


class TagTensor:
    """One cache tensor of one rank, over its region."""

    def __init__(self, layout: TensorLayout, region: mmap) -> None:
        self.layout = layout
        self.region = region
        self._conv = layout.role == "CONV"
        self._stride = layout.row_units * layout.unit_bytes
        self._base, self._ones = _bases(
            layout.spans, layout.row_units, layout.layer, layout.role, layout.namespace == "draft"
        )
        if layout.resource_stride_bytes != layout.rows_per_resource * self._stride:
            raise ValueError(f"{layout.name}: resources do not follow each other")
        # How far behind the prompt's end rows are the same for all its samples. The draft's last row of the prompt
        # depends on the token that follows; the state after ``n`` tokens stands at position ``n``.
        self._shared = -1 if layout.namespace == "draft" else int(layout.role == "SSM")
        self._rows: dict[Whose, bytes] = {}  # rows from position 0 on, as far as they were needed

    def row(self, whose: Whose, position: int, flag: int = 0) -> bytes:
        """The bytes of one row that belongs to ``whose`` token ``position``."""
        return _row(self._base, self._ones, self._stride, whose, self._shared, position, flag, self._conv)

    def rows(self, whose: Whose, begin: int, end: int) -> bytes:
        """Rows of positions ``[begin, end)`` one behind the other; before position 0 there are zeros."""
        stride = self._stride
        known = self._rows.get(whose, b"")
        if end * stride > len(known):
            count = -(-end // ROWS_AT_ONCE) * ROWS_AT_ONCE
            known = self._rows[whose] = _rows(self._base, self._ones, stride, whose, self._shared, count, self._conv)
        if begin < 0:
            return bytes(-begin * stride) + known[: max(0, end) * stride]
        return known[begin * stride : end * stride]

    def write(self, whose: Whose, where: Sequence[Stretch]) -> None:
        """Write a request's rows."""
        stride, base, region = self._stride, self.layout.base_bytes, self.region
        for row, first, end in where:
            at = base + row * stride
            region[at : at + (end - first) * stride] = self.rows(whose, first, end)

    def spoil(self, whose: Whose, where: Sequence[Stretch]) -> None:
        """Write rows of rejected drafts, which nobody may read."""
        for row, first, end in where:
            at = self.layout.base_bytes + row * self._stride
            rows = b"".join(self.row(whose, position, DRAFT_FLAG) for position in range(first, end))
            self.region[at : at + len(rows)] = rows

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks or slots onto others; those that are the same stay."""
        base, stride = self.layout.base_bytes, self.layout.resource_stride_bytes
        for source, target in zip(sources, targets, strict=True):
            at, to = base + source * stride, base + target * stride
            self.region[to : to + stride] = self.region[at : at + stride]

    def check(self, whose: Whose, where: Sequence[Stretch]) -> str:
        """Why these rows are not all this request's; "" when they are."""
        stride, base, region = self._stride, self.layout.base_bytes, self.region
        for row, first, end in where:
            at = base + row * stride
            if region[at : at + (end - first) * stride] != self.rows(whose, first, end):
                return self._explain(whose, row, first, end)
        return ""

    def _explain(self, whose: Whose, row: int, first: int, end: int) -> str:
        for index, position in enumerate(range(first, end), row):
            at = self.layout.base_bytes + index * self._stride
            expected = self.row(whose, position)
            found = bytes(self.region[at : at + len(expected)])
            if found != expected:
                block = index // self.layout.rows_per_resource
                return f"{self.layout.name} token {position} in block {block}: {self.describe(found, expected)}"
        return "no difference on second sight"

    def describe(self, found: bytes, expected: bytes) -> str:
        """What lies where something else should: whose row it is, as far as tags tell."""
        code = "I" if self._conv else "Q"
        for index, (seen, wanted) in enumerate(zip(array(code, found), array(code, expected), strict=True)):
            if seen != wanted:
                return f"unit {index} holds {self._name(seen)}, should hold {self._name(wanted)}"
        return "equal"

    def _name(self, tag: int) -> str:
        if not tag:
            return "zeros"
        if self._conv:
            return f"request r{tag >> 10 & 0xFFF} position {tag & 0x3FF} channel {tag >> 22 & 0x1FF}"
        rejected = " (a rejected draft)" if tag & DRAFT_FLAG else ""
        kind = {number: name for name, number in _ROLES.items()}.get(tag >> 32 & 7, "?")
        place = f"layer {tag >> 24 & 0xFF} unit {tag >> 16 & 0xFF} position {tag & 0x7FFF}"
        return f"request r{tag >> 40} {kind} {place}{rejected}"

    # -- state slots ------------------------------------------------------------------------------------------------

    def _slot(self, slot: int, row: int) -> int:
        layout = self.layout
        return layout.base_bytes + slot * layout.resource_stride_bytes + row * layout.row_stride_bytes

    def write_state(self, whose: Whose, slot: int, start: int, width: int, is_prefill: bool) -> None:
        """The state after tokens ``start…start+width-1``: one state after a prefill chunk, one per token otherwise."""
        end = start + width
        if self._conv:
            window = self.layout.live_rows
            first = end - window if is_prefill else start - window + 1
            rows = self.rows(whose, first, end)
        else:
            rows = self.rows(whose, end if is_prefill else start + 1, end + 1)
        at = self._slot(slot, 0)
        self.region[at : at + len(rows)] = rows

    def check_state(self, whose: Whose, slot: int, live: int, computed: int) -> str:
        """Why checkpoint ``live`` is not this request's state after ``computed`` tokens; "" when it is."""
        if self._conv:
            window = self.layout.live_rows
            expected = self.rows(whose, computed - window, computed)
        else:
            expected = self.rows(whose, computed, computed + 1)
        at = self._slot(slot, live)
        found = bytes(self.region[at : at + len(expected)])
        if found == expected:
            return ""
        return f"{self.layout.name} slot {slot} checkpoint {live}: {self.describe(found, expected)}"
