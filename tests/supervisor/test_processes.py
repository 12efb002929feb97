"""The tree as real processes, with roles that do nothing: nothing is lost, and nothing is left."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from actors.runtime.config import ConfigError, NodeConfig, Options
from actors.runtime.machine import Effect
from actors.runtime.nursery import NODE_MODULE, NURSERY_MODULE
from actors.supervisor.machine import SupervisorMachine
from actors.supervisor.processes import ProcessExecutor, _Process
from actors.supervisor.run_dir import clean_dead_runs, make_run_dir
from scripts.cluster import Cluster, ClusterError
from tests.supervisor.dummies import FACTORIES, HERE, URL
from transport.shm_dataplane import run_segments

START_S = 60.0


def options(**changes: Any) -> Options:
    defaults: dict[str, Any] = {"topology": "TP1", "heartbeat_ms": 100, "restart_backoff_ms": 10.0}
    return Options(**(defaults | {"log_level": "warning"} | changes))


def node_processes(run_dir: Path, modules: tuple[str, ...] = (NODE_MODULE, NURSERY_MODULE)) -> list[int]:
    """Processes of a run, as their command lines tell."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if set(modules) & set(command) and any(word.startswith(f"{run_dir}/") for word in command):
            found.append(process.pid)
    return found


@pytest.fixture(autouse=True)
def private_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run directories of a test lie in a short directory of its own; afterwards nothing may be left in it."""
    folder = Path("/tmp") / f"kvt-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    left = list(folder.iterdir())
    assert not left, f"left behind: {left}"
    folder.rmdir()


def assert_nothing_left(run_dir: Path, run_id: str) -> None:
    assert not run_dir.exists()
    assert not run_segments(run_id)
    assert not node_processes(run_dir)


def started(cluster: Cluster) -> tuple[Path, str]:
    assert cluster.run_dir is not None
    return cluster.run_dir.path, cluster.run_dir.run_id


def test_tree_starts_says_where_it_listens_and_leaves_nothing() -> None:
    cluster = Cluster(options(topology="P2/D1"), factories=FACTORIES)
    assert cluster.start() == URL
    path, run_id = started(cluster)
    assert path.stat().st_mode & 0o777 == 0o700
    status = cluster.status()
    assert status["phase"] == "serving"
    assert set(status["nodes"]) == {"front", "p0.ctl", "p0.r0", "p0.r1", "d0.ctl", "d0.r0"}
    assert len(run_segments(run_id)) == 3
    reports = {report.address: dict(report.values)["pid"] for report in cluster.observer.reports(["p0.r1/worker"])}
    assert reports == {"p0.r1/worker": status["nodes"]["p0.r1"]["pid"]}
    pids = [node["pid"] for node in status["nodes"].values()]
    assert sorted(node_processes(path, (NODE_MODULE,))) == sorted(pids), "each one shows its own command line"
    cluster.stop()
    assert_nothing_left(path, run_id)


def test_killed_rank_brings_its_instance_back_under_a_new_incarnation() -> None:
    with Cluster(options(topology="P2/D1"), factories=FACTORIES) as cluster:
        _, run_id = started(cluster)
        before = cluster.status()
        cluster.kill("p0.r1")
        cluster.wait_for("p0", 2, START_S)
        after = cluster.status()
        assert "p0.r1 was killed by signal 9" in after["units"]["p0"]["last_failure"]
        for node in ("p0.ctl", "p0.r0", "p0.r1"):
            assert after["nodes"][node]["pid"] != before["nodes"][node]["pid"]
            assert not psutil.pid_exists(before["nodes"][node]["pid"])
        for node in ("front", "d0.ctl", "d0.r0"):
            assert after["nodes"][node]["pid"] == before["nodes"][node]["pid"]
        names = sorted(name.partition(f"{run_id}-")[2] for name in run_segments(run_id))
        assert names == ["d0.r0.1.caches", "p0.r0.2.caches", "p0.r1.2.caches"]


def test_stopped_rank_is_noticed_by_its_silence() -> None:
    with Cluster(options(hang_timeout_ms=1_500), factories=FACTORIES) as cluster:
        pid = cluster.kill("m0.r0", signal.SIGSTOP)
        cluster.wait_for("m0", 2, START_S)
        assert "m0.r0 hangs" in cluster.status()["units"]["m0"]["last_failure"]
        assert not psutil.pid_exists(pid)


def test_front_comes_back_alone_and_instances_register_with_it_again() -> None:
    with Cluster(options(), factories=FACTORIES) as cluster:
        rank = cluster.pid("m0.r0")
        cluster.kill("front")
        cluster.wait_for("front", 2, START_S)
        assert cluster.pid("m0.r0") == rank


def test_refused_configuration_ends_the_start_with_the_reason() -> None:
    cluster = Cluster(options(), factories=FACTORIES | {"rank": (f"{HERE}:build_rank_that_refuses",)})
    with pytest.raises(ClusterError, match="raise staging_mb"):
        cluster.start()
    assert_nothing_left(*started(cluster))


def test_instance_that_cannot_live_is_restarted_a_bounded_number_of_times(tmp_path: Path) -> None:
    crashing = FACTORIES | {"rank": (f"{HERE}:build_rank_that_crashes",)}
    cluster = Cluster(options(restarts_max=2, trace_dir=str(tmp_path)), factories=crashing)
    with pytest.raises(ClusterError, match=r"m0 failed 3 times .* exit code 3"):
        cluster.start()
    assert (tmp_path / "starts").read_text().split() == ["1", "2", "3"]
    assert_nothing_left(*started(cluster))


def test_supervisor_that_fails_itself_ends_the_start_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: SupervisorMachine, now_ns: int, message: object) -> list[Effect]:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(SupervisorMachine, "_on_node_ready", fail)
    cluster = Cluster(options(), factories=FACTORIES)
    with pytest.raises(ClusterError, match="the supervisor failed: root failed"):
        cluster.start()
    assert_nothing_left(*started(cluster))


SUPERVISOR_SCRIPT = """
import sys
from actors.runtime.config import Options
from scripts.cluster import Cluster
from tests.supervisor.dummies import FACTORIES
cluster = Cluster(Options(topology="TP2", log_level="error"), factories=FACTORIES)
cluster.start()
nodes = cluster.status()["nodes"].values()
print(cluster.run_dir.path, cluster.run_dir.run_id, *(node["pid"] for node in nodes), flush=True)
sys.stdin.read()
"""


def killed_supervisor(stop_node: bool) -> tuple[Path, str, list[psutil.Process]]:
    """Start a tree in another process, kill -9 that process; returns its run directory and its node processes."""
    child = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        path, run_id, *pids = child.stdout.readline().split()
        nodes = [psutil.Process(int(pid)) for pid in pids]
        if stop_node:
            nodes[0].suspend()
        child.kill()
    return Path(path), run_id, nodes


def test_killed_supervisor_takes_its_nodes_along_and_the_next_start_cleans_up() -> None:
    path, run_id, nodes = killed_supervisor(stop_node=False)
    gone, alive = psutil.wait_procs(nodes, timeout=30)
    assert len(gone) == 4 and not alive
    assert path.exists()
    with Cluster(options(), factories=FACTORIES):
        assert_nothing_left(path, run_id)


def test_node_that_hangs_when_its_supervisor_dies_is_ended_by_the_next_start() -> None:
    path, run_id, nodes = killed_supervisor(stop_node=True)
    _, alive = psutil.wait_procs(nodes[1:], timeout=30)
    assert not alive and nodes[0].is_running()
    assert clean_dead_runs() == [str(path)]
    assert not nodes[0].is_running() or nodes[0].status() == psutil.STATUS_ZOMBIE
    assert_nothing_left(path, run_id)


SERVE_SCRIPT = """
import signal
import sys
for number in (signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore them (nohup, a shell's background job)
from actors.runtime.config import Options
from scripts.serve import serve
from tests.supervisor.dummies import FACTORIES
sys.exit(serve(Options(topology="P1/D1", log_level="info"), FACTORIES))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serve_prints_one_ready_line_and_ends_cleanly_when_signalled(number: signal.Signals) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE_SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    ready = child.stdout.readline()
    assert ready == f"kvferry ready: {URL} topology P1/D1 (p0 PREFILL TP1, d0 DECODE TP1)\n"
    child.send_signal(number)
    rest, told = child.communicate(timeout=60)
    assert (child.returncode, rest) == (0, ""), told
    assert f"stopping: {number.name}" in told
    assert "p0.r0 weights 2/2" in told


# -- run directories ---------------------------------------------------------------------------------------------------


def test_living_run_is_neither_cleaned_nor_taken_over(tmp_path: Path) -> None:
    mine = make_run_dir()
    named = make_run_dir(str(Path(mine.path).parent / "named"))
    try:
        assert clean_dead_runs() == []
        assert mine.path.exists()
        with pytest.raises(ConfigError, match=rf"in use by pid {os.getpid()}.*option: run_dir"):
            make_run_dir(str(named.path))
    finally:
        mine.remove()
        named.remove()


def test_directory_with_other_files_is_not_taken_as_run_directory(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(ConfigError, match="holds other files"):
        make_run_dir(str(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_directory_too_long_for_a_socket_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for Unix sockets"):
        make_run_dir(str(tmp_path / ("x" * 100)))


def test_directory_of_a_dead_run_is_reused(tmp_path: Path) -> None:
    path = Path(os.environ["TMPDIR"]) / "named"
    path.mkdir()
    (path / "owner.json").write_bytes(msgspec.json.encode({"pid": 1, "run_id": "dead"}))
    (path / "old.sock").write_text("")
    run = make_run_dir(str(path))
    assert [entry.name for entry in path.iterdir()] == ["owner.json"]
    run.remove()


class LateSelector(selectors.DefaultSelector):
    """Tells one event more: of a descriptor that was closed after the system had reported it."""

    late: selectors.SelectorKey | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        late, self.late = self.late, None
        return ready if late is None else [(late, selectors.EVENT_READ), *ready]


def test_an_event_of_a_closed_descriptor_is_nothing_to_the_next_owner_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selectors, "DefaultSelector", LateSelector)
    heard = threading.Event()
    run_dir = make_run_dir()
    executor = ProcessExecutor(run_dir, lambda line: heard.set())
    selector = executor._selector
    assert isinstance(selector, LateSelector)
    read, write = os.pipe2(os.O_NONBLOCK)

    def process(node: str) -> _Process:
        config = NodeConfig(node=node, incarnation=1, run_id="", run_dir="", options=options(), factories=())
        return _Process(config, lambda to, message: None, lambda message: None, read)

    gone, here = process("p0.r0"), process("d0.r0")
    try:
        os.write(write, b"its own words\n")
        selector.late = selectors.SelectorKey(read, read, selectors.EVENT_READ, gone)
        selector.register(read, selectors.EVENT_READ, here)
        assert heard.wait(START_S)
    finally:
        executor.close()
        run_dir.remove()
        os.close(read)
        os.close(write)
    assert (list(gone.last_lines), list(here.last_lines)) == ([], ["its own words"])
