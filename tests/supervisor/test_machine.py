"""The supervisor's rules, without a process and without waiting."""

from __future__ import annotations

import pytest

from actors.supervisor.units import unit_of
from messages.cluster import InstanceLost, ViewRequest
from messages.lifecycle import Drain, Drained, NodeProgress, NodeReady, ProcessExited, Stop, TreeEnded, TreeReady
from tests.supervisor.pretend import GATEWAY, Pretend, make_plan


def serving(topology: str = "P2/D1", **options: object) -> Pretend:
    tree = Pretend(topology, **options)
    tree.all_ready()
    assert tree.value("phase") == "serving"
    return tree


def test_every_node_is_started_with_its_place_in_the_tree() -> None:
    tree = Pretend("P2/D1", threads_per_rank=3)
    configs = {config.node: config for config in tree.started}
    assert set(configs) == {"front", "p0.ctl", "p0.r0", "p0.r1", "d0.ctl", "d0.r0"}
    rank = configs["p0.r1"]
    assert (rank.instance, rank.role, rank.rank, rank.tp_size, rank.incarnation) == ("p0", "PREFILL", 1, 2, 1)
    assert (rank.threads, configs["p0.ctl"].threads) == (3, 1)
    assert (configs["front"].instance, configs["front"].role) == ("", "")
    for config in tree.started:
        assert dict(config.incarnations) == dict.fromkeys(configs, 1)


def test_cores_are_shared_evenly_among_ranks_and_never_less_than_one() -> None:
    assert make_plan("P2/D1", cpu_count=8).threads_per_rank == 2
    assert make_plan("P4/D4", cpu_count=2).threads_per_rank == 1


def test_tree_is_ready_once_every_node_is_up_and_every_instance_registered() -> None:
    tree = Pretend("P2/D1")
    tree.ready("p0.r0", "p0.r1", "p0.ctl", "d0.ctl", "d0.r0")
    assert not tree.sent_of(TreeReady)
    tree.ready("front")
    assert not tree.sent_of(TreeReady), "nobody has seen the instances register yet"
    tree.advance(150)
    assert [message for _, message in tree.sent_of(TreeReady)] == [TreeReady(url="http://127.0.0.1:8000")]
    asked = len(tree.sent_of(ViewRequest))
    tree.healthy()
    tree.advance(1_000)
    assert len(tree.sent_of(TreeReady)) == 1
    assert len(tree.sent_of(ViewRequest)) == asked, "the registry is asked only while somebody waits"


def test_progress_of_a_start_reaches_the_console() -> None:
    tree = Pretend()
    tree.tell(NodeProgress(node="p0.r0", incarnation=1, what="weights", done=3, total=10))
    tree.tell(NodeProgress(node="p0.r0", incarnation=7, what="weights", done=4, total=10))
    assert [(to, message.done) for to, message in tree.sent if isinstance(message, NodeProgress)] == [
        ("supervisor/console", 3)
    ]


def test_a_lost_rank_takes_its_whole_instance_and_only_that() -> None:
    tree = serving()
    tree.exit("p0.r1")
    assert sorted(tree.killed) == ["p0.ctl", "p0.r0"]
    assert set(tree.alive) == {"front", "d0.ctl", "d0.r0"}
    assert [message for _, message in tree.sent_of(InstanceLost)] == [
        InstanceLost(instance="p0", incarnation=1, reason="p0.r1 was killed by signal 9")
    ]
    tree.advance(250)
    assert [(c.node, c.incarnation) for c in tree.started[6:]] == [("p0.r0", 2), ("p0.r1", 2), ("p0.ctl", 2)]
    assert dict(tree.started[6].incarnations)["d0.r0"] == 1
    tree.all_ready()
    assert tree.value("unit.p0.state") == "running"
    assert len(tree.sent_of(TreeReady)) == 1


def test_loss_is_announced_only_after_the_last_process_ended_and_cleaning_comes_before_restart() -> None:
    tree = serving()
    tree.immortal = {"p0.r0"}
    tree.exit("p0.r1")
    tree.advance(1_000)
    assert not tree.sent_of(InstanceLost), "p0.r0 may still write"
    assert tree.value("unit.p0.state") == "failing"
    tree.exit("p0.r0")
    tree.advance(1_000)
    tail = [step for step in tree.order if step != "ViewRequest front/registry"]
    tail = tail[tail.index("exit p0.r0") :]
    assert tail[1:4] == ["InstanceLost front/registry", "clean p0", "start p0.r0"] or tail[1:4] == [
        "clean p0",
        "InstanceLost front/registry",
        "start p0.r0",
    ]


def test_front_restarts_alone_and_is_told_who_was_lost_before() -> None:
    tree = serving("P1/D1")
    tree.exit("d0.r0")
    tree.advance(250)
    tree.all_ready()
    tree.exit("front")
    assert set(tree.alive) == {"p0.ctl", "p0.r0", "d0.ctl", "d0.r0"}
    told = [to for to, message in tree.sent_of(InstanceLost) if message.instance == "front"]
    assert sorted(told) == ["d0.ctl/scheduler", "p0.ctl/scheduler"]
    tree.sent.clear()
    tree.advance(500)
    tree.ready("front")
    assert [(to, message.instance, message.incarnation) for to, message in tree.sent_of(InstanceLost)] == [
        ("front/registry", "d0", 1)
    ]
    assert tree.value("unit.front.incarnation") == 2


def test_front_that_chose_a_free_port_keeps_it_in_its_next_life() -> None:
    tree = serving("TP1", port=0)
    tree.exit("front")
    tree.advance(250)
    assert [config.options.port for config in tree.started if config.node == "front"] == [0, 8000]


def test_silent_node_is_a_hang_and_kills_its_instance() -> None:
    tree = serving(hang_timeout_ms=3_000)
    for _ in range(4):
        tree.advance(1_000)
        tree.healthy("front", "p0.ctl", "p0.r0", "p0.r1", "d0.ctl")
    tree.advance(600)
    assert unit_of(tree.killed[0]) == "d0"
    assert "d0.r0 hangs: no sign of life" in str(tree.value("unit.d0.last_failure"))
    assert "hang_timeout_ms" in str(tree.value("unit.d0.last_failure"))
    assert {"front", "p0.ctl", "p0.r0", "p0.r1"} <= set(tree.alive)


def test_a_supervisor_that_was_stopped_itself_blames_nobody() -> None:
    tree = serving(heartbeat_ms=500, hang_timeout_ms=3_000)
    tree.healthy()
    tree.sleep(60_000)  # a suspended host
    tree.advance(600)
    assert not tree.killed
    for _ in range(5):
        tree.healthy("front", "p0.ctl", "p0.r0", "p0.r1", "d0.ctl")
        tree.advance(700)
    assert {unit_of(node) for node in tree.killed} == {"d0"}  # who does not wake up is missed as ever


def test_start_that_takes_too_long_is_a_failure_that_names_who_is_missing() -> None:
    tree = Pretend("TP1", start_timeout_ms=5_000)
    tree.ready("front", "m0.ctl")
    for _ in range(6):
        tree.healthy("front")
        tree.advance(900)
    assert "waiting for m0.r0 (option: start_timeout_ms)" in str(tree.value("unit.m0.last_failure"))
    assert tree.incarnation("m0.r0") == 2


def test_restarts_back_off_and_end_the_tree_when_there_are_too_many() -> None:
    tree = serving("TP1", restarts_max=3, restart_backoff_ms=100.0, restart_window_ms=60_000)
    for attempt in range(3):
        tree.exit("m0.r0")
        tree.advance(100 * 2**attempt - 1)
        assert "m0.r0" not in tree.alive
        tree.advance(2)
        assert "m0.r0" in tree.alive
        tree.ready("m0.r0", "m0.ctl")
        tree.advance(200)
    tree.exit("m0.r0", exit_code=1, last_words="MemoryError")
    assert not tree.alive
    (ended,) = [message for _, message in tree.sent_of(TreeEnded)]
    assert isinstance(ended, TreeEnded) and ended.failed
    assert "m0 failed 4 times within 60000 ms" in ended.reason
    assert "restarts_max (3)" in ended.reason and "exit code 1: MemoryError" in ended.reason


def test_failures_outside_the_window_do_not_count() -> None:
    tree = serving("TP1", restarts_max=1, restart_window_ms=10_000, restart_backoff_ms=10.0)
    for _ in range(5):
        tree.exit("m0.ctl")
        tree.advance(200)
        tree.all_ready()
        for _ in range(12):
            tree.healthy()
            tree.advance(1_000)
    assert tree.value("phase") == "serving"
    assert tree.value("restarts") == 5


def test_impossible_configuration_ends_the_tree_at_once_with_its_reason() -> None:
    tree = Pretend("P2/D1")
    tree.fail("d0.ctl", "staging_mb 1 holds no lease; raise staging_mb", fatal=True)
    (ended,) = [message for _, message in tree.sent_of(TreeEnded)]
    assert isinstance(ended, TreeEnded) and ended.failed
    assert ended.reason == "d0 cannot start: d0.ctl/worker: staging_mb 1 holds no lease; raise staging_mb"
    assert not tree.alive
    assert len(tree.started) == 6, "nothing was started again"


@pytest.mark.parametrize("when", ["before", "after"])
def test_reason_of_a_failure_counts_whether_it_arrives_before_or_after_the_exit(when: str) -> None:
    tree = Pretend("TP1", restart_backoff_ms=500.0)
    if when == "before":
        tree.fail("m0.r0", "no such file", fatal=True)
    else:
        tree.exit("m0.r0", exit_code=1)
        tree.advance(100)
        tree.fail("m0.r0", "no such file", fatal=True)
    assert tree.value("phase") == "ended"
    assert [message.reason for _, message in tree.sent_of(TreeEnded)] == [  # type: ignore[attr-defined]
        "m0 cannot start: m0.r0/worker: no such file"
    ]


def test_stop_drains_the_gateway_then_schedulers_then_stops_every_node_and_cleans() -> None:
    tree = serving("P1/D1", drain_timeout_ms=2_000)
    tree.undrainable = {GATEWAY}
    tree.tell(Stop(reason="SIGTERM"))
    assert [to for to, _ in tree.sent_of(Drain)] == [GATEWAY]
    assert not tree.sent_of(Stop)
    tree.tell(Drained(node="front", actor="gateway"))
    assert {to for to, _ in tree.sent_of(Drain)} == {GATEWAY, "p0.ctl/scheduler", "d0.ctl/scheduler"}
    assert {to for to, _ in tree.sent_of(Stop)} == {
        f"{node}/node" for node in ("front", "p0.ctl", "p0.r0", "d0.ctl", "d0.r0")
    }
    assert not tree.alive and not tree.killed
    assert tree.cleaned[-1] == ""
    assert [message for _, message in tree.sent_of(TreeEnded)] == [TreeEnded(reason="SIGTERM")]
    assert not tree.sent_of(InstanceLost)


def test_drain_that_does_not_finish_is_cut_off_at_its_deadline() -> None:
    tree = serving("P1/D1", drain_timeout_ms=2_000)
    tree.undrainable = {GATEWAY}
    tree.tell(Stop(reason="SIGTERM"))
    tree.advance(2_000)
    assert tree.alive
    tree.advance(1_100)
    assert not tree.alive and tree.value("phase") == "ended"


def test_second_stop_does_not_wait_for_the_drain() -> None:
    tree = serving("P1/D1")
    tree.undrainable = {GATEWAY}
    tree.tell(Stop(reason="SIGINT"))
    tree.tell(Stop(reason="SIGINT"))
    assert tree.value("phase") == "ended"


def test_node_that_ignores_stop_is_killed() -> None:
    tree = serving("P1/D1")
    tree.stubborn = {"d0.r0"}
    tree.tell(Stop(reason="SIGTERM"))
    assert set(tree.alive) == {"d0.r0"}
    tree.advance(5_000)
    assert tree.killed == ["d0.r0"]
    assert tree.value("phase") == "ended"


def test_stop_while_starting_kills_what_cannot_listen_yet() -> None:
    tree = Pretend("P1/D1")
    tree.ready("p0.ctl")
    tree.tell(Stop(reason="SIGINT"))
    assert [to for to, _ in tree.sent_of(Stop)] == ["p0.ctl/node"]
    assert sorted(tree.killed) == ["d0.ctl", "d0.r0", "front", "p0.r0"]
    assert tree.value("phase") == "ended"


@pytest.mark.parametrize("victim", ["front", "p0.r0", "d0.ctl"])
def test_death_during_the_drain_restarts_nothing_and_still_ends(victim: str) -> None:
    tree = serving("P1/D1", drain_timeout_ms=2_000)
    tree.undrainable = {GATEWAY, "p0.ctl/scheduler", "d0.ctl/scheduler"}
    tree.tell(Stop(reason="SIGTERM"))
    tree.exit(victim)
    tree.advance(10_000)
    assert tree.value("phase") == "ended"
    assert len(tree.started) == 5


def test_instance_that_waits_for_its_restart_when_the_tree_stops_stays_down() -> None:
    tree = serving("P1/D1", restart_backoff_ms=5_000.0)
    tree.exit("d0.r0")
    tree.tell(Stop(reason="SIGTERM"))
    tree.advance(20_000)
    assert tree.value("phase") == "ended"
    assert len(tree.started) == 5


def test_words_from_an_earlier_life_change_nothing() -> None:
    tree = serving("P1/D1")
    tree.exit("d0.r0")
    tree.advance(300)
    before = tree.machine.status(tree.now_ns)
    tree.tell(NodeReady(node="d0.r0", incarnation=1, pid=1))
    tree.tell(ProcessExited(node="d0.ctl", incarnation=1, exit_code=0))
    tree.tell(NodeReady(node="nobody.r0", incarnation=1, pid=1))
    assert tree.machine.status(tree.now_ns) == before


def test_status_names_processes_with_their_figures() -> None:
    tree = serving("TP1")
    tree.healthy()
    assert tree.value("node.m0.r0.rss_bytes") == 50_000_000
    assert tree.value("node.m0.r0.threads") == 4
    assert tree.value("unit.m0.role") == "MIX"
    assert tree.value("url") == "http://127.0.0.1:8000"


def test_tree_is_ready_only_once_every_link_is_made() -> None:
    tree = Pretend("P1x2/D1x2")
    tree.unlinked = {("p0", "d0"), ("p0", "d1"), ("p1", "d1")}
    tree.all_ready()
    assert tree.value("phase") == "starting"
    assert tree.value("links_awaited") == "p0 with d0, p0 with d1, p1 with d1"
    tree.unlinked = {("p1", "d1")}
    tree.advance(150)
    assert not tree.sent_of(TreeReady), "p1 might offer to d1 and be refused"
    tree.unlinked = set()
    tree.advance(150)
    assert len(tree.sent_of(TreeReady)) == 1
    assert (tree.value("phase"), tree.value("links_awaited")) == ("serving", "")


def test_links_that_take_long_are_asked_for_ever_less_often() -> None:
    tree = Pretend("P1/D1")
    tree.unlinked = {("p0", "d0")}
    tree.all_ready()
    before = len(tree.sent_of(ViewRequest))
    tree.advance(100)
    soon = len(tree.sent_of(ViewRequest)) - before
    tree.advance(10_000)
    before = len(tree.sent_of(ViewRequest))
    tree.advance(1_000)
    assert len(tree.sent_of(ViewRequest)) - before <= 11
    assert soon >= 3, "a link that is made at once is seen at once"
    tree.unlinked = set()
    tree.advance(150)
    assert tree.value("phase") == "serving"


def test_a_refused_link_is_told_and_awaited_no_longer_while_others_serve() -> None:
    tree = Pretend("P1/D1x2")
    tree.unlinked = {("p0", "d1")}
    tree.refused = {("p0", "d0"): "block sizes differ: 16 and 32"}
    tree.all_ready()
    assert tree.value("phase") == "starting"
    tree.unlinked = set()
    tree.advance(500)
    assert tree.value("phase") == "serving"
    told = [note.event for note in tree.notes if note.level == "error"]
    assert told == ["link of p0 with d0 refused: block sizes differ: 16 and 32"], "once"


def test_a_prefill_instance_that_nobody_links_ends_the_start_with_the_reasons() -> None:
    tree = Pretend("P1x2/D1x2")
    tree.refused = {("p1", "d0"): "block sizes differ", ("p1", "d1"): "ranks [0] did not answer"}
    tree.all_ready()
    assert not tree.sent_of(TreeReady)
    (_, end) = tree.sent_of(TreeEnded)[0]
    assert isinstance(end, TreeEnded) and end.failed
    assert end.reason == (
        "p1 can hand over to no decode instance; links refused by d0: block sizes differ; d1: ranks [0] did not answer"
    )


def test_links_that_break_later_do_not_end_a_tree_that_serves() -> None:
    tree = serving("P1/D1")
    tree.refused = {("p0", "d0"): "d0 came back with other block sizes"}
    tree.exit("d0.r0")
    tree.advance(250)
    tree.all_ready()
    assert tree.value("phase") == "serving"
    assert any(note.event.startswith("link of p0 with d0 refused") for note in tree.notes)
