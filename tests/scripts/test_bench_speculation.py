"""``kvferry bench speculation`` runs on any checkpoint with a draft head, and refuses one without."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from actors.runtime.config import ConfigError
from scripts.bench_speculation import run
from scripts.main import main
from tests.worker.harness import one_thread, tiny_checkpoint


def test_every_depth_is_measured_alone_and_together(tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    with one_thread():
        report = run(model, depths=(2,), prompt_tokens=8, output_tokens=6, sequences=2, threads=1, repeats=1)
    for name in ("depth 0, 1 at once", "depth 0, 2 at once", "depth 2, 1 at once", "depth 2, 2 at once"):
        assert report[name]["tokens_per_s"] > 0
        assert 1.0 <= report[name]["accepted_length"] <= 3.0
    plain = report["depth 0, 1 at once"]
    assert (plain["speedup"], plain["accepted_length"], plain["verify_cost"]) == (1.0, 1.0, 1.0)


def test_a_checkpoint_without_draft_head_is_refused(tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "plain", with_draft=False))
    with pytest.raises(ConfigError, match="no MTP weights"):
        run(model, depths=(1,))


def test_depths_that_are_no_numbers_are_refused_by_name() -> None:
    result = CliRunner().invoke(main, ["bench", "speculation", "--depths", "0,x"])
    assert result.exit_code == 2
    assert "--depths" in result.output
