"""The tie rule: two greedy token sequences are equal if their first difference is a near-tie in the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actors.runtime.config import Options
from actors.worker.model.config import load_config, resolve_dtype
from scripts.models import resolve_model

TIE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.125}
"""Compute dtype → largest gap between the reference's two best log-probabilities that counts as a tie, since sums in
another order round otherwise. Logits between 8 and 16 are 1/16 apart in bfloat16, and either may be one step off."""


class Difference(NamedTuple):
    """Where two sequences part: the position, both tokens (-1: ended), and the reference's top-two gap there."""

    position: int
    reference_token: int
    token: int
    reference_gap: float


def tie_tolerance(options: Options) -> float:
    """The tolerance for outputs of clusters with these options. Raises ``ConfigError`` for a model that is none."""
    config = load_config(resolve_model(options.model))
    return TIE_TOLERANCES[resolve_dtype(options.dtype, config, options.device)]


def first_difference(reference: Sequence[int], tokens: Sequence[int], gaps: Sequence[float]) -> Difference | None:
    """The first position where ``tokens`` leaves ``reference``; ``gaps[i]`` is the reference's top-two gap at ``i``.

    None if they are equal. A sequence that merely ends early differs there with token -1.
    """
    for position in range(max(len(reference), len(tokens))):
        ours = tokens[position] if position < len(tokens) else -1
        theirs = reference[position] if position < len(reference) else -1
        if ours != theirs:
            gap = gaps[position] if position < len(gaps) else float("inf")
            return Difference(position, theirs, ours, gap)
    return None


def equal_by_tie_rule(
    reference: Sequence[int], tokens: Sequence[int], gaps: Sequence[float], tolerance: float = TIE_TOLERANCES["float32"]
) -> bool:
    """Whether the sequences are equal, or first differ where the reference's top-two gap is below ``tolerance``."""
    difference = first_difference(reference, tokens, gaps)
    return difference is None or difference.reference_gap < tolerance
