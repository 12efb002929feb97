"""Checks tokens without schedulers: a tiny engine over real runners, and the reference to compare with.

``LocalEngine`` holds the ranks of one TP group as threads of this process, joined by the real shared-memory
collectives, and drives them with ``ExecuteBatch`` streams from a minimal batching loop of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actors.worker.collectives import Collective, SingleRank
from actors.worker.device import Device
from actors.worker.layer_reports import LayerReadyCallback
from actors.worker.runner import ModelRunner
from actors.worker.settings import WorkerSettings, plan_rank
from actors.worker.shm_collectives import ShmCollective
from messages.batch import BatchResult, BatchRow, ExecuteBatch, RowResult, SequenceStart
from messages.requests import SamplingParams, TokenLogprobs
from scripts.make_random_checkpoint import CheckpointSizes, make_random_checkpoint

_group_numbers = iter(range(1 << 30))
TIE_GAP = 1e-3
"""Two tokens are a tie when the reference's logits for them differ by less."""

TINY = CheckpointSizes(
    hidden_size=64,
    layers=4,
    intermediate_size=96,
    vocab_size=320,
    attention_heads=4,
    kv_heads=2,
    head_dim=32,
    linear_key_heads=4,
    linear_value_heads=8,
    linear_key_dim=16,
    linear_value_dim=24,
    max_model_len=512,
)
"""Shards over 1, 2 and 4 ranks (KV heads are replicated over 4); dk ≠ dv; more value heads than key heads."""


def tiny_checkpoint(folder: Path, **options: Any) -> Path:
    """A random checkpoint whose logits are spread enough to tell tokens apart."""
    sizes = options.pop("sizes", TINY)
    return make_random_checkpoint(folder, sizes, gain=options.pop("gain", 1.5), **options)


@dataclass
class Generated:
    """What a request produced, and how."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    decode_steps: int = 0
    bootstrap: bytes = b""
    bootstrap_dtype: str = ""
    error: str = ""


@dataclass
class Request:
    """One request of a run. ``restored`` ones begin with their first token given and the caches already in place."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    start: SequenceStart | None = None
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    opened: bool = False
    done: bool = False
    name: str = ""
    outputs: list[int] = field(default_factory=list)
    result: Generated = field(default_factory=Generated)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.outputs]


class LocalEngine:
    """``tp_size`` ranks over one checkpoint; close it, or use ``with``."""

    def __init__(
        self,
        model_dir: Path,
        tp_size: int = 1,
        *,
        region_guard: int = 0,
        device: Device | None = None,
        **settings: Any,
    ) -> None:
        options: dict[str, Any] = {"block_count": 128, "slot_count": 16, "block_size": 16, "dtype": "float32"}
        options.update(settings)
        plans = [
            plan_rank(WorkerSettings(model_dir=str(model_dir), tp_size=tp_size, rank=rank, **options))
            for rank in range(tp_size)
        ]
        self.plan = plans[0]
        self.regions = [bytearray(plan.region_bytes + region_guard) for plan in plans]
        self._pool = ThreadPoolExecutor(tp_size, "rank")
        name = f"kvferry-test-{os.getpid()}-{next(_group_numbers)}"

        def build(rank: int) -> ModelRunner:
            collective: Collective = SingleRank()
            if tp_size > 1:
                collective = ShmCollective(name, rank=rank, size=tp_size, timeout_ms=20_000, join_timeout_ms=20_000)
            return ModelRunner(plans[rank], memoryview(self.regions[rank]), collective, device)

        self.runners = list(self._pool.map(build, range(tp_size)))
        self.step = 0
        self.steps: list[BatchResult] = []
        self._free_blocks = list(range(self.plan.block_count))
        self._free_slots = list(range(self.plan.settings.slot_count))
        self._names = iter(range(1 << 30))

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the ranks' threads."""
        for runner in self.runners:
            runner.close()
        self._pool.shutdown()

    def execute(
        self,
        rows: Sequence[BatchRow],
        opened: Sequence[SequenceStart] = (),
        closed: Sequence[str] = (),
        on_layer_ready: LayerReadyCallback | None = None,
    ) -> BatchResult:
        """One step on every rank; asserts that they agree and returns rank 0's result."""
        self.step += 1
        batch = ExecuteBatch(
            step=self.step, incarnation=1, rows=tuple(rows), opened=tuple(opened), closed=tuple(closed)
        )

        def run(rank: int) -> BatchResult:
            callback = on_layer_ready if rank == 0 else None
            return self.runners[rank].execute(batch, callback)

        results = list(self._pool.map(run, range(len(self.runners))))
        for other in results[1:]:
            assert other.rows == results[0].rows, "ranks disagree"
        self.steps.append(results[0])
        return results[0]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        chunk_tokens: int = 0,
        batch_rows: int = 64,
        arrivals: Sequence[int] = (),
    ) -> list[Generated]:
        """Run all prompts to their ends, continuously batched; ``arrivals[i]`` is the step at which prompt i joins."""
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        requests = [
            Request(prompt=tuple(prompt), sampling=params) for prompt, params in zip(prompts, samplings, strict=True)
        ]
        self.run(requests, chunk_tokens=chunk_tokens, batch_rows=batch_rows, arrivals=arrivals)
        return [request.result for request in requests]

    def run(
        self,
        requests: Sequence[Request],
        *,
        chunk_tokens: int = 0,
        batch_rows: int = 64,
        arrivals: Sequence[int] = (),
    ) -> None:
        """The batching loop: every live request gets a row per step while slots last."""
        closed: list[str] = []
        first_step = self.step
        while not all(request.done for request in requests):
            rows, opened = [], []
            live: list[Request] = []
            for index, request in enumerate(requests):
                late = bool(arrivals) and self.step - first_step < arrivals[index]
                if request.done or late or len(rows) >= batch_rows or not self._admit(request):
                    continue
                if not request.opened:
                    request.opened = True
                    opened.append(request.start or self._start(request))
                rows.append(self._row(request, chunk_tokens))
                live.append(request)
            result = self.execute(rows, opened, closed)
            closed = []
            for request, row, outcome in zip(live, rows, result.rows, strict=True):
                self._absorb(request, row, outcome)
                if request.done:
                    closed.append(request.name)
                    self.release(request)
        if closed:
            self.execute((), closed=closed)

    def reserve(self, request: Request) -> None:
        """Blocks for the whole request and a slot, before it runs (as a hand-off's target does)."""
        assert self._admit(request)

    def release(self, request: Request) -> None:
        """Give blocks and slot back, the last first, so that the next owner gets used ones."""
        self._free_blocks[:0] = request.blocks
        self._free_slots.insert(0, request.slot)
        request.blocks, request.slot = [], -1

    def _admit(self, request: Request) -> bool:
        if request.slot >= 0:
            return True
        speculative = self.plan.settings.speculative_tokens
        total = len(request.prompt) + request.sampling.max_tokens + speculative
        count = -(-total // self.plan.settings.block_size)
        if not self._free_slots or len(self._free_blocks) < count:
            return False
        # Taken from alternating ends, so that a table is never one ascending run.
        request.blocks = [self._free_blocks.pop(0 if index % 2 else -1) for index in range(count)]
        request.slot = self._free_slots.pop(0)
        request.name = request.name or f"request-{next(self._names)}"
        return True

    def _start(self, request: Request) -> SequenceStart:
        return SequenceStart(
            request_id=request.name,
            epoch=0,
            slot=request.slot,
            sampling=request.sampling,
            prompt_token_ids=request.prompt,
            output_token_ids=tuple(request.outputs),
        )

    def _row(self, request: Request, chunk_tokens: int) -> BatchRow:
        tokens = request.tokens
        is_decode = request.computed == len(tokens) - 1 and bool(request.outputs)
        end = len(tokens)
        if not is_decode and chunk_tokens:
            end = min(end, request.computed + chunk_tokens)
        left = request.sampling.max_tokens - len(request.outputs)
        return BatchRow(
            request_id=request.name,
            epoch=0,
            token_ids=tuple(tokens[request.computed : end]),
            start=request.computed,
            block_ids=tuple(request.blocks),
            samples=end == len(tokens),
            is_prefill=not is_decode,
            speculative_tokens=min(self.plan.settings.speculative_tokens, left - 1) if is_decode else 0,
        )

    def _absorb(self, request: Request, row: BatchRow, outcome: RowResult) -> None:
        result = request.result
        if outcome.error:
            result.error, request.done = outcome.error, True
            return
        request.computed = row.start + len(row.token_ids)
        if not row.is_prefill:
            request.computed = row.start + len(outcome.token_ids)
            result.decode_steps += 1
        request.outputs += outcome.token_ids
        result.token_ids += outcome.token_ids
        result.logprobs += outcome.logprobs
        result.prompt_logprobs += outcome.prompt_logprobs
        result.drafted += outcome.drafted
        result.accepted += outcome.accepted
        if outcome.bootstrap_hidden:
            result.bootstrap, result.bootstrap_dtype = outcome.bootstrap_hidden, outcome.bootstrap_dtype
        sampling = request.sampling
        ends = () if sampling.ignore_eos else sampling.eos_token_ids
        ended = bool(request.outputs) and request.outputs[-1] in (*ends, *sampling.stop_token_ids)
        request.done = ended or len(request.outputs) >= sampling.max_tokens


class Reference:
    """``transformers``' own model of a checkpoint, greedy, one sequence at a time."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import Qwen3_5ForCausalLM

        self.model = Qwen3_5ForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, V] logits of the whole sequence, without a cache."""
        logits: torch.Tensor = self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits

    def assert_greedy(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Every token must be the reference's best after what came before it, or tie with it (the tie rule)."""
        logits = self.logits([*prompt, *tokens])
        for index, token in enumerate(tokens):
            row = logits[len(prompt) - 1 + index]
            gap = float(row.max() - row[token])
            assert gap < TIE_GAP, f"token {index} is {token}, the reference prefers {int(row.argmax())} by {gap:.4f}"


def prompts_of(lengths: Sequence[int], vocab_size: int = TINY.vocab_size, seed: int = 7) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, so that tests side by side do not fight for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_ranks(size: int, function: Callable[[int], Any], timeout_s: float = 30.0) -> list[Any]:
    """``function(rank)`` on one thread per rank; results in rank order, exceptions as values."""
    results: list[Any] = [None] * size

    def call(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as error:  # the caller looks at it
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank is stuck"
    return results
