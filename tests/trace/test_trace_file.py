"""What a trace file holds, and that it survives the death of its writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.runtime.config import NodeConfig, Options
from actors.runtime.trace import FAULT, GROW_BYTES, HANDLED, SENT, FileRecorder, RingRecorder, make_recorder
from actors.runtime.trace_file import Trace, TraceError
from messages.envelope import Envelope
from messages.transfer import ClosePush


def config(directory: Path | str, node: str = "p0.ctl", **options: object) -> NodeConfig:
    return NodeConfig(
        node=node,
        incarnation=1,
        run_id="x",
        run_dir="",
        options=Options(trace_dir=str(directory), **options),  # type: ignore[arg-type]
        factories=(),
    )


def envelope(number: int, request: str = "r1") -> Envelope:
    return Envelope(
        message_id=f"p0.ctl#1.{number}",
        sender="p0.ctl/scheduler",
        to="d0.ctl/scheduler",
        sent_ns=number * 10,
        message=ClosePush(request_id=request, epoch=2),
        parent_id="front#1.1",
        trace_id=request,
        epoch=2,
        incarnation=1,
    )


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    recorder = make_recorder(config(tmp_path))
    recorder.sent(envelope(1), 120)
    recorder.handled(55, envelope(2))
    recorder.fault(60, envelope(3), "rule 1: drop")
    recorder.fault(61, None, "rule 2: kill")
    recorder.close()
    recorder.sent(envelope(4), 1)
    trace = Trace(tmp_path)
    sent, handled, fault, killed = trace.records()
    assert (sent.kind, sent.now_ns, sent.size_bytes, sent.message) == (SENT, 10, 120, envelope(1).message)
    assert (handled.kind, handled.now_ns, handled.sent_ns, handled.type) == (HANDLED, 55, 20, "ClosePush")
    assert (handled.actor, sent.actor) == ("d0.ctl/scheduler", "p0.ctl/scheduler")
    assert (sent.parent_id, sent.trace_id, sent.epoch) == ("front#1.1", "r1", 2)
    assert (fault.kind, fault.text, fault.message_id, fault.message) == (FAULT, "rule 1: drop", "p0.ctl#1.3", None)
    assert (killed.text, killed.now_ns) == ("rule 2: kill", 61)
    assert trace.files[0].config.node == "p0.ctl"
    assert trace.damage() == []


def test_payloads_can_be_left_out(tmp_path: Path) -> None:
    recorder = make_recorder(config(tmp_path, trace_payloads=False))
    recorder.sent(envelope(1), 120)
    recorder.close()
    (record,) = Trace(tmp_path).records()
    assert record.message is None
    assert record.type == "ClosePush"


def test_a_file_longer_than_one_mapping_is_whole(tmp_path: Path) -> None:
    recorder = make_recorder(config(tmp_path))
    count = 3 * GROW_BYTES // 150
    for number in range(count):
        recorder.sent(envelope(number), 0)
    recorder.close()
    numbers = [record.sent_ns for record in Trace(tmp_path).records()]
    assert numbers == [number * 10 for number in range(count)]


def test_nodes_are_merged_by_time_and_filtered_before(tmp_path: Path) -> None:
    for node, offset in (("a", 0), ("b", 1)):
        recorder = make_recorder(config(tmp_path, node))
        for number in range(10):
            recorder.sent(envelope(2 * number + offset, f"r{number % 2}"), 0)
        recorder.close()
    times = [record.now_ns for record in Trace(tmp_path).records()]
    assert times == [number * 10 for number in range(20)]
    assert len(list(Trace(tmp_path).records(lambda record: record.trace_id == "r1"))) == 10


WRITER = """
import os, signal, sys
from pathlib import Path
from tests.trace.test_trace_file import config, envelope
from actors.runtime.trace import make_recorder
recorder = make_recorder(config(sys.argv[1]))
for number in range(1000):
    recorder.sent(envelope(number), 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_loses_nothing(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], cwd=root, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    trace = Trace(tmp_path)
    assert len(list(trace.records())) == 1000
    assert trace.damage() == []


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_torn_tail_costs_one_record_only(tmp_path: Path, cut: int) -> None:
    recorder = make_recorder(config(tmp_path))
    for number in range(5):
        recorder.sent(envelope(number), 0)
    recorder.close()
    path = tmp_path / "p0.ctl.1.trace"
    os.truncate(path, path.stat().st_size - cut)
    assert len(list(Trace(tmp_path).records())) == 4


def test_a_damaged_file_ends_at_the_damage_and_says_so(tmp_path: Path) -> None:
    recorder = make_recorder(config(tmp_path))
    for number in range(5):
        recorder.sent(envelope(number), 0)
    recorder.close()
    with (tmp_path / "p0.ctl.1.trace").open("ab") as file:
        file.write(b"\xc1\xff\xc1garbage")
    trace = Trace(tmp_path)
    assert len(list(trace.records())) == 5
    assert "unreadable" in trace.damage()[0]


def test_a_directory_without_traces_and_a_foreign_file_are_named_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no traces in"):
        Trace(tmp_path)
    (tmp_path / "x.trace").write_bytes(b"\x93\x01\x02\x03")
    with pytest.raises(TraceError, match="is not a trace"):
        Trace(tmp_path)


def test_without_a_directory_only_the_ring_remembers_and_can_be_written_later(tmp_path: Path) -> None:
    recorder = make_recorder(config("", trace_ring=3))
    assert type(recorder) is RingRecorder
    for number in range(5):
        recorder.sent(envelope(number), 0)
    recorder.dump(tmp_path)
    assert [record.sent_ns for record in Trace(tmp_path).records()] == [20, 30, 40]


def test_a_full_disk_ends_the_trace_and_not_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FileRecorder(config(tmp_path), tmp_path)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for number in range(2 * GROW_BYTES // 150):
        recorder.sent(envelope(number), 0)
    recorder.close()
    assert "No space left" in recorder.failure
    assert len(list(Trace(tmp_path).records())) > 1000
