"""The model of a simulated rank: caches hold tags instead of numbers, and the next token is a hash of the history.

A unit of a cached row (a head, or a channel of CONV) holds one integer that says whose it is: request, layer, role,
which unit of the unsharded axis, which token. A rank checks every row that a real model would read against the tags
that must be there, so a wrong merge, a stale write, a reused row or a row read too early is found where it is read.

The rules by which states move (windows of CONV, checkpoints of SSM, drafts and their rollback) are those of the real
worker; see ``docs/architecture.md`` and ``actors/worker/layout.py``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from mmap import mmap
from typing import Final, NamedTuple
from zlib import crc32

from messages.batch import BatchRow, ExecuteBatch, RowResult, SequenceStart
from messages.layout import ModelGeometry, Span, TensorLayout
from messages.requests import SamplingParams
from scripts.simulated_memory import Violation

VOCABULARY: Final = 48
EOS: Final = 0
SAMPLE_SHIFT: Final = 128
"""Positions behind the prompt are shifted by this much per sample in tags: sequences here are shorter."""
DRAFT_FLAG: Final = 1 << 15
"""Set in the tags of rejected drafts: nobody may read them."""

ROWS_AT_ONCE: Final = 72
"""Rows of a request are made for so many positions at once."""
ROWS_CACHED: Final = 8192
"""Requests times tensors whose rows are remembered from run to run."""

GEOMETRY: Final = ModelGeometry(
    model_fingerprint="simulated",
    layer_kinds=("attention", "delta"),
    attention_heads=4,
    kv_heads=2,
    head_dim=2,  # times four bytes: a KEY or VALUE unit is one 64-bit tag
    linear_key_heads=4,
    linear_value_heads=8,
    linear_key_dim=1,
    linear_value_dim=2,
    conv_kernel=4,
    draft_layers=1,
    cache_dtype="float32",
    max_model_len=256,
)

_ROLES: Final = {"KEY": 1, "VALUE": 2, "CONV": 3, "SSM": 4}
_AXES: Final = {"Q": 0, "K": 16, "V": 32}


def next_token(history: Sequence[int], sampling: SamplingParams, output_count: int) -> int:
    """The token that follows ``history``: the same wherever and whenever it is computed."""
    token = crc32(array("H", history).tobytes(), sampling.seed & 0xFFFFFFFF) % VOCABULARY
    if output_count < sampling.min_tokens:  # nothing that ends the output can be sampled yet
        while token in sampling.eos_token_ids or token in sampling.stop_token_ids:
            token = (token + 1) % VOCABULARY
    return token


def expected_output(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[list[int], str]:
    """(tokens, finish reason) that a client must get."""
    history = list(prompt)
    output: list[int] = []
    while True:
        token = next_token(history, sampling, len(output))
        history.append(token)
        output.append(token)
        if len(output) > sampling.min_tokens:
            if token in sampling.eos_token_ids and not sampling.ignore_eos:
                return output, "stop"
            if token in sampling.stop_token_ids:
                return output, "stop"
        if len(output) >= sampling.max_tokens:
            return output, "length"


def bootstrap(request_number: int, position: int) -> bytes:
    """What stands for the target hidden state of a request's position."""
    return request_number.to_bytes(4, "little") + position.to_bytes(4, "little")


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
    return b"".join(_row(base, ones, stride, whose, shared, position, 0, is_conv) for position in range(count))


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


@dataclass
class _Open:
    """An open sequence of a rank."""

    start: SequenceStart
    whose: Whose
    outputs: list[int]
    live: int = 0
    draft_owes: bool = False  # the draft's row of the last prompt position is another sample's
    computed: int = -1  # unknown until its first row
    error: str = ""
    history: list[int] = field(default_factory=list)


class TagRunner:
    """One rank: executes the command stream over tagged caches. The same decisions as the real runner's."""

    def __init__(self, where: str, tensors: Sequence[TensorLayout], region: mmap) -> None:
        self._where = where
        views = [TagTensor(layout, region) for layout in tensors]
        self._by_block = [view for view in views if view.layout.addressed_by == "block"]
        self._block_size = self._by_block[0].layout.rows_per_resource
        self._has_drafts = any(view.layout.namespace == "draft" for view in views)
        self._slots = [view for view in views if view.layout.addressed_by == "slot"]
        self.open: dict[str, _Open] = {}
        self._tables: dict[str, tuple[int, ...]] = {}  # of the step that runs

    def execute(self, batch: ExecuteBatch) -> list[RowResult]:
        """Run one step; raises ``Violation`` when a row reads what is not its own."""
        for request_id in batch.closed:
            self.open.pop(request_id, None)
        for start in batch.opened:
            self._open(start)
        self._tables = {row.request_id: row.block_ids for row in batch.rows}
        return [self._run(row) for row in batch.rows]

    def _open(self, start: SequenceStart) -> None:
        whose = Whose.of(start)
        sequence = _Open(start, whose, list(start.output_token_ids))
        sequence.history = [*start.prompt_token_ids, *start.output_token_ids]
        if start.restored:
            sequence.computed = len(sequence.history) - 1
            sequence.draft_owes = whose.sample > 0
            expected = bootstrap(whose.number, sequence.computed - 1)
            if self._has_drafts and start.bootstrap_hidden != expected:
                sequence.error = f"bootstrap is {start.bootstrap_hidden!r}, should be {expected!r}"
        self.open[start.request_id] = sequence

    def _run(self, row: BatchRow) -> RowResult:
        sequence = self.open.get(row.request_id)
        if sequence is None:
            raise Violation(f"I2: {self._where} runs {row.request_id}, which is not open")
        if sequence.error:
            return RowResult(request_id=row.request_id, epoch=row.epoch, error=sequence.error)
        if row.fork_of:
            return self._fork(row, sequence)
        if row.start and sequence.computed != row.start:
            raise Violation(
                f"I2: {self._where} runs {row.request_id} from token {row.start}, its caches hold {sequence.computed}"
            )
        fed = sequence.history[row.start : row.start + len(row.token_ids)]
        if tuple(fed) != row.token_ids:
            raise Violation(f"I6: {self._where} is fed {row.token_ids} as tokens {row.start}… of {row.request_id}")
        if row.start:
            self._check(row, sequence)
        return self._prefill(row, sequence) if row.is_prefill else self._decode(row, sequence)

    def _check(self, row: BatchRow, sequence: _Open) -> None:
        why = ""
        if sequence.draft_owes:  # the first draft pass begins at the bootstrap's position
            sequence.draft_owes = False
            owed = stretches(row.block_ids, self._block_size, row.start - 1, row.start)
            for tensor in self._by_block:
                if tensor.layout.namespace == "draft":
                    tensor.write(sequence.whose, owed)
        where = stretches(row.block_ids, self._block_size, 0, row.start)
        for tensor in self._by_block:
            why = why or tensor.check(sequence.whose, where)
        for tensor in self._slots:
            why = why or tensor.check_state(sequence.whose, sequence.start.slot, sequence.live, row.start)
        if why:
            raise Violation(f"I6: {self._where} reads for {row.request_id} epoch {row.epoch}: {why}")

    def _prefill(self, row: BatchRow, sequence: _Open) -> RowResult:
        end = row.start + len(row.token_ids)
        where = stretches(row.block_ids, self._block_size, row.start, end)
        for tensor in self._by_block:
            tensor.write(sequence.whose, where)
        for tensor in self._slots:
            tensor.write_state(sequence.whose, sequence.start.slot, row.start, len(row.token_ids), True)
        sequence.computed, sequence.live = end, 0
        if not row.samples:
            return RowResult(request_id=row.request_id, epoch=row.epoch)
        token = next_token(sequence.history, sequence.start.sampling, len(sequence.outputs))
        self._accept(sequence, [token])
        return self._first(row, sequence, token)

    def _fork(self, row: BatchRow, sequence: _Open) -> RowResult:
        """Begin where the prompt of another sequence ends, which ran in this step."""
        source = self.open[row.fork_of].start
        if row.start != len(source.prompt_token_ids) or source.prompt_token_ids != tuple(sequence.history):
            raise Violation(f"I6: {self._where} forks {row.request_id} at {row.start}, not where its prompt ends")
        used = -(-row.start // self._block_size)
        for tensor in self._by_block:
            tensor.copy(self._tables[row.fork_of][:used], row.block_ids[:used])
        for tensor in self._slots:
            tensor.copy((source.slot,), (sequence.start.slot,))
        sequence.computed, sequence.draft_owes = row.start, True
        token = next_token(sequence.history, sequence.start.sampling, 0)
        self._accept(sequence, [token])
        return self._first(row, sequence, token)

    def _first(self, row: BatchRow, sequence: _Open, token: int) -> RowResult:
        hidden = bootstrap(sequence.whose.number, sequence.computed - 1) if self._has_drafts else b""
        return RowResult(
            request_id=row.request_id,
            epoch=row.epoch,
            token_ids=(token,),
            bootstrap_hidden=hidden,
            bootstrap_dtype="float32" if hidden else "",
        )

    def _decode(self, row: BatchRow, sequence: _Open) -> RowResult:
        drafts = row.speculative_tokens
        accepted = crc32(row.request_id.encode(), row.start) % (drafts + 1)
        tokens: list[int] = []
        for _ in range(accepted + 1):
            tokens.append(
                next_token(sequence.history + tokens, sequence.start.sampling, len(sequence.outputs) + len(tokens))
            )
        end = row.start + 1 + accepted
        where = stretches(row.block_ids, self._block_size, row.start, end)
        rejected = stretches(row.block_ids, self._block_size, end, row.start + 1 + drafts)
        for tensor in self._by_block:
            tensor.write(sequence.whose, where)
            tensor.spoil(sequence.whose, rejected)
        for tensor in self._slots:
            tensor.write_state(sequence.whose, sequence.start.slot, row.start, 1 + drafts, False)
        sequence.computed, sequence.live = end, accepted
        self._accept(sequence, tokens)
        return RowResult(
            request_id=row.request_id,
            epoch=row.epoch,
            token_ids=tuple(tokens),
            drafted=drafts,
            accepted=accepted,
        )

    @staticmethod
    def _accept(sequence: _Open, tokens: list[int]) -> None:
        sequence.outputs += tokens
        sequence.history += tokens
