"""The worker's machine: strictly the command stream, in order, of its own incarnation."""

from __future__ import annotations

from actors.runtime.machine import Fail, Note, Run, Send
from actors.worker.jobs import ExecuteStep, LoadModel
from actors.worker.machine import WorkerMachine, WorkerState
from messages.batch import BatchResult, ExecuteBatch, RowResult, StepFailed
from messages.layout import Manifest
from messages.lifecycle import LoadFailed, ModelLoaded, WorkerReady

MANIFEST = Manifest(
    instance="d0",
    incarnation=3,
    rank=1,
    tp_size=2,
    model_fingerprint="f",
    block_size=16,
    block_count=4,
    slot_count=2,
    speculative_tokens=0,
    regions=(),
    tensors=(),
)


def ready_machine() -> WorkerMachine:
    machine = WorkerMachine("d0", 1, 3)
    assert machine.start(0) == [Run(LoadModel())]
    machine.handle(0, "d0.r1/worker", ModelLoaded(manifest=MANIFEST))
    return machine


def batch(step: int, incarnation: int = 3) -> ExecuteBatch:
    return ExecuteBatch(step=step, incarnation=incarnation, rows=())


def test_a_loaded_model_is_announced_through_the_transfer_actor_of_the_node() -> None:
    machine = WorkerMachine("d0", 1, 3)
    machine.start(0)
    effects = machine.handle(0, "d0.r1/worker", ModelLoaded(manifest=MANIFEST))
    assert Send("d0.r1/transfer", WorkerReady(rank=1, incarnation=3, manifest=MANIFEST)) in effects
    assert machine.state is WorkerState.READY


def test_a_refused_checkpoint_fails_the_node_for_good() -> None:
    machine = WorkerMachine("d0", 1, 3)
    machine.start(0)
    assert machine.handle(0, "", LoadFailed(reason="no such model", fatal=True)) == [Fail("no such model", True)]
    assert machine.handle(0, "", batch(1)) == []


def test_steps_run_in_order_and_results_go_to_the_engine() -> None:
    machine = ready_machine()
    for step in (1, 2):
        assert machine.handle(0, "d0.ctl/engine", batch(step)) == [Run(ExecuteStep(batch=batch(step)))]
    result = BatchResult(step=1, incarnation=3, rank=1, rows=())
    assert machine.handle(0, "d0.r1/worker", result) == [Send("d0.ctl/engine", result)]


def test_a_lost_step_fails_the_instance_at_once() -> None:
    machine = ready_machine()
    machine.handle(0, "d0.ctl/engine", batch(1))
    failed, fail = machine.handle(0, "d0.ctl/engine", batch(3))
    assert isinstance(failed, Send) and isinstance(failed.message, StepFailed)
    assert "step 2 was lost" in failed.message.reason
    assert isinstance(fail, Fail) and not fail.fatal
    assert machine.handle(0, "d0.ctl/engine", batch(4)) == []


def test_a_repeated_step_and_another_incarnation_change_nothing() -> None:
    machine = ready_machine()
    machine.handle(0, "d0.ctl/engine", batch(1))
    assert machine.handle(0, "d0.ctl/engine", batch(1)) == []
    assert machine.handle(0, "d0.ctl/engine", batch(2, incarnation=2)) == []
    assert dict(machine.status(0)[0])["late_messages"] == 2
    assert machine.handle(0, "d0.ctl/engine", batch(2)) == [Run(ExecuteStep(batch=batch(2)))]


def test_a_broken_step_is_reported_and_ends_the_node() -> None:
    machine = ready_machine()
    machine.handle(0, "d0.ctl/engine", batch(1))
    broken = StepFailed(step=1, incarnation=3, rank=1, reason="rank 0 did not begin step 1 within 5 ms")
    send, fail = machine.handle(0, "d0.r1/worker", broken)
    assert send == Send("d0.ctl/engine", broken)
    assert isinstance(fail, Fail) and "rank 0" in fail.reason


def test_a_failed_row_is_noted_for_people_and_still_forwarded() -> None:
    machine = ready_machine()
    machine.handle(0, "d0.ctl/engine", batch(1))
    rows = (RowResult(request_id="a", epoch=0, error="bad bootstrap"), RowResult(request_id="b", epoch=0))
    note, send = machine.handle(0, "", BatchResult(step=1, incarnation=3, rank=1, rows=rows))
    assert isinstance(note, Note) and ("request", "a") in note.fields
    assert isinstance(send, Send)
    assert dict(machine.status(0)[0])["row_errors"] == 1
