"""Looking at a running cluster, and stopping it, from another node."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from actors.runtime.config import ConfigError
from scripts.cluster import Cluster
from scripts.observe import Visitor, find_run_dir, request_stop
from scripts.status import render, show_status, take_status
from tests.supervisor.dummies import FACTORIES, URL
from tests.supervisor.test_processes import options, private_temporary_directory

__all__ = ["private_temporary_directory"]  # used by every test here


def test_status_of_a_running_cluster_names_instances_processes_and_actors(capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster(options(topology="P1/D1"), factories=FACTORIES) as cluster:
        assert cluster.run_dir is not None
        assert find_run_dir() == cluster.run_dir.path
        assert show_status(as_json=True) == 0
        status = json.loads(capsys.readouterr().out)
        assert status["units"]["d0"]["state"] == "running"
        assert status["actors"]["d0.r0/worker"]["pid"] == status["nodes"]["d0.r0"]["pid"] == cluster.pid("d0.r0")
        with Visitor(find_run_dir()) as observer, Visitor(find_run_dir()) as another:
            assert set(take_status(observer)["actors"]) == set(take_status(another)["actors"])
            text = io.StringIO()
            Console(file=text, width=200).print(render(take_status(observer)))
    shown = text.getvalue()
    assert URL in shown and "PREFILL" in shown and "d0.r0" in shown


def test_stop_request_from_outside_drains_and_ends_the_cluster() -> None:
    cluster = Cluster(options(), factories=FACTORIES)
    cluster.start()
    path = find_run_dir()
    request_stop(path, timeout_s=0.01)
    event = cluster.events.get(timeout=30)
    assert (event.kind, event.text, event.failed) == ("ended", "kvferry stop", False)
    cluster.close()
    assert not path.exists()


def test_looking_for_a_cluster_where_none_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no kvferry cluster runs here"):
        find_run_dir()
    with pytest.raises(ConfigError, match="no kvferry runs in"):
        find_run_dir(str(tmp_path))
