"""What every generation benchmark measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Tokens per second. ``tokens`` are what the sequences generated, for comparison."""

    prefill: float
    decode: float
    tokens: tuple[tuple[int, ...], ...]
    accepted_per_step: float = 1.0


Measure = Callable[[Sequence[Sequence[int]], int], Rates]
"""``measure(prompts, output_tokens)``."""
