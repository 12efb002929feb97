"""Shells: machines in real actors of in-process nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from actors.runtime.context import ActorSpec
from actors.runtime.machine import Effect, Fail, Note, Run, Send, StartTimer, StopTimer
from actors.runtime.node import Node
from messages.base import Message
from messages.lifecycle import StatusReport, StatusRequest, Stop
from messages.requests import CancelRequest
from tests.runtime.dummies import WAIT_S, Pool, Scripted, Work, start_node, text
from transport.zmq_sockets import Sockets


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    started: list[Node] = []
    yield started
    for node in started:
        node.close()


def one_node(nodes: list[Node], run_dir: Path, *specs: ActorSpec, **options: object) -> Node:
    nodes.append(start_node(run_dir, "n", *specs, **options))
    return nodes[-1]


def test_actors_of_one_node_talk(nodes: list[Node], run_dir: Path) -> None:
    answering = Scripted(lambda sender, message: [Send(sender, text("answer"))])
    asking = Scripted(begin=[Send("n/answering", text("question"))])
    one_node(nodes, run_dir, ActorSpec("asking", asking), ActorSpec("answering", answering))
    assert asking.wait_for(1) == [("n/answering", text("answer"))]
    assert answering.wait_for(1) == [("n/asking", text("question"))]


def test_a_machine_starts_before_its_first_message(nodes: list[Node], run_dir: Path) -> None:
    """Also when an actor that began earlier is faster."""
    order: list[str] = []

    class Ordered(Scripted):
        def start(self, now_ns: int) -> list[Effect]:
            order.append("start")
            return []

        def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
            order.append("message")
            return super().handle(now_ns, sender, message)

    late = Ordered()
    first = Scripted(begin=[Send("n/late", text("x"))])
    one_node(nodes, run_dir, ActorSpec("first", first), ActorSpec("late", late))
    late.wait_for(1)
    assert order == ["start", "message"]


def test_effects_are_carried_out_in_order(nodes: list[Node], run_dir: Path) -> None:
    other = Scripted()
    machine = Scripted(begin=[Send("n/other", text(str(index))) for index in range(100)])
    one_node(nodes, run_dir, ActorSpec("other", other), ActorSpec("machine", machine))
    assert [message for _, message in other.wait_for(100)] == [text(str(index)) for index in range(100)]


def test_a_timer_comes_back_as_a_message_from_the_actor_itself(nodes: list[Node], run_dir: Path) -> None:
    machine = Scripted(begin=[StartTimer(("t", 1), 5.0, text("due"))])
    one_node(nodes, run_dir, ActorSpec("machine", machine))
    assert machine.wait_for(1) == [("n/machine", text("due"))]


def test_a_replaced_or_stopped_timer_stays_silent(nodes: list[Node], run_dir: Path) -> None:
    machine = Scripted(
        begin=[
            StartTimer(("a",), 0.0, text("replaced")),
            StartTimer(("a",), 1.0, text("second")),
            StartTimer(("b",), 0.0, text("stopped")),
            StopTimer(("b",)),
            StopTimer(("unknown",)),
            StartTimer(("last",), 60.0, text("last")),
        ]
    )
    one_node(nodes, run_dir, ActorSpec("machine", machine))
    assert machine.wait_for(1) == [("n/machine", text("second"))]


def test_a_timer_that_fired_and_is_then_stopped_is_dropped(nodes: list[Node], run_dir: Path) -> None:
    """Its firing lies in the mailbox already when the machine stops it."""
    busy, fired = threading.Event(), threading.Event()

    def react(sender: str, message: Message) -> Sequence[Effect]:
        if message == text("begin"):
            busy.set()
            assert fired.wait(WAIT_S)
            return [StopTimer(("t",)), Send("n/machine", text("end"))]
        return []

    machine = Scripted(react, begin=[StartTimer(("t",), 1.0, text("late")), Send("n/machine", text("begin"))])
    node = one_node(nodes, run_dir, ActorSpec("machine", machine))
    assert busy.wait(WAIT_S)
    node.timers.start(20.0, fired.set)  # on the same thread, after the machine's own
    assert [message for _, message in machine.wait_for(2)] == [text("begin"), text("end")]


@pytest.mark.parametrize("inline", [False, True])
def test_a_job_emits_and_its_result_comes_from_the_actor_itself(nodes: list[Node], run_dir: Path, inline: bool) -> None:
    other, pool = Scripted(), Pool(inline)
    machine = Scripted(begin=[Run(Work(result="done", emits="n/other"))])
    node = one_node(nodes, run_dir, ActorSpec("machine", machine, pool), ActorSpec("other", other))
    assert machine.wait_for(1) == [("n/machine", text("done"))]
    assert other.wait_for(1) == [("n/machine", text("emitted"))]
    node.close()
    assert pool.closed == 1


def test_executors_are_closed_by_whoever_closes_the_node_after_all_actors_have_stopped(
    nodes: list[Node], run_dir: Path
) -> None:
    """Closing one may take long, and actors of other names share the thread."""
    closed: list[tuple[threading.Thread, bool]] = []

    class Slow(Pool):
        def close(self) -> None:
            closed.append((threading.current_thread(), any(ref.is_alive() for _, ref in actors)))

    node = one_node(nodes, run_dir, ActorSpec("a", Scripted(), Slow()), ActorSpec("b", Scripted(), Slow()))
    actors = list(node._actors)
    node.close()
    assert closed == [(threading.current_thread(), False)] * 2


def test_status_is_answered_by_the_shell(nodes: list[Node], run_dir: Path) -> None:
    machine, asking = Scripted(), Scripted(begin=[Send("n/machine", StatusRequest(reply_to="n/asking", tag="7"))])
    one_node(nodes, run_dir, ActorSpec("machine", machine), ActorSpec("asking", asking))
    assert asking.wait_for(1)[0][1] == StatusReport(
        address="n/machine",
        incarnation=1,
        tag="7",
        values=(("seen", 0),),
        requests=(("r1", 1, "decoding", "d0", 5),),
    )
    assert machine.seen == []


@pytest.mark.parametrize(
    ("effects", "fatal", "reason"),
    [
        ([Fail("gave up")], False, "gave up"),
        ([Fail("never again", fatal=True)], True, "never again"),
        ([Run(Work(result="x"))], False, "has no executor for Work"),
        (["nonsense"], False, "str is not an effect"),
    ],
)
def test_a_failed_actor_ends_its_node_with_the_reason(
    nodes: list[Node], run_dir: Path, effects: list[Effect], fatal: bool, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    node = one_node(nodes, run_dir, ActorSpec("machine", Scripted(begin=effects)))
    assert node.wait() == "machine failed"
    assert node.exit_code == (78 if fatal else 70)
    assert reason in capfd.readouterr().err


def test_an_exception_in_a_machine_says_where_and_nothing_more_is_handled(
    nodes: list[Node], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handled: list[Message] = []

    def react(sender: str, message: Message) -> Sequence[Effect]:
        handled.append(message)
        raise ValueError("no such block")

    node = one_node(nodes, run_dir, ActorSpec("machine", Scripted(react)))
    node.post("tester", "n/machine", text("first"))
    node.post("tester", "n/machine", text("second"))
    assert node.wait() == "machine failed"
    node.close()
    assert handled == [text("first")]
    assert "ValueError: no such block (test_shell.py:" in capfd.readouterr().err


def test_an_executor_that_raises_ends_the_node(nodes: list[Node], run_dir: Path) -> None:
    machine = Scripted(begin=[Run(Work(result="x", raises=True))])
    node = one_node(nodes, run_dir, ActorSpec("machine", machine, Pool()))
    assert node.wait() == "machine failed"


def test_a_note_is_one_line_with_its_fields(
    nodes: list[Node], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    note = Note("info", "merged", (("bytes", 3), ("why", "a b"), ("ms", 1.5)))
    machine = Scripted(begin=[note, Note("debug", "hidden"), Send("n/machine", text("end"))])
    one_node(nodes, run_dir, ActorSpec("machine", machine), log_level="info")
    machine.wait_for(1)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ['info n/machine merged bytes=3 why="a b" ms=1.5']


def test_the_trace_names_cause_request_and_epoch(nodes: list[Node], run_dir: Path) -> None:
    other = Scripted()

    def react(sender: str, message: Message) -> Sequence[Effect]:
        return [Send("n/other", text("caused")), Send("n/other", CancelRequest(request_id="r2", epoch=9))]

    machine = Scripted(react)
    node = one_node(nodes, run_dir, ActorSpec("machine", machine), ActorSpec("other", other))
    node.post("tester", "n/machine", CancelRequest(request_id="r1", epoch=3))
    other.wait_for(2)
    sent = {entry[3].to + type(entry[3].message).__name__: entry[3] for entry in node.recorder.entries() if entry[3]}
    cause, caused, own = sent["n/machineCancelRequest"], sent["n/otherStop"], sent["n/otherCancelRequest"]
    assert (cause.parent_id, cause.trace_id, cause.epoch) == ("", "r1", 3)
    assert (caused.parent_id, caused.trace_id, caused.epoch) == (cause.message_id, "r1", 3)
    assert (own.parent_id, own.trace_id, own.epoch) == (cause.message_id, "r2", 9)
    assert len({envelope.message_id for envelope in sent.values()}) == len(sent)
    assert cause.message_id.startswith("n#1.")


def test_mail_for_an_actor_that_is_not_there_is_said_and_dropped(
    nodes: list[Node], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = one_node(nodes, run_dir, ActorSpec("machine", Scripted()), log_level="warning")
    node.post("tester", "n/nobody", text("x"))
    assert "no_such_actor actor=nobody message=Stop" in capfd.readouterr().err
    assert node.office.dropped_unknown == 1


def test_two_actors_of_one_name_are_refused(nodes: list[Node], run_dir: Path) -> None:
    with pytest.raises(ValueError, match="two actors have one name"):
        start_node(run_dir, "n", ActorSpec("x", Scripted()), ActorSpec("x", Scripted()))


def test_stop_is_taken_by_the_node_itself(nodes: list[Node], run_dir: Path) -> None:
    node = one_node(nodes, run_dir, ActorSpec("machine", Scripted(begin=[Send("n/node", Stop(reason="enough"))])))
    assert node.wait() == "enough"
    assert node.exit_code == 0


def test_all_actors_of_a_node_take_turns_on_one_thread(nodes: list[Node], run_dir: Path) -> None:
    threads: set[threading.Thread] = set()

    def react(sender: str, message: Message) -> Sequence[Effect]:
        threads.add(threading.current_thread())
        return [Send(sender, text("answer"))] if message == text("question") else []

    names = [f"a{index}" for index in range(4)]
    machines = [Scripted(react, begin=[Send(f"n/{name}", text("question")) for name in names]) for _ in names]
    node = one_node(nodes, run_dir, *map(ActorSpec, names, machines))
    for machine in machines:
        machine.wait_for(2 * len(names))
    node.post("test", "n/a0", text("from another thread"))
    machines[0].wait_for(2 * len(names) + 1)
    assert len(threads) == 1 and threading.current_thread() not in threads


def test_an_actor_that_keeps_itself_busy_lets_others_and_the_links_have_their_turn(
    nodes: list[Node], run_dir: Path
) -> None:
    over = threading.Event()

    def go_on(sender: str, message: Message) -> Sequence[Effect]:
        return [] if over.is_set() else [Send("n/busy", message)]

    busy = Scripted(go_on, begin=[Send("n/busy", text("again"))] * 100)
    other = Scripted(lambda sender, message: [Send(sender, message)])
    asking = Scripted(begin=[Send("n/other", text("are you there?"))])
    one_node(nodes, run_dir, ActorSpec("busy", busy), ActorSpec("other", other))
    nodes.append(start_node(run_dir, "m", ActorSpec("asking", asking)))
    assert asking.wait_for(1) == [("n/other", text("are you there?"))]
    over.set()


def test_what_many_threads_post_at_once_is_handled_once_each_in_each_threads_order(
    nodes: list[Node], run_dir: Path
) -> None:
    machine = Scripted()
    node = one_node(nodes, run_dir, ActorSpec("machine", machine))

    def post(name: int) -> None:
        for index in range(500):
            node.post(f"t{name}", "n/machine", text(str(index)))

    threads = [threading.Thread(target=post, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = machine.wait_for(2000)
    for name in range(4):
        assert [message for sender, message in seen if sender == f"n/t{name}"] == [text(str(i)) for i in range(500)]


def test_a_node_whose_links_failed_still_closes_its_actors(
    nodes: list[Node], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool()
    node = one_node(nodes, run_dir, ActorSpec("machine", Scripted(), pool))

    def broken(*_: object) -> int:
        raise OSError("no more sockets")

    monkeypatch.setattr(Sockets, "cool", broken)
    node.post("test", "n/machine", text("wake up"))
    assert "links failed" in node.wait()
    node.close()
    assert pool.closed == 1
