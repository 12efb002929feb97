"""The model of a simulated rank: caches hold tags instead of numbers, and the next token is a hash of the history.

As a token that is drawn with temperature and drafts, it is also a hash of the step that it comes from: where that began
and how much it drafted. So a request gets wrong tokens when its steps are cut elsewhere than undisturbed (C29).

A rank checks every row that a real model would read against the tags that must be there (``simulated_tags.py``), so a
wrong merge, a stale write, a reused row or a row read too early is found where it is read.

The rules by which states move (windows of CONV, checkpoints of SSM, drafts and their rollback) are those of the real
worker; see ``docs/architecture.md`` and ``actors/worker/layout.py``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Final
from zlib import crc32

import msgspec

from messages.batch import BatchRow, ExecuteBatch, RowResult, SequenceStart
from messages.layout import ModelGeometry, TensorLayout
from messages.requests import SamplingParams
from scripts.simulated_memory import Violation
from scripts.simulated_tags import TagTensor, Whose, stretches

VOCABULARY: Final = 48
EOS: Final = 0
PREFILL: Final = (0, 0)
"""The step of a token that a prefill samples: no decode step begins at position 0."""
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


def next_token(history: Sequence[int], sampling: SamplingParams, output_count: int, step: tuple[int, int]) -> int:
    """The token that follows ``history`` in a step that begins and drafts as ``step`` says (``PREFILL``: in a prefill),
    the same wherever and whenever it is computed."""
    token = crc32(array("H", (*history, *step)).tobytes(), sampling.seed & 0xFFFFFFFF) % VOCABULARY
    if output_count < sampling.min_tokens:  # nothing that ends the output can be sampled yet
        while token in sampling.eos_token_ids or token in sampling.stop_token_ids:
            token = (token + 1) % VOCABULARY
    return token


def verified(
    request_id: str, history: Sequence[int], sampling: SamplingParams, output_count: int, drafts: int
) -> list[int]:
    """The tokens of a decode step: as many of ``drafts`` are accepted as request and position decide, and one more."""
    step = (len(history) - 1, drafts)
    tokens: list[int] = []
    for _ in range(crc32(request_id.encode(), step[0]) % (drafts + 1) + 1):
        tokens.append(next_token([*history, *tokens], sampling, output_count + len(tokens), step))
    return tokens


def expected_output(
    request_id: str, prompt: tuple[int, ...], sampling: SamplingParams, depth: int
) -> tuple[list[int], str]:
    """(tokens, finish reason) that a client must get: those of an undisturbed request that drafts ``depth`` tokens."""
    history = list(prompt)
    tokens = [next_token(history, sampling, 0, PREFILL)]
    while True:
        for token in tokens:
            history.append(token)
            count = len(history) - len(prompt)
            if count > sampling.min_tokens:
                if token in sampling.eos_token_ids and not sampling.ignore_eos:
                    return history[len(prompt) :], "stop"
                if token in sampling.stop_token_ids:
                    return history[len(prompt) :], "stop"
            if count >= sampling.max_tokens:
                return history[len(prompt) :], "length"
        count = len(history) - len(prompt)
        drafts = max(0, min(depth, sampling.max_tokens - count - 1))
        tokens = verified(request_id, history, sampling, count, drafts)


def bootstrap(request_number: int, position: int) -> bytes:
    """What stands for the target hidden state of a request's position."""
    return request_number.to_bytes(4, "little") + position.to_bytes(4, "little")


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
        fed = tuple(sequence.history[row.start : row.start + row.token_count])
        if not row.token_ids and not row.is_prefill and fed:  # sent a step ahead
            row = msgspec.structs.replace(row, token_ids=fed)
        if fed != row.token_ids:
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
        if not row.ends_prefill:
            return RowResult(request_id=row.request_id, epoch=row.epoch)
        tokens: list[int] = []
        if row.samples:
            tokens.append(next_token(sequence.history, sequence.start.sampling, len(sequence.outputs), PREFILL))
        elif end != len(sequence.history) - 1:
            raise Violation(f"I6: {self._where} ends {row.request_id} at {end} of {len(sequence.history)} tokens")
        self._accept(sequence, tokens)
        return self._first(row, sequence, tokens)

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
        token = next_token(sequence.history, sequence.start.sampling, 0, PREFILL)
        self._accept(sequence, [token])
        return self._first(row, sequence, [token])

    def _first(self, row: BatchRow, sequence: _Open, tokens: Sequence[int]) -> RowResult:
        hidden = bootstrap(sequence.whose.number, sequence.computed - 1) if self._has_drafts else b""
        return RowResult(
            request_id=row.request_id,
            epoch=row.epoch,
            token_ids=tuple(tokens),
            bootstrap_hidden=hidden,
            bootstrap_dtype="float32" if hidden else "",
        )

    def _decode(self, row: BatchRow, sequence: _Open) -> RowResult:
        drafts = row.speculative_tokens
        tokens = verified(row.request_id, sequence.history, sequence.start.sampling, len(sequence.outputs), drafts)
        accepted = len(tokens) - 1
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
