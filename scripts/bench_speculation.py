"""What speculation is worth on one model: decode rates at several draft depths, and what one verify pass costs.

In this process, through the model runner of one rank. Depth 0 runs next to every other depth, turn by turn, so that a
busy machine slows both; figures are medians over the turns, and ratios are taken within a turn.

A verify pass of depth S computes S + 1 positions per sequence, after S passes of the draft body. ``verify_cost`` is
the time of such a step over the time of a plain decode step of the same sequences; ``break_even`` therefore is the
mean accepted length at which speculation begins to pay, ``verify_cost`` itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from actors.runtime.config import ConfigError
from actors.worker.model.config import load_config
from scripts.bench_generate import measure_ours
from scripts.models import resolve_model
from scripts.rates import Measure, Rates


def run(
    model: str,
    *,
    depths: Sequence[int] = (0, 1, 3, 5),
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    sequences: int = 8,
    threads: int = 2,
    repeats: int = 3,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Measure every depth alone and with ``sequences`` at once. Raises ``ConfigError`` for what cannot run.

    Per depth and kind: ``tokens_per_s``, ``speedup`` over depth 0, ``accepted_length`` (tokens per step and sequence),
    ``step_ms``, and ``verify_cost``.
    """
    folder = str(resolve_model(model))
    config = load_config(folder)
    if any(depths) and not config.draft_layers:
        raise ConfigError(f"{folder} has no MTP weights (mtp.*), so there is nothing to measure but depth 0")
    torch.set_num_threads(threads)
    length = prompt_tokens + output_tokens
    loops = {
        depth: measure_ours(folder, sequences, length, dtype=dtype, speculative_tokens=depth)
        for depth in dict.fromkeys((0, *depths))
    }
    prompts = _prompts(folder, config.vocab_size, sequences, prompt_tokens)
    report: dict[str, Any] = {
        "model": folder,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "threads": threads,
        "dtype": dtype,
    }
    for count in dict.fromkeys((1, sequences)):
        turns = [_turn(loops, prompts[:count], output_tokens) for _ in range(repeats + 1)][1:]  # the first warms up
        for depth in loops:
            report[f"depth {depth}, {count} at once"] = _figures(turns, depth, count)
    return report


def _turn(loops: dict[int, Measure], prompts: list[list[int]], output_tokens: int) -> dict[int, Rates]:
    return {depth: measure(prompts, output_tokens) for depth, measure in loops.items()}


def _figures(turns: Sequence[dict[int, Rates]], depth: int, count: int) -> dict[str, float]:
    def median(figure: Callable[[dict[int, Rates]], float]) -> float:
        return round(statistics.median(figure(turn) for turn in turns), 3)

    def step_ms(rates: Rates) -> float:
        return 1000.0 * rates.accepted_per_step * count / rates.decode

    return {
        "tokens_per_s": median(lambda turn: turn[depth].decode),
        "speedup": median(lambda turn: turn[depth].decode / turn[0].decode),
        "accepted_length": median(lambda turn: turn[depth].accepted_per_step),
        "step_ms": median(lambda turn: step_ms(turn[depth])),
        "verify_cost": median(lambda turn: step_ms(turn[depth]) / step_ms(turn[0])),
    }


def _prompts(folder: str, vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Prompts that the model's tokenizer makes of Python sources; random tokens if that gives too few."""
    from tokenizers import Tokenizer

    from scripts.demo_prompts import perplexity_text

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokens = [token for token in tokenizer.encode(perplexity_text(8 * count * length)).ids if token < vocab_size]
    if len(tokens) >= count * length:
        return [tokens[index * length : (index + 1) * length] for index in range(count)]
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(0, vocab_size, (count, length), generator=generator).tolist()
    return prompts
