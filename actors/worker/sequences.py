"""What a rank remembers of each open sequence between steps: tokens, where its state stands, what its draft owes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from actors.worker.sampling_rules import History
from messages.batch import BatchRow, SequenceStart
from messages.requests import SamplingParams

NO_STATE = -1


@dataclass
class Pending:
    """Positions whose target hidden state is known, for the draft to start from.

    ``hidden`` [m, hidden] are positions ``start…``; ``tokens`` [m] are the tokens that follow each of them. ``seen``:
    the draft's cache has these rows already; feeding them again writes the same values.
    """

    start: int
    hidden: torch.Tensor
    tokens: list[int]
    seen: bool = False

    def followed_by(self, hidden: torch.Tensor, tokens: list[int]) -> Pending:
        """What is pending once the target has moved on by ``tokens`` over ``hidden``."""
        if self.seen:
            return Pending(self.start + len(self.tokens), hidden, tokens)
        return Pending(self.start, torch.cat((self.hidden, hidden)), self.tokens + tokens)


@dataclass
class OpenSequence:
    """One sequence. ``live``: the checkpoint its recurrent state stands at, ``NO_STATE`` before its first chunk.

    ``computed`` tokens are in the caches. ``error`` non-empty: every further row of it is answered with this.
    """

    request_id: str
    epoch: int
    slot: int
    sampling: SamplingParams
    prompt: tuple[int, ...]
    outputs: list[int]
    history: History
    live: int
    computed: int
    reports_prompt: bool
    restored: bool = False  # its caches were filled by a hand-off that no step has read yet
    pending: Pending | None = None
    error: str = ""

    @property
    def total(self) -> int:
        """Tokens known: prompt and outputs."""
        return len(self.prompt) + len(self.outputs)

    def token_at(self, position: int) -> int | None:
        """The token at ``position`` if it is known."""
        if position < len(self.prompt):
            return self.prompt[position]
        index = position - len(self.prompt)
        return self.outputs[index] if index < len(self.outputs) else None

    def accept(self, tokens: list[int], live: int) -> None:
        """Take ``tokens`` as outputs; the state stands at checkpoint ``live``."""
        self.outputs += tokens
        self.history.append(tokens)
        self.live = live


class SequenceTable:
    """The open sequences of one rank."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        slot_count: int,
        block_count: int,
        block_size: int,
        dtype_name: str,
        dtype: torch.dtype,
        device: torch.device,
        drafts: bool,
    ) -> None:
        self._vocab_size, self._hidden_size = vocab_size, hidden_size
        self._slot_count, self._block_count, self._block_size = slot_count, block_count, block_size
        self._dtype_name, self._dtype, self._device = dtype_name, dtype, device
        self._drafts = drafts
        self._open: dict[str, OpenSequence] = {}

    def __len__(self) -> int:
        return len(self._open)

    def close(self, request_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._open.pop(request_id, None)

    def open(self, start: SequenceStart) -> None:
        """Begin a sequence; one that is open under the same id is replaced. A bad start is answered with its rows."""
        error = self._refusal(start)
        sampling, outputs = start.sampling, start.output_token_ids
        try:
            history = History(
                SamplingParams() if error else sampling,
                self._vocab_size,
                start.prompt_token_ids,
                outputs,
                self._device,
            )
        except Exception as failure:  # parameters nobody foresaw: this request's fault, and only its
            error = f"sampling parameters cannot be used: {type(failure).__name__}: {failure}"
            history = History(SamplingParams(), self._vocab_size, (), (), self._device)
        sequence = OpenSequence(
            request_id=start.request_id,
            epoch=start.epoch,
            slot=start.slot,
            sampling=sampling,
            prompt=start.prompt_token_ids,
            outputs=list(outputs),
            history=history,
            live=0 if start.restored else NO_STATE,
            computed=0,
            reports_prompt=sampling.prompt_logprobs >= 0 and not outputs,
            restored=start.restored,
            error=error,
        )
        self._open[start.request_id] = sequence
        if start.restored and not error:
            self._restore(sequence, start)

    def _refusal(self, start: SequenceStart) -> str:
        """Why nothing of this sequence can run here; "" when it can."""
        outside = [
            token for token in start.prompt_token_ids + start.output_token_ids if not 0 <= token < self._vocab_size
        ]
        if outside:
            return f"token id {outside[0]} is outside the vocabulary of {self._vocab_size}"
        if not 0 <= start.slot < self._slot_count:
            return f"state slot {start.slot} does not exist; this rank has {self._slot_count}"
        return ""

    def _restore(self, sequence: OpenSequence, start: SequenceStart) -> None:
        if not start.output_token_ids:
            sequence.error = "a restored sequence must come with its first output token"
            return
        sequence.computed = sequence.total - 1
        if not self._drafts:
            return
        size = self._hidden_size * self._dtype.itemsize
        if not start.bootstrap_hidden:
            sequence.error = "the hand-off carried no MTP bootstrap state, which speculative decoding needs"
        elif start.bootstrap_dtype != self._dtype_name:
            sequence.error = (
                f"the MTP bootstrap state is {start.bootstrap_dtype or 'of no dtype'}, this instance computes in "
                f"{self._dtype_name} (option: dtype)"
            )
        elif len(start.bootstrap_hidden) != size:
            sequence.error = f"the MTP bootstrap state has {len(start.bootstrap_hidden)} bytes, this model needs {size}"
        else:
            hidden = torch.frombuffer(bytearray(start.bootstrap_hidden), dtype=self._dtype).to(self._device)
            if not bool(torch.isfinite(hidden).all()):
                sequence.error = "the MTP bootstrap state is not finite"
                return
            sequence.pending = Pending(sequence.computed - 1, hidden.unsqueeze(0), [start.output_token_ids[-1]])

    def fill(self, row: BatchRow) -> BatchRow:
        """``row`` with the token that it feeds, if that was not known when it was sent (a step ahead)."""
        if row.token_ids or row.is_prefill:
            return row
        sequence = self._open.get(row.request_id)
        token = sequence.token_at(row.start) if sequence is not None else None
        return row if token is None else msgspec.structs.replace(row, token_ids=(token,))

    def find(self, row: BatchRow, source: OpenSequence | None = None) -> tuple[OpenSequence | None, str]:
        """(the row's sequence, "") or (the sequence if any, why the row cannot run). ``source``: whose prompt a fork
        shares, if that runs in this step."""
        sequence = self._open.get(row.request_id)
        if sequence is None:
            return None, "this sequence is not open on the worker"
        if sequence.error:
            return sequence, sequence.error
        if row.epoch != sequence.epoch:
            return sequence, f"the row is of epoch {row.epoch}, the open sequence of epoch {sequence.epoch}"
        error = self._check_fork(sequence, row, source) if row.fork_of else self._check(sequence, row)
        return sequence, error or self._check_blocks(row)

    def _check_fork(self, sequence: OpenSequence, row: BatchRow, source: OpenSequence | None) -> str:
        if source is None:
            return f"the prompt of {row.fork_of}, which it shares, does not run in this step"
        if sequence.prompt != source.prompt or row.start != len(sequence.prompt) or sequence.outputs:
            return f"it does not begin where the prompt of {row.fork_of} ends"
        return ""

    def _check(self, sequence: OpenSequence, row: BatchRow) -> str:
        if row.start != sequence.computed:
            return f"the row starts at position {row.start}, but {sequence.computed} tokens are computed"
        known = [sequence.token_at(row.start + index) for index in range(len(row.token_ids))]
        if not row.token_ids or list(row.token_ids) != known:
            return f"the row's tokens from position {row.start} are not the sequence's"
        if not row.is_prefill and (len(row.token_ids) != 1 or sequence.live == NO_STATE):
            return "a decode row needs one token and a prefilled state"
        return ""

    def _check_blocks(self, row: BatchRow) -> str:
        needed = row.start + len(row.token_ids) + row.speculative_tokens
        if len(row.block_ids) * self._block_size < needed:
            return f"the row's {len(row.block_ids)} blocks of {self._block_size} do not cover {needed} positions"
        bad = [block for block in row.block_ids if not 0 <= block < self._block_count]
        return f"block {bad[0]} does not exist; this rank has {self._block_count}" if bad else ""
