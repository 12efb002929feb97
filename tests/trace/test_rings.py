"""The ring that every node keeps: asked for in a running process, and written by one that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from actors.runtime.config import NodeConfig, Options
from actors.runtime.trace import NoRing, RingRecorder, make_recorder
from actors.runtime.trace_file import Trace, TraceError
from messages.envelope import Envelope
from messages.requests import CancelRequest
from scripts.trace_rings import collect_rings, node_processes

ROOT = Path(__file__).resolve().parents[2]


def config(run_dir: Path, **options: object) -> NodeConfig:
    return NodeConfig(
        node="n.r0",
        incarnation=1,
        run_id="rings",
        run_dir=str(run_dir),
        options=Options(heartbeat_ms=50, **options),  # type: ignore[arg-type]
        factories=(),
    )


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The run directory of one node process, which has nothing to do but to say that it lives."""
    path = tmp_path / "n.r0.json"
    path.write_bytes(msgspec.json.encode(config(tmp_path)))
    process = subprocess.Popen([sys.executable, "-m", "actors.runtime.node", str(path)], cwd=ROOT)
    deadline_s, pause = time.monotonic() + 60.0, threading.Event()
    while not node_processes(tmp_path):
        assert process.poll() is None
        assert time.monotonic() < deadline_s, "the node never listened"
        pause.wait(0.02)
    yield tmp_path
    process.terminate()
    assert process.wait(30) == 0


def test_a_running_node_writes_its_ring_when_asked_and_goes_on(running: Path) -> None:
    (first,) = collect_rings(running)
    assert first.name == "n.r0.1.trace"
    assert Trace(first.parent).files[0].config.node == "n.r0"
    (again,) = collect_rings(running)
    assert again == first
    assert node_processes(running)


def test_a_message_that_has_no_bytes_is_recorded_without_its_payload(tmp_path: Path) -> None:
    recorder = RingRecorder(config(tmp_path))
    for number, reason in enumerate(("fine", "half a pair: \ud800", "fine too"), 1):
        message = CancelRequest(request_id=f"r{number}", epoch=1, reason=reason)
        sent = Envelope(message_id=str(number), sender="n.r0/a", to="n.r0/b", sent_ns=number, message=message)
        recorder.sent(sent, 0)
    recorder.dump(tmp_path)
    records = list(Trace(tmp_path).records())
    assert [(record.type, record.message is None) for record in records] == [
        ("CancelRequest", False),
        ("CancelRequest", True),
        ("CancelRequest", False),
    ]


def test_where_nothing_runs_there_is_nobody_to_ask(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no node of a cluster"):
        collect_rings(tmp_path)


def test_a_node_that_cannot_start_leaves_its_ring(tmp_path: Path) -> None:
    path = tmp_path / "n.r0.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(config(tmp_path), factories=("no.such:build",))))
    ended = subprocess.run([sys.executable, "-m", "actors.runtime.node", str(path)], cwd=ROOT, timeout=60, check=False)
    assert ended.returncode != 0
    assert [file.config.node for file in Trace(tmp_path / "rings").files] == ["n.r0"]


def test_a_ring_of_no_length_is_no_ring(tmp_path: Path) -> None:
    assert type(make_recorder(config(tmp_path))) is RingRecorder
    silent = make_recorder(config(tmp_path, trace_ring=0))
    assert type(silent) is NoRing
    silent.fault(1, None, "rule 1: kill")
    assert silent.entries() == []
