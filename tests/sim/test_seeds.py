"""As many seeds as the time allows: every invariant holds in each. ``KVFERRY_SIMULATE_SECONDS`` is that time (20).

``.ci/run`` gives it two minutes, or 2,000 seeds, whichever is less.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.runtime.config import ConfigError
from scripts.simulate import replay_command, report, simulate
from scripts.trace_commands import stuck_text
from tests.sim.mutations import planted

SEEDS_MAX = 2000
REQUESTS = 12


def test_no_seed_breaks_an_invariant() -> None:
    seconds = float(os.environ.get("KVFERRY_SIMULATE_SECONDS", "20"))
    summary = simulate(range(SEEDS_MAX), REQUESTS, "all", time_limit_s=seconds)
    failure = next((outcome for outcome in summary.failures), None)
    if failure is not None:
        pytest.fail(f"{replay_command(failure.seed, REQUESTS, 'all')}\n{failure.violation}")
    print(f"{summary.runs} seeds, {summary.requests_per_s:.0f} requests/s, {dict(summary.states)}")
    assert summary.states["finished"] > summary.requests / 2


def test_a_violation_is_reported_with_its_replay_and_a_trace(tmp_path: Path) -> None:
    with planted("decoded before restored"):
        lines = list(report(0, 50, REQUESTS, "all", topology="P2/D1", trace_dir=tmp_path, time_limit_s=60.0))
    assert lines[-1].startswith("violation in seed ")
    assert "I6" in lines[-1] or "I2" in lines[-1]
    seed = lines[-1].split()[3].rstrip(":")
    assert f"again: kvferry simulate --seed {seed} --requests {REQUESTS} --faults all --topology P2/D1" in lines
    assert "did not finish" in stuck_text(tmp_path)


def test_an_unknown_kind_of_fault_is_refused_with_the_kinds_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'fire' is unknown; allowed: all, none, loss"):
        simulate(range(1), 1, "crash,fire")
