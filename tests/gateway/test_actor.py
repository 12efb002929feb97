"""The front node as it runs: registry and gateway in real shells, a scheduler on another node, HTTP in front."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from actors.runtime.config import NodeConfig, Options
from actors.runtime.context import ActorSpec, NodeContext
from actors.runtime.machine import Effect, Send
from actors.runtime.node import Node
from messages.base import REGISTRY, Message
from messages.cluster import ClusterView, RegisterInstance
from messages.requests import Finished, SubmitRequest, Usage
from tests.gateway.fake_cluster import WAIT_S, FakeCluster
from tests.gateway.harness import instance


class EchoScheduler:
    """Registers as m0 and answers every request with its own prompt. ``seen`` is set once the view names it."""

    def __init__(self) -> None:
        self.seen = threading.Event()
        self.submitted = threading.Event()
        self.silent = False

    def start(self, now_ns: int) -> list[Effect]:
        return [Send(REGISTRY, RegisterInstance(info=instance("m0")))]

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        match message:
            case ClusterView():
                if any(info.instance == "m0" for info in message.instances):
                    self.seen.set()
            case SubmitRequest():
                self.submitted.set()
                return [] if self.silent else self._answer(message)
        return []

    @staticmethod
    def _answer(submit: SubmitRequest) -> list[Effect]:
        tokens = submit.prompt_token_ids
        messages: list[Message] = [FakeCluster.generation(submit, i, token) for i, token in enumerate(tokens)]
        finished = Finished(
            request_id=submit.request_id,
            epoch=submit.epoch,
            reason="stop",
            usage=Usage(completion_tokens=len(tokens)),
            prefill_instance="m0",
        )
        return [Send(submit.reply_to, message) for message in (*messages, finished)]

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        return (), ()


class Tree:
    """A front and m0.ctl, each a node with its own links, in this process."""

    def __init__(self, checkpoint: Path, run_dir: Path) -> None:
        options = msgspec.structs.replace(
            Options(), model=str(checkpoint), served_model_name="tiny", port=0, log_level="error"
        )
        front = NodeConfig(
            node="front",
            incarnation=1,
            run_id="t",
            run_dir=str(run_dir),
            options=options,
            factories=("actors.registry.actor:build", "actors.gateway.actor:build"),
        )
        self.scheduler = EchoScheduler()
        self.front = Node(front)
        self.control = Node(msgspec.structs.replace(front, node="m0.ctl", factories=()), (self._build,))
        self.front.start()
        self.url = self.front._detail
        self.control.start()
        assert self.scheduler.seen.wait(WAIT_S)

    def _build(self, context: NodeContext) -> tuple[ActorSpec, ...]:
        return (ActorSpec("scheduler", self.scheduler),)

    def close(self) -> None:
        self.control.close()
        self.front.close()


@pytest.fixture
def tree(checkpoint: Path) -> Iterator[Tree]:
    with tempfile.TemporaryDirectory(prefix="kvf-") as run_dir:  # short: socket paths are
        tree = Tree(checkpoint, Path(run_dir))
        yield tree
        tree.close()


def test_a_request_travels_through_real_actors_and_back(tree: Tree) -> None:
    with httpx.Client(base_url=tree.url, timeout=WAIT_S, trust_env=False) as client:
        body = {"prompt": "def hello", "max_tokens": 30, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == "def hello"
        assert answer["choices"][0]["token_ids"] == answer["choices"][0]["prompt_token_ids"]
        assert client.get("/health").json()["instances"] == [{"instance": "m0", "role": "MIX"}]


def test_a_node_that_stops_answers_who_still_waits_and_leaves_no_server_behind(tree: Tree) -> None:
    tree.scheduler.silent = True
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=tree.url, timeout=WAIT_S, trust_env=False) as client:
            answers.append(client.post("/v1/completions", json={"prompt": "x"}))

    waiting = threading.Thread(target=ask)
    waiting.start()
    assert tree.scheduler.submitted.wait(WAIT_S)
    tree.front.close()
    waiting.join(WAIT_S)
    assert [response.status_code for response in answers] == [503]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{tree.url}/health", trust_env=False)


def test_the_front_loads_no_torch_and_stays_small() -> None:
    code = (
        "import json, sys\n"
        "import actors.runtime.node, actors.registry.actor, actors.gateway.actor\n"
        # not ru_maxrss: that remembers the process which this one was forked from
        "status = open('/proc/self/status').read()\n"
        "peak_kib = int(status.partition('VmHWM:')[2].split()[0])\n"
        "heavy = [n for n in ('torch', 'transformers', 'numpy', 'huggingface_hub') if n in sys.modules]\n"
        "print(json.dumps([heavy, peak_kib]))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout
    heavy, peak_kib = json.loads(output)
    assert heavy == []
    assert peak_kib < 120 * 1024
