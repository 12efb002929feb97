"""The simulation finds planted bugs, each within 500 seeds; and finds nothing when nothing is planted."""

from __future__ import annotations

import pytest

from actors.transfer import plan, ranges
from scripts.simulate import parse_faults, run_seed
from tests.sim.mutations import MUTATIONS, planted

SEEDS_MAX = 500
FAULTS = parse_faults("all")


def first_violation(seeds: range) -> tuple[int, str]:
    """(seed, violation) of the first run that breaks an invariant; ("" when none does)."""
    for seed in seeds:
        outcome = run_seed(seed, 15, FAULTS)
        if outcome.violation:
            return seed, outcome.violation
    return -1, ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name):
        seed, violation = first_violation(range(SEEDS_MAX))
    assert violation, f"{name!r} was not noticed in {SEEDS_MAX} seeds"
    print(f"{name}: seed {seed}: {violation[:160]}")


def test_what_was_planted_is_gone_afterwards_and_so_is_what_was_made_with_it() -> None:
    with planted("conv concatenated without regrouping"):
        assert first_violation(range(1, 2))[1]
    assert plan._plan.cache_info().currsize == ranges._groups.cache_info().currsize == 0
    assert first_violation(range(3)) == (-1, "")
