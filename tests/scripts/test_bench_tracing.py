"""What ``kvferry bench tracing`` derives its figures from: turns in pairs, CPU clocks, a record's cost."""

from __future__ import annotations

import os
import time
from random import Random

import pytest

from scripts.bench_tracing import measure_record_ns, process_cpu_ns
from scripts.paired import cost, median_interval, statement


def test_the_interval_of_a_median_is_the_one_of_the_tables() -> None:
    """Ranks 7 and 18 of 24, 10 and 21 of 30 (two-sided sign test at 5 %), the extremes of few."""
    assert median_interval(range(1, 25)) == (7, 18)
    assert median_interval(range(1, 31)) == (10, 21)
    assert median_interval(range(1, 7)) == (1, 6)
    assert median_interval([3.0]) == (3.0, 3.0)


@pytest.mark.parametrize("count", [6, 15, 30])
def test_the_interval_holds_the_true_median_as_often_as_it_says(count: int) -> None:
    """Noise that is skewed and now and then enormous, as that of a busy machine is."""
    random = Random(5)
    held = 0
    for _ in range(2000):
        noise = [random.expovariate(1.0) * (100 if random.random() < 0.05 else 1) for _ in range(count)]
        low, high = median_interval(sorted(noise))
        held += low <= 0.7466 <= high  # the median of that mixture
    assert held / 2000 >= 0.94


def test_a_cost_is_found_in_noise_that_both_sides_of_a_turn_share() -> None:
    random = Random(7)
    busy = [random.uniform(1.0, 4.0) for _ in range(30)]
    base = [10 * load for load in busy]
    other = [10.4 * load * random.uniform(0.99, 1.01) for load in busy]
    found = cost(base, other, rounds=3)
    low, high = found["median_95_percent"]
    assert 3.0 < low <= found["median"] <= high < 5.0
    assert low <= found["quartiles"][1] and found["quartiles"][0] <= high
    assert statement("it", found, 3.0).endswith("above 3 %")
    assert statement("it", found, 6.0).endswith("below 6 %")
    assert "cannot tell" in statement("it", found, 4.0)
    assert all(3.0 < median < 5.0 for median in found["rounds"]) and len(found["rounds"]) == 3


def test_a_round_that_differs_from_the_others_makes_the_statement_careful() -> None:
    """Its processes may have been lucky: turns that agree among themselves are no proof."""
    found = cost([10.0] * 30, [10.1] * 24 + [10.5] * 6, rounds=5)
    assert found["median_95_percent"] == [1.0, 1.0]
    assert found["rounds"] == [1.0, 1.0, 1.0, 1.0, 5.0]
    assert "cannot tell" in statement("it", found, 3.0)


def test_cpu_time_of_a_process_is_the_kernels_own() -> None:
    before = time.process_time_ns()
    seen = process_cpu_ns([os.getpid()])
    assert before <= seen <= time.process_time_ns()
    assert process_cpu_ns([os.getpid(), os.getpid()]) >= 2 * seen
    with pytest.raises(OSError):
        process_cpu_ns([2**22 + 1])


def test_a_record_costs_something_and_not_much() -> None:
    assert 0 < measure_record_ns(repeats=9, count=2000) < 100_000
