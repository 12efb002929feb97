"""Node processes: start, readiness, health, failure, stop, and death with their parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from actors.runtime.config import ConfigError, NodeConfig
from actors.runtime.context import ActorSpec
from actors.runtime.node import Node
from actors.runtime.process import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from messages.lifecycle import NodeFailed, NodeHealth, NodeReady, PeerLost, Stop
from tests.runtime.dummies import WAIT_S, Scripted, node_config, start_node, text
from transport.keys import FILE_NAME, make_keys, write_keys
from transport.shm_dataplane import run_segments

ECHO = "tests.runtime.dummies:build_echo"
REGION = "tests.runtime.dummies:build_region"


class Supervisor:
    """The supervisor's node, in this process, and the processes that tests start."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.machine = Scripted()
        self.node = start_node(run_dir, "supervisor", ActorSpec("root", self.machine))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, config: NodeConfig) -> subprocess.Popen[bytes]:
        path = self.run_dir / f"{config.node}.json"
        path.write_bytes(msgspec.json.encode(config))
        return self.run(str(path))

    def run(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "actors.runtime.node", *arguments]
        self.processes.append(subprocess.Popen(command, stderr=subprocess.PIPE))
        return self.processes[-1]

    def expect(self, kind: type) -> object:
        """The first message of this type."""
        machine = self.machine
        with machine.changed:
            assert machine.changed.wait_for(lambda: any(isinstance(m, kind) for _, m in machine.seen), 3 * WAIT_S)
            return next(message for _, message in machine.seen if isinstance(message, kind))

    def tell(self, to: str, words: str) -> None:
        self.node.post("root", to, text(words))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.node.close()


@pytest.fixture
def supervisor(run_dir: Path) -> Iterator[Supervisor]:
    made = Supervisor(run_dir)
    yield made
    made.close()


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code and stderr of a process that should end."""
    _, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, errors.decode()


def test_a_node_says_that_it_is_ready_and_healthy_and_stops_when_told(supervisor: Supervisor) -> None:
    process = supervisor.start(node_config(supervisor.run_dir, "d0.ctl", ECHO, incarnation=4, heartbeat_ms=20))
    ready = supervisor.expect(NodeReady)
    assert ready == NodeReady(node="d0.ctl", incarnation=4, pid=process.pid, detail="echoing")
    health = supervisor.expect(NodeHealth)
    assert isinstance(health, NodeHealth)
    assert health.incarnation == 4 and health.rss_bytes > 1 << 20 and health.threads >= 4
    supervisor.tell("d0.ctl/echo", "hello")
    machine = supervisor.machine
    with machine.changed:
        assert machine.changed.wait_for(lambda: ("d0.ctl/echo", text("hello")) in machine.seen, WAIT_S)
    supervisor.tell("d0.ctl/node", "enough")
    assert ended(process)[0] == EXIT_OK
    assert not (supervisor.run_dir / "d0.ctl.sock").exists()


def test_sigterm_ends_a_node_and_what_it_held(supervisor: Supervisor) -> None:
    config = node_config(supervisor.run_dir, "d0.r0", REGION)
    process = supervisor.start(config)
    ready = supervisor.expect(NodeReady)
    assert isinstance(ready, NodeReady)
    assert run_segments(config.run_id) == [ready.detail]
    process.send_signal(signal.SIGINT)  # a terminal's Ctrl-C is the supervisor's business
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == EXIT_OK
    assert run_segments(config.run_id) == []


@pytest.mark.parametrize(
    ("words", "reason", "fatal", "code"),
    [
        ("raise", "ValueError: told to (dummies.py:", False, EXIT_FAILED),
        ("fail", "gave up", False, EXIT_FAILED),
        ("fatal", "cannot work", True, EXIT_CONFIG),
    ],
)
def test_an_actors_death_is_a_message_and_ends_the_node(
    supervisor: Supervisor, words: str, reason: str, fatal: bool, code: int
) -> None:
    process = supervisor.start(node_config(supervisor.run_dir, "d0.ctl", ECHO))
    supervisor.expect(NodeReady)
    supervisor.tell("d0.ctl/echo", words)
    failed = supervisor.expect(NodeFailed)
    assert isinstance(failed, NodeFailed)
    assert (failed.node, failed.actor, failed.fatal) == ("d0.ctl", "echo", fatal)
    assert failed.reason.startswith(reason)
    assert ended(process)[0] == code


def test_a_process_that_is_gone_without_a_word_is_a_lost_peer(supervisor: Supervisor) -> None:
    process = supervisor.start(node_config(supervisor.run_dir, "d0.ctl", ECHO))
    supervisor.expect(NodeReady)
    supervisor.tell("d0.ctl/echo", "exit")
    lost = supervisor.expect(PeerLost)
    assert isinstance(lost, PeerLost) and lost.node == "d0.ctl"
    assert ended(process)[0] == 3


def test_an_actor_that_is_stuck_silences_its_node_which_says_so_on_stderr(supervisor: Supervisor) -> None:
    process = supervisor.start(node_config(supervisor.run_dir, "d0.ctl", ECHO, heartbeat_ms=20, log_level="warning"))
    supervisor.expect(NodeHealth)
    supervisor.tell("d0.ctl/echo", "hang")
    assert process.stderr is not None
    for _ in range(3):
        line = process.stderr.readline().decode()
        assert "d0.ctl/echo stuck message=Stop for_ms=" in line
    heard = sum(isinstance(message, NodeHealth) for _, message in supervisor.machine.seen)
    process.stderr.readline()  # a heartbeat later
    assert heard == sum(isinstance(message, NodeHealth) for _, message in supervisor.machine.seen)


def test_a_refused_configuration_is_fatal_and_says_what_to_change(supervisor: Supervisor) -> None:
    process = supervisor.start(node_config(supervisor.run_dir, "d0.r0", "tests.runtime.dummies:build_refused"))
    failed = supervisor.expect(NodeFailed)
    assert isinstance(failed, NodeFailed)
    assert failed.fatal and "block_size 3 is not a power of two" in failed.reason
    assert ended(process)[0] == EXIT_CONFIG


def test_a_factory_with_a_mistake_is_a_failure_that_may_be_tried_again(supervisor: Supervisor) -> None:
    process = supervisor.start(node_config(supervisor.run_dir, "d0.r0", "tests.runtime.dummies:build_broken"))
    failed = supervisor.expect(NodeFailed)
    assert isinstance(failed, NodeFailed)
    assert not failed.fatal and "KeyError: 'weights'" in failed.reason
    code, errors = ended(process)
    assert code == EXIT_FAILED and "start_failed" in errors


@pytest.mark.parametrize("content", [None, "{", "{}", '{"node": 3}'])
def test_a_configuration_that_is_none_is_refused_in_one_line(supervisor: Supervisor, content: str | None) -> None:
    path = supervisor.run_dir / "bad.json"
    if content is not None:
        path.write_text(content)
    code, errors = ended(supervisor.run(str(path)))
    assert code == EXIT_CONFIG
    assert len(errors.splitlines()) == 1 and "is not a node configuration" in errors


def test_a_node_ends_with_its_parent_however_that_dies(supervisor: Supervisor) -> None:
    config = node_config(supervisor.run_dir, "d0.r0", REGION)
    path = supervisor.run_dir / "child.json"
    path.write_bytes(msgspec.json.encode(config))
    parent_code = (
        "import subprocess, sys, threading\n"
        f"subprocess.Popen([sys.executable, '-m', 'actors.runtime.node', {str(path)!r}])\n"
        "threading.Event().wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code])
    supervisor.processes.append(parent)
    ready = supervisor.expect(NodeReady)
    assert isinstance(ready, NodeReady)
    child = psutil.Process(ready.pid)
    parent.kill()
    parent.wait()
    child.wait(WAIT_S)
    assert run_segments(config.run_id) == []


def test_a_node_whose_parent_is_gone_already_does_not_start(supervisor: Supervisor) -> None:
    config = msgspec.structs.replace(node_config(supervisor.run_dir, "d0.ctl", ECHO), parent_pid=os.getppid())
    code, errors = ended(supervisor.start(config))
    assert code == EXIT_OK
    assert f"parent process {os.getppid()} is gone" in errors


def test_a_control_node_loads_neither_torch_nor_numpy(supervisor: Supervisor) -> None:
    code = (
        "import json, sys\n"
        "import actors.runtime.node\n"
        "print(json.dumps([name for name in ('torch', 'numpy') if name in sys.modules]))\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert json.loads(output.stdout) == []


# -- configuration ---------------------------------------------------------------------------------------------------


def test_a_run_directory_that_is_too_long_or_missing_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107 are possible"):
        Node(node_config(run_dir / ("x" * 100), "d0.ctl"))
    with pytest.raises(ConfigError, match="does not exist"):
        Node(node_config(run_dir / "gone", "d0.ctl"))


def tcp_config(run_dir: Path, node: str, ports: Sequence[int], **options: object) -> NodeConfig:
    endpoints = (("a", f"tcp://127.0.0.1:{ports[0]}"), ("b", f"tcp://127.0.0.1:{ports[1]}"))
    return msgspec.structs.replace(node_config(run_dir, node, **options), endpoints=endpoints)


def test_tcp_without_the_runs_keys_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="keys_file"):
        Node(tcp_config(run_dir, "a", (1, 2)))
    with pytest.raises(ConfigError, match="keys_file"):
        Node(node_config(run_dir, "a", data_plane="tcp"))


def test_nodes_talk_and_move_bytes_over_tcp_with_keys_from_a_file(run_dir: Path, free_ports: list[int]) -> None:
    write_keys(run_dir / FILE_NAME, make_keys())
    machine = Scripted()
    one = Node(tcp_config(run_dir, "a", free_ports, data_plane="tcp"))
    other = Node(tcp_config(run_dir, "b", free_ports, data_plane="tcp"), (lambda c: (ActorSpec("m", machine),),))
    try:
        one.start()
        other.start()
        one.post("x", "b/m", Stop(reason="hello"))
        assert machine.wait_for(1) == [("a/x", Stop(reason="hello"))]
        one.data_plane.attach(other.data_plane.create_region("r", 64))
        assert one.data_plane is one.data_plane
    finally:
        one.close()
        other.close()
