"""Ranks are forked by a process that has loaded what they need; whatever happens to that process, the tree recovers."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from actors.runtime.nursery import NURSERY_MODULE, PACKET_BYTES_MAX, Born, NotBorn, Nursery
from actors.supervisor import nurseries
from scripts.cluster import Cluster, ClusterError
from tests.supervisor.dummies import FACTORIES, HERE
from tests.supervisor.test_processes import (
    START_S,
    assert_nothing_left,
    node_processes,
    options,
    private_temporary_directory,
    started,
)

__all__ = ["private_temporary_directory"]  # a fixture of these tests, too

FRAGILE = "tests.supervisor.fragile"


def nursery_of(cluster: Cluster) -> psutil.Process:
    path, _ = started(cluster)
    (pid,) = node_processes(path, (NURSERY_MODULE,))
    return psutil.Process(pid)


def values_of(cluster: Cluster, address: str) -> dict[str, Any]:
    return dict(cluster.observer.report(address).values)


def test_ranks_of_every_life_start_from_what_was_loaded_once() -> None:
    with Cluster(options(topology="P2/D1"), factories=FACTORIES) as cluster:
        nursery = nursery_of(cluster).pid
        cluster.kill("p0.r1")
        cluster.wait_for("p0", 2, START_S)
        ranks = [values_of(cluster, f"{node}/worker") for node in ("p0.r0", "p0.r1", "d0.r0")]
        assert {values["loaded_in"] for values in ranks} == {nursery}
        assert len({values["pid"] for values in ranks} | {nursery}) == 4
        control = values_of(cluster, "p0.ctl/engine")
        assert control["loaded_in"] == control["pid"], "a control node loads for itself"


def test_the_end_of_a_rank_is_told_as_it_was() -> None:
    with Cluster(options(), factories=FACTORIES) as cluster:
        cluster.kill("m0.r0", signal.SIGSEGV)
        cluster.wait_for("m0", 2, START_S)
        assert "m0.r0 was killed by signal 11" in cluster.status()["units"]["m0"]["last_failure"]


def test_a_killed_nursery_takes_its_ranks_along_and_another_one_brings_them_back() -> None:
    with Cluster(options(topology="P1/D1"), factories=FACTORIES) as cluster:
        nursery, before = nursery_of(cluster), cluster.status()["nodes"]
        nursery.kill()
        for unit in ("p0", "d0"):
            cluster.wait_for(unit, 2, START_S)
        after = cluster.status()["nodes"]
        assert after["front"]["pid"] == before["front"]["pid"]
        path, _ = started(cluster)
        assert not {before["p0.r0"]["pid"], before["d0.r0"]["pid"]} & set(node_processes(path))
        assert nursery_of(cluster).pid != nursery.pid


def test_a_nursery_that_dies_before_it_forks_is_replaced(private_temporary_directory: Path) -> None:
    fragile = FACTORIES | {"rank": (f"{FRAGILE}:build_rank",)}
    with Cluster(options(), factories=fragile):
        pass
    assert (private_temporary_directory / FRAGILE).exists()
    (private_temporary_directory / FRAGILE).unlink()


def test_what_cannot_be_loaded_is_told_by_the_node_that_needs_it() -> None:
    cluster = Cluster(options(restarts_max=0), factories=FACTORIES | {"rank": (f"{HERE}_that_are_not_there:build",)})
    with pytest.raises(ClusterError, match=r"m0 failed 1 times.*No module named 'tests.supervisor.dummies_that_are"):
        cluster.start()
    assert_nothing_left(*started(cluster))


def test_a_nursery_that_hangs_does_not_keep_the_tree_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nurseries, "TELL_S", 0.1)
    cluster = Cluster(options(topology="P2/D1"), factories=FACTORIES)
    cluster.start()
    nursery_of(cluster).suspend()
    cluster.stop()
    assert_nothing_left(*started(cluster))


def test_loading_torch_loads_no_extension_of_a_device_before_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tmp_path / "loaded"
    (tmp_path / "pretended_npu.py").write_text(f"def autoload():\n    open({str(loaded)!r}, 'w').close()\n")
    about = tmp_path / "pretended_npu-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pretended_npu\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\npretended_npu = pretended_npu:autoload\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    with Cluster(options(), factories=FACTORIES | {"rank": ("tests.supervisor.loads_torch:build_rank",)}):
        pass
    assert not loaded.exists()


@pytest.mark.parametrize("what", ["fork", "pidfd", "descriptor"])
def test_a_process_that_cannot_be_forked_is_one_refusal_and_the_nursery_goes_on(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(*_: object) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    child = os.posix_spawn("/bin/sleep", ["sleep", "100"], {}) if what == "pidfd" else 0
    monkeypatch.setattr(os, "fork", refuse if what == "fork" else lambda: child)
    if what == "pidfd":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    serving = threading.Thread(target=Nursery(theirs).serve)
    serving.start()
    read, write = os.pipe()
    try:
        for _ in range(1 if what == "pidfd" else 2):
            socket.send_fds(ours, [b"/nowhere/p0.r0.json"], [] if what == "descriptor" else [write])
            answer = msgspec.json.decode(ours.recv(PACKET_BYTES_MAX), type=Born | NotBorn)
            assert isinstance(answer, NotBorn) and answer.reason
        assert not child or not psutil.pid_exists(child), "a process that nobody would hear of is ended"
    finally:
        ours.close()
        serving.join()
        theirs.close()
        os.close(read)
        os.close(write)
