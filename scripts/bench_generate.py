"""Prefill and decode rates of this system next to ``transformers``, in the same run, on the same threads.

Both sides compute the same prompts in turns, so that a busy machine slows both; ratios are medians over the turns.
Figures: prompt tokens per second of one prefill, generated tokens per second of one sequence alone and of several at
once (after their prefill). Our side is a whole cluster, measured by its HTTP client, or, to see what actors and HTTP
cost, the model runner alone inside this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch

from actors.gateway.parameters import WHOLE_INTERVAL
from actors.runtime.config import ConfigError, Options
from actors.worker.collectives import SingleRank
from actors.worker.runner import ModelRunner
from actors.worker.settings import WorkerSettings, plan_rank
from messages.batch import BatchRow, ExecuteBatch, RowResult, SequenceStart
from messages.requests import SamplingParams
from scripts.models import resolve_model
from scripts.rates import Measure, Rates
from scripts.served_rates import ServedRates

BLOCK_SIZE = 16


def run(
    model: str,
    topology: str = "TP1",
    against: str = "transformers",
    *,
    prompt_tokens: int = 512,
    output_tokens: int = 64,
    sequences: int = 8,
    threads: int = 2,
    repeats: int = 5,
    dtype: str = "float32",
    speculative_tokens: int = 0,
    seed: int = 0,
    in_process: bool = False,
    stream_interval: int = WHOLE_INTERVAL,
) -> dict[str, Any]:
    """Measure and compare. ``prefill_ratio``, ``decode_alone_ratio`` and ``decode_batch_ratio`` are ours / theirs.

    ``against`` "none" measures this system only; ``in_process`` the model runner without a cluster (TP1 only).
    ``threads`` is for all of a topology's ranks together, as it is for transformers. ``stream_interval`` is how many
    tokens come to the client together; transformers gives all of them at the end.
    """
    if in_process and topology.upper() != "TP1":
        raise ConfigError(f"topology {topology!r} cannot be measured inside one process; allowed: 'TP1'")
    if against not in ("none", "transformers"):
        raise ConfigError(f"against {against!r} is not known; allowed: 'transformers', 'none'")
    torch.set_num_threads(threads)
    model_dir = str(resolve_model(model))
    length = prompt_tokens + output_tokens
    with ExitStack() as stack:
        if in_process:
            ours = measure_ours(model_dir, sequences, length, dtype=dtype, speculative_tokens=speculative_tokens)
        else:
            options = _served_options(model_dir, topology, sequences, prompt_tokens, output_tokens, threads)
            changes = {
                "dtype": dtype,
                "num_speculative_tokens": speculative_tokens,
                "stream_interval": stream_interval,
            }
            ours = stack.enter_context(ServedRates(msgspec.structs.replace(options, **changes))).measure
        theirs = measure_transformers(model_dir, dtype) if against == "transformers" else None
        generator = torch.Generator().manual_seed(seed)
        vocab = plan_rank(WorkerSettings(model_dir=model_dir, block_count=1, slot_count=1)).config.vocab_size
        prompts = torch.randint(0, vocab, (sequences, prompt_tokens), generator=generator).tolist()
        turns: list[dict[str, Rates]] = []
        for turn in range(repeats + 1):
            rates = {"alone": ours(prompts[:1], output_tokens), "batch": ours(prompts, output_tokens)}
            if theirs is not None:
                rates["their_alone"] = theirs(prompts[:1], output_tokens)
                rates["their_batch"] = theirs(prompts, output_tokens)
            if turn:  # the first turn warms both sides up
                turns.append(rates)
    return _report(
        turns,
        {
            "model": model,
            "topology": topology,
            "in_process": in_process,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "sequences": sequences,
            "threads": threads,
            "dtype": dtype,
            "speculative_tokens": speculative_tokens,
            "stream_interval": stream_interval,
            "repeats": repeats,
        },
    )


def _served_options(
    model_dir: str, topology: str, sequences: int, prompt_tokens: int, output_tokens: int, threads: int
) -> Options:
    """A cluster that prefills all prompts of a turn in one step, as transformers does."""
    length = prompt_tokens + output_tokens + 16
    return Options(
        model=model_dir,
        topology=topology,
        port=0,
        threads_per_rank=threads if topology.upper() == "TP1" else 0,  # several ranks share the cores evenly
        block_size=BLOCK_SIZE,
        block_count=sequences * (-(-length // BLOCK_SIZE) + 1),
        max_model_len=length,
        max_seqs_per_batch=sequences,
        max_tokens_per_batch=sequences * prompt_tokens,
        max_tokens_per_chunk_for_prefill=prompt_tokens,
        log_level="error",
    )


def measure_ours(
    model_dir: str, sequences: int, length: int, *, dtype: str = "float32", speculative_tokens: int = 0
) -> Measure:
    """This system's rank runner, TP1, in this process; ``length`` tokens at most per sequence."""
    per_sequence = -(-(length + speculative_tokens + 1) // BLOCK_SIZE)
    plan = plan_rank(
        WorkerSettings(
            model_dir=model_dir,
            dtype=dtype,
            block_size=BLOCK_SIZE,
            block_count=per_sequence * sequences,
            slot_count=sequences,
            speculative_tokens=speculative_tokens,
        )
    )
    runner = ModelRunner(plan, memoryview(bytearray(plan.region_bytes)), SingleRank())
    return _RunnerLoop(runner, per_sequence, speculative_tokens).measure


class _RunnerLoop:
    """Drives a runner as a scheduler would: one prefill step per prompt, then decode steps over all sequences."""

    def __init__(self, runner: ModelRunner, blocks_per_sequence: int, speculative_tokens: int) -> None:
        self._runner = runner
        self._blocks = blocks_per_sequence
        self._speculative = speculative_tokens
        self._step = 0

    def measure(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Rates:
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        outputs: list[list[int]] = []
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            start = SequenceStart(
                request_id=str(index), epoch=0, slot=index, sampling=sampling, prompt_token_ids=tuple(prompt)
            )
            row = self._row(index, prompt, 0, is_prefill=True)
            outputs.append(list(self._execute([row], [start])[0].token_ids))
        prefilled = time.perf_counter()
        steps = rows_run = 0
        while live := [index for index, tokens in enumerate(outputs) if len(tokens) < output_tokens]:
            rows = []
            for index in live:
                place = len(prompts[index]) + len(outputs[index]) - 1
                drafts = min(self._speculative, output_tokens - len(outputs[index]) - 1)
                rows.append(self._row(index, outputs[index][-1:], place, drafts=drafts))
            for index, result in zip(live, self._execute(rows), strict=True):
                outputs[index] += result.token_ids
            steps += 1
            rows_run += len(rows)
        ended = time.perf_counter()
        self._execute((), closed=[str(index) for index in range(len(prompts))])
        decoded = sum(len(tokens) - 1 for tokens in outputs)
        return Rates(
            prefill=sum(len(prompt) for prompt in prompts) / (prefilled - started),
            decode=decoded / (ended - prefilled),
            tokens=tuple(tuple(tokens) for tokens in outputs),
            accepted_per_step=decoded / max(1, rows_run),
        )

    def _row(
        self, index: int, tokens: Sequence[int], start: int, *, is_prefill: bool = False, drafts: int = 0
    ) -> BatchRow:
        return BatchRow(
            request_id=str(index),
            epoch=0,
            token_ids=tuple(tokens),
            start=start,
            block_ids=tuple(range(index * self._blocks, (index + 1) * self._blocks)),
            samples=True,
            is_prefill=is_prefill,
            speculative_tokens=drafts,
        )

    def _execute(
        self, rows: Sequence[BatchRow], opened: Sequence[SequenceStart] = (), closed: Sequence[str] = ()
    ) -> tuple[RowResult, ...]:
        self._step += 1
        batch = ExecuteBatch(
            step=self._step, incarnation=1, rows=tuple(rows), opened=tuple(opened), closed=tuple(closed)
        )
        results = self._runner.execute(batch).rows
        for result in results:
            if result.error:
                raise RuntimeError(result.error)
        return results


def measure_transformers(model_dir: str, dtype: str = "float32") -> Measure:
    """``transformers``' model with its own cache, called as cheaply as it allows: one forward per step, no sampling."""
    try:
        from transformers import DynamicCache, Qwen3_5ForCausalLM
    except ImportError as error:
        text = "transformers is not installed: pip install 'kvferry[test]', or measure --against none"
        raise ConfigError(text) from error

    model = Qwen3_5ForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()

    def measure(prompts: Sequence[Sequence[int]], output_tokens: int) -> Rates:
        with torch.inference_mode():
            tokens = torch.tensor([list(prompt) for prompt in prompts])
            cache = DynamicCache(config=model.config)
            started = time.perf_counter()
            logits = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
            latest = logits[:, -1].argmax(-1, keepdim=True)
            generated = [latest]
            prefilled = time.perf_counter()
            for _ in range(output_tokens - 1):
                logits = model(input_ids=latest, cache=cache, use_cache=True, logits_to_keep=1).logits
                latest = logits[:, -1].argmax(-1, keepdim=True)
                generated.append(latest)
            ended = time.perf_counter()
        return Rates(
            prefill=tokens.numel() / (prefilled - started),
            decode=len(prompts) * (output_tokens - 1) / (ended - prefilled),
            tokens=tuple(tuple(row) for row in torch.cat(generated, 1).tolist()),
        )

    return measure


def _report(turns: Sequence[dict[str, Rates]], about: dict[str, Any]) -> dict[str, Any]:
    def median(read: Callable[[dict[str, Rates]], float]) -> float:
        return round(statistics.median(read(turn) for turn in turns), 3)

    report = dict(about)
    report["prefill_tokens_per_s"] = median(lambda turn: turn["alone"].prefill)
    report["prefill_batch_tokens_per_s"] = median(lambda turn: turn["batch"].prefill)
    report["decode_alone_tokens_per_s"] = median(lambda turn: turn["alone"].decode)
    report["decode_batch_tokens_per_s"] = median(lambda turn: turn["batch"].decode)
    report["accepted_per_step"] = median(lambda turn: turn["batch"].accepted_per_step)
    if "their_alone" not in turns[0]:
        return report
    report["their_prefill_tokens_per_s"] = median(lambda turn: turn["their_alone"].prefill)
    report["their_prefill_batch_tokens_per_s"] = median(lambda turn: turn["their_batch"].prefill)
    report["their_decode_alone_tokens_per_s"] = median(lambda turn: turn["their_alone"].decode)
    report["their_decode_batch_tokens_per_s"] = median(lambda turn: turn["their_batch"].decode)
    report["prefill_ratio"] = median(lambda turn: turn["alone"].prefill / turn["their_alone"].prefill)
    report["decode_alone_ratio"] = median(lambda turn: turn["alone"].decode / turn["their_alone"].decode)
    report["decode_batch_ratio"] = median(lambda turn: turn["batch"].decode / turn["their_batch"].decode)
    report["equal_sequences"] = sum(
        ours == theirs for ours, theirs in zip(turns[-1]["batch"].tokens, turns[-1]["their_batch"].tokens, strict=True)
    )
    return report
