"""What one way of running costs against another, from paired turns, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def median_interval(ordered: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the ``ordered`` values between which the true median lies with at least ``confidence``.

    From the ranks alone: each value is below the true median with probability one half, whatever the noise looks like.
    Below 6 values no pair is that sure; then it is the smallest and the largest.
    """
    count = len(ordered)
    rank, tail = 0, 0.5**count
    while 2 * (tail + math.comb(count, rank + 1) * 0.5**count) <= 1 - confidence:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    return ordered[rank], ordered[count - 1 - rank]


def cost(base: Sequence[float], other: Sequence[float], rounds: int = 1) -> dict[str, Any]:
    """By how many percent ``other`` exceeds ``base``, turn by turn: median, quartiles, the interval in which the true
    median lies with 95 % confidence, and the median of each round. Both have one value per turn, more is worse.

    Turns of one round share the luck of its processes (where their memory lies, for one), which no number of turns
    averages out; how far rounds differ shows how much that is.
    """
    costs = [100 * (b / a - 1) for a, b in zip(base, other, strict=True)]
    size = len(costs) // rounds
    ordered = sorted(costs)
    low, high = median_interval(ordered)
    return {
        "median": round(statistics.median(ordered), 2),
        "quartiles": [round(ordered[len(ordered) * part // 4], 2) for part in (1, 3)],
        "median_95_percent": [round(low, 2), round(high, 2)],
        "rounds": [round(statistics.median(costs[at * size : (at + 1) * size]), 2) for at in range(rounds)],
    }


def statement(name: str, percent: dict[str, Any], limit: float) -> str:
    """What ``percent`` (see ``cost``) says about a limit, in words: by its interval, widened by what rounds say."""
    bounds = [*percent["median_95_percent"], *percent["rounds"]]
    low, high = min(bounds), max(bounds)
    if high < limit:
        verdict = f"below {limit:g} %"
    elif low > limit:
        verdict = f"above {limit:g} %"
    else:
        verdict = f"these turns cannot tell whether it is below {limit:g} %"
    return f"{name} costs between {low:g} and {high:g} % (95 % confidence, and in every round): {verdict}"
