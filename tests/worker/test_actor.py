"""The worker's shell over a real data plane: loading, steps on its own thread, and failures as messages."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.runtime.config import NodeConfig, Options
from actors.worker.actor import WorkerExecutor, build
from actors.worker.jobs import ExecuteStep, LoadModel
from messages.base import SUPERVISOR, Message
from messages.batch import BatchResult, BatchRow, ExecuteBatch, SequenceStart, StepFailed
from messages.lifecycle import LoadFailed, ModelLoaded, NodeProgress
from messages.requests import SamplingParams
from messages.transfer import LayerReady
from tests.worker.harness import Reference, prompts_of
from transport.shm_dataplane import ShmDataPlane

RUN_ID = f"test-worker-{os.getpid()}"


class Node:
    """A rank node around one executor."""

    def __init__(self, options: Options, rank: int = 0, tp_size: int = 1) -> None:
        self.config = NodeConfig(
            node=f"p0.r{rank}",
            incarnation=2,
            run_id=RUN_ID,
            run_dir="",
            options=options,
            factories=(),
            instance="p0",
            role="PREFILL",
            rank=rank,
            tp_size=tp_size,
        )
        self.data_plane = ShmDataPlane(RUN_ID)
        self.logged: list[str] = []
        self.executor = WorkerExecutor(self.config, self.data_plane, self.log)
        self.emitted: list[tuple[str, Message]] = []
        self._results: queue.Queue[Message] = queue.Queue()

    def log(self, level: str, event: str, **fields: str | int | float) -> None:
        self.logged.append(event)

    def submit(self, job: Any) -> None:
        self.executor.submit(job, lambda to, message: self.emitted.append((to, message)), self._results.put)

    def result(self) -> Message:
        return self._results.get(timeout=60)

    def run(self, job: Any) -> Message:
        self.submit(job)
        return self.result()

    def close(self) -> None:
        self.executor.close()
        self.data_plane.close()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    yield made
    for node in made:
        node.close()


def options(model_dir: Path, **changes: Any) -> Options:
    settings: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": "float32",
        "block_count": 16,
        "max_seqs_per_batch": 2,
        "max_tokens_per_chunk_for_prefill": 24,
        "collective_timeout_ms": 2_000,
        "start_timeout_ms": 20_000,
    }
    return Options(**{**settings, **changes})


def step(prompt: list[int], number: int = 1, **row: Any) -> ExecuteStep:
    start = SequenceStart(
        request_id="a", epoch=5, slot=1, sampling=SamplingParams(max_tokens=4), prompt_token_ids=tuple(prompt)
    )
    made = BatchRow(
        request_id="a",
        epoch=5,
        token_ids=tuple(prompt),
        start=0,
        block_ids=(3, 1, 2),
        samples=True,
        is_prefill=True,
        **row,
    )
    return ExecuteStep(batch=ExecuteBatch(step=number, incarnation=2, rows=(made,), opened=(start,)))


def test_loading_registers_the_caches_and_publishes_their_layout(nodes: list[Node], model_dir: Path) -> None:
    node = Node(options(model_dir, num_speculative_tokens=2))
    nodes.append(node)
    loaded = node.run(LoadModel())
    assert isinstance(loaded, ModelLoaded)
    manifest = loaded.manifest
    (region,) = manifest.regions
    assert region.region_id == "p0.r0.2.caches"
    assert {tensor.region_id for tensor in manifest.tensors} == {region.region_id}
    assert len(node.data_plane.view(region.region_id)) == region.size_bytes
    assert (manifest.block_count, manifest.slot_count, manifest.speculative_tokens) == (16, 2, 2)
    assert manifest.max_tokens_per_chunk == 24 and manifest.max_model_len == 512
    progress = [message for to, message in node.emitted if to == SUPERVISOR]
    assert all(isinstance(message, NodeProgress) for message in progress) and len(progress) > 1


def test_a_step_reports_layers_to_the_transfer_actor_and_then_its_result(
    nodes: list[Node], model_dir: Path, reference: Reference
) -> None:
    node = Node(options(model_dir))
    nodes.append(node)
    node.run(LoadModel())
    node.emitted.clear()
    (prompt,) = prompts_of([33])
    result = node.run(step(prompt, push_chunk=7))
    assert isinstance(result, BatchResult)
    assert result.forward_ms > 0.0
    reference.assert_greedy(prompt, result.rows[0].token_ids)
    ((to, ready),) = node.emitted
    assert to == "p0.r0/transfer"
    assert ready == LayerReady(
        request_id="a",
        epoch=5,
        chunk_index=7,
        layer=3,
        token_start=0,
        token_count=33,
        is_last_layer=True,
        is_last_chunk=True,
    )


def test_two_nodes_of_one_instance_compute_the_same_and_leave_no_group_segment(
    nodes: list[Node], model_dir: Path, reference: Reference
) -> None:
    nodes += [Node(options(model_dir), rank, 2) for rank in range(2)]
    for node in nodes:
        node.submit(LoadModel())
    assert all(isinstance(node.result(), ModelLoaded) for node in nodes)
    assert not [name for name in os.listdir("/dev/shm") if RUN_ID in name and "collective" in name]
    (prompt,) = prompts_of([33])
    for node in nodes:
        node.submit(step(prompt))
    first, second = (node.result() for node in nodes)
    assert isinstance(first, BatchResult) and isinstance(second, BatchResult)
    assert first.rows == second.rows and (first.rank, second.rank) == (0, 1)
    reference.assert_greedy(prompt, first.rows[0].token_ids)


def test_a_rank_whose_peer_is_silent_fails_the_step_and_names_it(nodes: list[Node], model_dir: Path) -> None:
    nodes += [Node(options(model_dir, collective_timeout_ms=300), rank, 2) for rank in range(2)]
    for node in nodes:
        node.submit(LoadModel())
    for node in nodes:
        node.result()
    failed = nodes[0].run(step(prompts_of([5])[0]))
    assert isinstance(failed, StepFailed)
    assert "rank 1 did not begin step 1 within 300 ms" in failed.reason


def test_a_step_that_breaks_says_why_in_one_line_and_where_in_the_nodes_log(
    nodes: list[Node], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason travels to clients; a traceback must not."""
    node = Node(options(model_dir))
    nodes.append(node)
    node.run(LoadModel())

    def broken(*arguments: Any) -> None:
        raise RuntimeError("out of memory:\n  tried to allocate too much")

    monkeypatch.setattr("actors.worker.runner.RankModel.forward", broken)
    failed = node.run(step([5, 6, 7]))
    assert isinstance(failed, StepFailed)
    assert failed.reason == "RuntimeError: out of memory: tried to allocate too much"
    assert node.logged == ["loaded", "step_failed"]


def test_a_step_queued_behind_one_that_broke_is_not_run_and_fails_as_that_one_did(
    nodes: list[Node], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(options(model_dir))
    nodes.append(node)
    node.run(LoadModel())
    begun: list[int] = []

    def breaks_once(*arguments: Any) -> None:
        begun.append(len(begun))
        raise RuntimeError("the first step broke" if len(begun) == 1 else "another step was run")

    monkeypatch.setattr("actors.worker.runner.RankModel.forward", breaks_once)
    for number in (1, 2, 3):
        node.submit(step([5, 6, 7], number))
    failed = [node.result() for _ in range(3)]
    assert all(isinstance(message, StepFailed) for message in failed)
    assert [(f.step, f.reason) for f in failed if isinstance(f, StepFailed)] == [
        (number, "RuntimeError: the first step broke") for number in (1, 2, 3)
    ]
    assert begun == [0]


def test_a_configuration_that_cannot_work_is_a_fatal_refusal(
    nodes: list[Node], model_dir: Path, tmp_path: Path
) -> None:
    node = Node(options(tmp_path / "nowhere"))
    nodes.append(node)
    failed = node.run(LoadModel())
    assert isinstance(failed, LoadFailed) and failed.fatal and "nowhere" in failed.reason


def test_the_factory_makes_the_worker_of_the_node(nodes: list[Node], model_dir: Path) -> None:
    node = Node(options(model_dir))
    nodes.append(node)
    context = SimpleNamespace(config=node.config, data_plane=node.data_plane, log=lambda *_, **__: None)
    (spec,) = build(context)  # type: ignore[arg-type]
    assert spec.name == "worker" and spec.executor is not None
    spec.executor.close()
