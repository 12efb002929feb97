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


def cost(base: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """By how many percent ``other`` exceeds ``base``, turn by turn: median, quartiles, and the interval in which the
    true median lies with 95 % confidence. Both have one value per turn, more is worse."""
    ordered = sorted(100 * (b / a - 1) for a, b in zip(base, other, strict=True))
    low, high = median_interval(ordered)
    return {
        "median": round(statistics.median(ordered), 2),
        "quartiles": [round(ordered[len(ordered) * part // 4], 2) for part in (1, 3)],
        "median_95_percent": [round(low, 2), round(high, 2)],
    }


def statement(name: str, percent: dict[str, Any], limit: float) -> str:
    """What ``percent`` (see ``cost``) says about a limit, in words."""
    low, high = percent["median_95_percent"]
    if high < limit:
        verdict = f"below {limit:g} %"
    elif low > limit:
        verdict = f"above {limit:g} %"
    else:
        verdict = f"these turns cannot tell whether it is below {limit:g} %"
    return f"{name} costs between {low:g} and {high:g} % (95 % confidence): {verdict}"
