"""The trace commands, on traces that a simulated cluster wrote."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from actors.runtime.fault_plan import FaultPlan, MessageMatch, Point, Rule
from actors.runtime.trace import FileRecorder
from actors.runtime.trace_file import HANDLED, SENT, Trace, TraceError
from messages.requests import SamplingParams
from scripts import trace_machines, trace_replay
from scripts.simulated_client import Request
from scripts.simulated_cluster import SimulatedCluster, with_options
from scripts.simulated_model import EOS
from scripts.trace_commands import (
    grep,
    path_text,
    replay_text,
    sequence_html,
    sequence_mermaid,
    sequence_text,
    stuck_text,
    write_perfetto,
)
from scripts.trace_path import critical_path
from scripts.trace_replay import Replay
from scripts.trace_story import load_story
from scripts.trace_stuck import Progress, _follow

FOUR_TOKENS = SamplingParams(max_tokens=4, eos_token_ids=(EOS,), ignore_eos=True)


def record(
    directory: Path,
    rules: tuple[Rule, ...] = (),
    for_ms: float = 60_000.0,
    sampling: SamplingParams = FOUR_TOKENS,
    begins: tuple[int, ...] = (1, 1, 1, 1),
) -> SimulatedCluster:
    """A P2/D1 cluster with a request per beginning of a prompt, traced; runs until they are over, or for ``for_ms``."""
    requests = [
        Request(f"r{number}", tuple(range(begin, 11 + begin)), sampling, "online")
        for number, begin in enumerate(begins, 1)
    ]
    cluster = SimulatedCluster(
        1,
        requests,
        options=with_options(topology="P2/D1", block_count=10 * len(begins)),
        plan=FaultPlan(rules=rules),
        recorder_for=lambda config: FileRecorder(config, directory),
    )
    cluster.begin()
    for number, request in enumerate(requests):
        cluster.simulation.call_at(300.0 + number, lambda request=request: cluster.clients.submit(request))  # type: ignore[misc]
    cluster.simulation.run(for_ms=for_ms, until=lambda: cluster.clients.open_count == 0)
    cluster.simulation.run(for_ms=20)
    for node in cluster.simulation.nodes.values():
        if node.alive and node.recorder is not None:
            node.recorder.close()
    return cluster


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("clean")
    record(directory)
    return directory


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``HandoffComplete`` of r2 is lost, and the run ends while its prefill instance still waits."""
    directory = tmp_path_factory.mktemp("stuck")
    lost = Rule(do="drop", match=MessageMatch(type="HandoffComplete", request="r2"))
    silent = Rule(do="drop", match=MessageMatch(type="PullKVCache", request="r3"))
    record(directory, (lost, silent), for_ms=420.0)
    return directory


def test_a_sequence_tells_the_steps_of_the_protocol_in_order(clean: Path) -> None:
    text = sequence_text(clean, "r2")
    places = [
        text.index(f" {name} ")
        for name in (
            "ClientSubmit",
            "SubmitRequest",
            "AddNewRequest",
            "RequestAccepted",
            "ExecuteBatch",
            "ChunkArrived",
            "FirstGeneration",
            "PullKVCache",
            "AllRestored",
            "HandoffComplete",
            "Finished",
        )
    ]
    assert places == sorted(places)
    assert "WriteDone" not in text
    assert "WriteDone" in sequence_text(clean, "r2", internal=True)


def test_a_unique_beginning_of_an_id_is_enough_and_an_unknown_one_is_answered_with_names(clean: Path) -> None:
    with pytest.raises(TraceError, match=r"no request 'x'.*r1"):
        sequence_text(clean, "x")
    with pytest.raises(TraceError, match="begins 4 requests"):
        sequence_text(clean, "r")
    assert load_story(clean, "r4").request_id == "r4"


def test_a_path_ends_with_the_last_word_also_when_a_step_ran_the_request_in_vain(tmp_path: Path) -> None:
    """A request that ends by EOS may run in the step that was sent ahead."""
    record(tmp_path, sampling=SamplingParams(max_tokens=20, eos_token_ids=(EOS,)), begins=tuple(range(1, 7)))
    in_vain = 0
    for number in range(1, 7):
        story = load_story(tmp_path, f"r{number}")
        (finished,) = story.of("Finished")
        end = critical_path(story).to_last_token[-1]
        assert (end.phase, end.end_ns) == ("response", finished.handled_ns[0])
        in_vain += any(hop.handled_ns[0] > finished.sent_ns for hop in story.of("BatchResult") if hop.handled_ns)
    assert in_vain


def test_a_step_in_flight_is_waited_for_also_when_the_one_before_it_was_answered() -> None:
    requests: dict[str, Progress] = {}

    def record(kind: int, name: str, sender: str, to: str, step: int) -> None:
        message = SimpleNamespace(step=step)
        fields = {"kind": kind, "type": name, "sender": sender, "to": to, "now_ns": step, "text": "", "actor": to}
        _follow(requests, SimpleNamespace(**fields, message=message), "r1")  # type: ignore[arg-type]

    scheduler, engine = "d0.ctl/scheduler", "d0.ctl/engine"
    record(SENT, "ExecuteBatch", scheduler, engine, 7)
    record(SENT, "ExecuteBatch", scheduler, engine, 8)
    record(HANDLED, "BatchResult", engine, scheduler, 7)
    (question,) = requests["r1"].waiting()
    assert question.record.message.step == 8  # type: ignore[union-attr]
    record(HANDLED, "StepFailed", engine, scheduler, 8)
    assert not requests["r1"].waiting()


def test_lost_and_repeated_messages_are_marked(stuck: Path) -> None:
    text = sequence_text(stuck, "r2")
    (line,) = [line for line in text.splitlines() if "HandoffComplete" in line]
    assert "lost" in line
    assert "rule 1: drop" in line


def test_mermaid_names_every_participant_and_crosses_out_what_was_lost(stuck: Path) -> None:
    lines = sequence_mermaid(stuck, "r2").splitlines()
    assert lines[0] == "sequenceDiagram"
    assert any(line.endswith("as d0.ctl/scheduler") for line in lines)
    assert any("--x" in line and "HandoffComplete" in line for line in lines)


def test_the_page_is_self_contained_and_holds_every_message(clean: Path) -> None:
    page = sequence_html(clean, "r2")
    assert "http://" not in page
    assert "https://" not in page
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    data = json.loads(found.group(1))
    assert data["request"] == "r2"
    assert {lane["name"] for lane in data["lanes"]} >= {"front/gateway", "d0.r0/staging", "p0.r1/transfer"}
    assert len(data["hops"]) == len(load_story(clean, "r2").hops)
    assert data["paths"][1]["title"] == "last token"


def test_critical_path_parts_add_up_to_the_time_that_the_client_waited(clean: Path) -> None:
    story = load_story(clean, "r2")
    path = critical_path(story)
    for segments in (path.to_first_token, path.to_last_token):
        assert all(one.end_ns == other.begin_ns for one, other in pairwise(segments))
        assert segments[0].begin_ns == story.begin_ns
    tokens = [hop.handled_ns[0] for hop in story.of("Generation")]
    assert path.to_first_token[-1].end_ns == tokens[0]
    assert path.to_last_token[-1].end_ns == max(hop.handled_ns[0] for hop in story.of("Generation", "Finished"))
    phases = [segment.phase for segment in path.to_last_token]
    for phase in ("allocation", "prefill", "FirstGeneration", "pull", "merge", "enqueue", "decode", "response"):
        assert phase in phases
    text = path_text(clean, "r2")
    assert "arrival → first token" in text
    assert "%" in text


def test_stuck_says_what_is_awaited_from_whom_and_why_it_does_not_come(clean: Path, stuck: Path) -> None:
    assert stuck_text(clean) == "all 4 requests finished or failed; nothing is stuck"
    text = stuck_text(stuck)
    assert "1 of 4 requests did not finish" in text
    assert "r3:" in text
    assert "d0.r0/transfer should answer" in text
    assert "rule 2: drop" in text
    assert "d0.r0/transfer never handled it" in text


def test_perfetto_json_has_a_track_per_actor_and_arrows_that_meet(clean: Path, tmp_path: Path) -> None:
    with (tmp_path / "trace.json").open("wb") as file:
        count = write_perfetto(clean, file)
    events = msgspec.json.decode((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert len(events) == count + 1
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "scheduler" in names.values()
    assert "transfer jobs" in names.values()
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = [event for event in events if event["ph"] == "f"]
    assert ends
    assert all(starts[event["id"]]["ts"] <= event["ts"] for event in ends)
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] > 0 for event in slices)


def test_grep_filters_by_type_actor_request_text_and_time(clean: Path) -> None:
    everything = list(grep(clean))
    assert len(everything) == len(list(Trace(clean).records()))
    by_type = list(grep(clean, types=("Chunk*",), actor="d0.r0/*", request="r2"))
    assert by_type
    assert all("ChunkArrived" in line or "ChunkMerged" in line for line in by_type)
    assert all(" r2 " in line for line in by_type)
    late = list(grep(clean, after_ms=250.0, types=("ClientSubmit",)))
    assert len(late) == 8  # sent and handled
    assert list(grep(clean, before_ms=250.0, types=("ClientSubmit",))) == []
    assert len(list(grep(clean, types=("Generation",), limit=3))) == 4
    assert list(grep(clean, text="no such text")) == []


def test_every_actor_replays_as_recorded(clean: Path, stuck: Path) -> None:
    for directory in (clean, stuck):
        for file in Trace(directory).files:
            names = {record.to for record in file.records() if record.to.startswith(file.config.node)}
            for address in sorted(names):
                if not address.endswith(("/http", "/console", "/node", "/post")):
                    replay = Replay(directory, address)
                    assert replay.run() is None, address
                    assert replay.step_count > 0


def test_a_replay_shows_messages_states_and_effects_and_stops_where_asked(clean: Path) -> None:
    lines = list(replay_text(clean, "d0.ctl/scheduler"))
    text = "\n".join(lines)
    assert "AddNewRequest from p0.ctl/scheduler  r1" in text
    assert re.search(r"r1#0: - ⇒ reserving", text)
    assert "→ p0.ctl/scheduler  HandoffComplete" in text
    assert "steps replayed; every message sent is as recorded" in lines[-1]
    short = list(replay_text(clean, "d0.ctl/scheduler", until=3))
    assert short == lines[: len(short)]
    assert len(short) < len(lines)


def test_a_replay_reports_the_first_effect_that_differs(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trace_machines.make_machine

    def changed(config, actor):  # type: ignore[no-untyped-def]
        options = msgspec.structs.replace(config.options, kv_cache_transfer_mode="PULL")
        return real(msgspec.structs.replace(config, options=options), actor)

    monkeypatch.setattr(trace_replay, "make_machine", changed)
    lines = list(replay_text(clean, "p0.ctl/scheduler"))
    assert "✗ first difference: sent now: AddNewRequest" in lines[-1]
    assert "mode=PULL" in lines[-1]
    assert "recorded: AddNewRequest" in lines[-1]
    assert "mode=PUSH" in lines[-1]


def test_what_cannot_be_replayed_is_refused_with_the_reason(clean: Path) -> None:
    with pytest.raises(TraceError, match="no trace of d7"):
        Replay(clean, "d7.ctl/scheduler")
    with pytest.raises(TraceError, match="has no machine 'cook'"):
        Replay(clean, "d0.ctl/cook")


def test_a_crash_is_in_every_view(tmp_path: Path) -> None:
    record(tmp_path, (Rule(do="kill", at=Point(handled="FirstGeneration", node="d0.ctl")),))
    story = load_story(tmp_path, "r1")
    assert [fault.text for fault in story.node_faults] == ["rule 1: kill d0.ctl"]
    assert "rule 1: kill d0.ctl" in sequence_text(tmp_path, "r1")
    assert '"node_faults":[{' in sequence_html(tmp_path, "r1")
    assert any("kill" in line for line in grep(tmp_path, actor="p0.ctl/scheduler"))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_runs_in_a_browser_without_an_error(clean: Path, tmp_path: Path) -> None:
    page = sequence_html(clean, "r2").replace(
        "</body>", "<script>document.title = `rows ${document.querySelectorAll('#rows tr').length}`</script></body>"
    )
    (tmp_path / "page.html").write_text(page)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom"]
    ended = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    hops = load_story(clean, "r2").hops
    assert f"<title>rows {len(hops)}</title>" in ended.stdout
    assert "Uncaught" not in ended.stderr
