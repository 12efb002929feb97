"""As many seeds as the time allows: every invariant holds in each. ``KVFERRY_SIMULATE_SECONDS`` is that time (20).

``.ci/run`` gives it two minutes, or 2,000 seeds, whichever is less.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from actors.runtime.config import ConfigError
from scripts.main import main
from scripts.simulate import replay_command, simulate
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


def test_a_violation_is_reported_with_its_replay_and_a_trace_and_ends_the_command_with_1(tmp_path: Path) -> None:
    arguments = ["--seeds", "50", "--requests", str(REQUESTS), "--topology", "P2/D1", "--trace-dir", str(tmp_path)]
    with planted("decoded before restored"):
        result = CliRunner().invoke(main, ["simulate", *arguments])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[-1].startswith("violation in seed ")
    assert "I6" in lines[-1] or "I2" in lines[-1]
    seed = lines[-1].split()[3].rstrip(":")
    assert f"again: kvferry simulate --seed {seed} --requests {REQUESTS} --faults all --topology P2/D1" in lines
    assert "did not finish" in stuck_text(tmp_path)


def test_a_clean_campaign_ends_the_command_with_0() -> None:
    result = CliRunner().invoke(main, ["simulate", "--seeds", "2", "--requests", "2"])
    assert (result.exit_code, result.output.split(",")[0]) == (0, "2 runs")


def test_an_unknown_kind_of_fault_is_refused_with_the_kinds_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'fire' is unknown; allowed: all, none, loss"):
        simulate(range(1), 1, "crash,fire")
