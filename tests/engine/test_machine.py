"""One command becomes one per rank; the ranks' answers become one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest

from actors.engine.machine import EngineMachine, EngineSettings
from actors.runtime.machine import Effect, Fail, Send, StartTimer, StopTimer
from messages.base import Message, control_address, rank_address
from messages.batch import BatchResult, BatchRow, ExecuteBatch, RowResult, StepFailed
from messages.cluster import LinkFailed, LinkPeer, PeerLinked, PeerUnlinked, UnlinkPeer
from messages.handoff import RankLease
from messages.lifecycle import EngineReady, WorkerReady
from messages.transfer import (
    AllRestored,
    ClosePush,
    LeasesRefused,
    LeasesReserved,
    OpenPush,
    OpenReceive,
    PullKVCache,
    PushClosed,
    PushFailed,
    ReceiveOpened,
    ReceiveRefused,
    ReceiveReleased,
    ReleaseReceive,
    ReserveLeases,
    Restored,
    RestoreFailed,
)
from tests.scheduler.harness import info, manifest

M = TypeVar("M", bound=Message)
SCHEDULER = control_address("d0", "scheduler")


class Harness:
    """One engine of two ranks and everything it has said."""

    def __init__(self, tp_size: int = 2, *, ready: bool = True, **changes: Any) -> None:
        settings = replace(EngineSettings(instance="d0", incarnation=1, tp_size=tp_size), **changes)
        self.machine = EngineMachine(settings)
        self.now_ns = 1_000_000_000
        self.sent: list[Send] = []
        self.failures: list[Fail] = []
        self.timers: dict[tuple[str | int, ...], tuple[int, Message]] = {}
        if ready:
            for rank in range(tp_size):
                self.rank_ready(rank)
            self.one(EngineReady)

    def rank_ready(self, rank: int, **changes: Any) -> None:
        own = manifest("d0", rank=rank, tp_size=2, **changes)
        self.tell(WorkerReady(rank=rank, incarnation=1, manifest=own), self.transfer(rank))

    def transfer(self, rank: int) -> str:
        return rank_address("d0", rank, "transfer")

    def tell(self, message: Message, sender: str = SCHEDULER) -> None:
        self.now_ns += 1000
        effects: list[Effect] = self.machine.handle(self.now_ns, sender, message)
        for effect in effects:
            match effect:
                case Send():
                    self.sent.append(effect)
                case StartTimer():
                    self.timers[effect.key] = (self.now_ns + int(effect.delay_ms * 1e6), effect.message)
                case StopTimer():
                    self.timers.pop(effect.key, None)
                case Fail():
                    self.failures.append(effect)
                case _:
                    pass

    def fire(self, purpose: str) -> None:
        key = next(key for key in self.timers if key[0] == purpose)
        due, message = self.timers.pop(key)
        self.now_ns = due
        self.tell(message, control_address("d0", "engine"))

    def take(self, kind: type[M]) -> list[tuple[str, M]]:
        taken = [(send.to, send.message) for send in self.sent if isinstance(send.message, kind)]
        self.sent = [send for send in self.sent if not isinstance(send.message, kind)]
        return taken

    def one(self, kind: type[M]) -> M:
        """The only message of ``kind``; it went to the scheduler."""
        ((to, message),) = self.take(kind)
        assert to == SCHEDULER
        return message

    def fanned_out(self, kind: type[M], actor: str = "transfer") -> M:
        """One message of ``kind`` to each rank."""
        taken = self.take(kind)
        assert [to for to, _ in taken] == [rank_address("d0", rank, actor) for rank in range(2)]
        assert taken[0][1] == taken[1][1]
        return taken[0][1]

    def none(self, kind: type[Message]) -> None:
        assert not self.take(kind)


def batch(step: int = 1, incarnation: int = 1) -> ExecuteBatch:
    row = BatchRow(request_id="a", epoch=0, token_ids=(1, 2), start=0, block_ids=(0,), samples=True)
    return ExecuteBatch(step=step, incarnation=incarnation, rows=(row,))


def result(rank: int, step: int = 1, token: int = 7, incarnation: int = 1, **fields: Any) -> BatchResult:
    row = RowResult(request_id="a", epoch=0, token_ids=(token,), **fields)
    return BatchResult(step=step, incarnation=incarnation, rank=rank, rows=(row,), forward_ms=float(rank))


def key(epoch: int = 0) -> dict[str, Any]:
    return {"request_id": "a", "epoch": epoch}


def reserve() -> ReserveLeases:
    return ReserveLeases(
        **key(),
        source_instance="p0",
        source_incarnation=1,
        mode="PUSH",
        target_block_ids=(0, 1),
        target_slot=0,
        prompt_tokens=5,
    )


def opened(harness: Harness) -> None:
    """A receive that every rank opened."""
    harness.tell(reserve())
    harness.fanned_out(OpenReceive)
    for rank in (1, 0):
        lease = RankLease(target_rank=rank, generation=rank + 1)
        harness.tell(ReceiveOpened(**key(), rank=rank, lease=lease), harness.transfer(rank))
    reserved = harness.one(LeasesReserved)
    assert [lease.target_rank for lease in reserved.leases] == [0, 1]


def pull() -> PullKVCache:
    return PullKVCache(
        **key(),
        source_instance="p0",
        source_incarnation=1,
        source_block_ids=(0, 1),
        source_slot=0,
        chunk_count=1,
        computed_tokens=5,
    )


def restored(rank: int) -> Restored:
    return Restored(
        **key(),
        rank=rank,
        bytes_moved=10,
        push_ms=rank,
        pull_ms=2,
        merge_ms=3,
        sync_ms=4,
        bytes_by_role=(("target.KEY", 6), ("target.SSM", 4)),
    )


# -- readiness ---------------------------------------------------------------------------------------------------


def test_it_is_ready_when_every_rank_is_and_only_once() -> None:
    harness = Harness(ready=False)
    harness.rank_ready(1)
    harness.none(EngineReady)
    harness.rank_ready(1)
    harness.none(EngineReady)
    harness.rank_ready(0)
    ready = harness.one(EngineReady)
    assert [m.rank for m in ready.manifests] == [0, 1]
    harness.rank_ready(0)
    harness.none(EngineReady)


def test_a_worker_of_a_former_life_does_not_count() -> None:
    harness = Harness(ready=False)
    harness.tell(WorkerReady(rank=0, incarnation=0, manifest=manifest("d0")))
    harness.rank_ready(1)
    harness.none(EngineReady)


def test_ranks_that_disagree_on_capacities_never_start() -> None:
    harness = Harness(ready=False)
    harness.rank_ready(0, block_count=16)
    harness.rank_ready(1, block_count=15)
    (failure,) = harness.failures
    assert failure.fatal and "block_count: 16 and 15" in failure.reason


# -- steps -------------------------------------------------------------------------------------------------------


def test_a_step_goes_to_every_rank_and_comes_back_as_rank_0s_result() -> None:
    harness = Harness()
    harness.tell(batch())
    harness.fanned_out(ExecuteBatch, "worker")
    harness.tell(result(1))
    harness.none(BatchResult)
    harness.tell(result(0))
    merged = harness.one(BatchResult)
    assert (merged.rank, merged.rows[0].token_ids, merged.forward_ms) == (0, (7,), 1.0)
    assert not harness.timers


def test_ranks_that_sample_different_tokens_end_the_instance() -> None:
    harness = Harness()
    harness.tell(batch())
    harness.tell(result(0))
    harness.tell(result(1, token=8))
    assert "sampled (8,), rank 0 sampled (7,)" in harness.one(StepFailed).reason
    (failure,) = harness.failures
    assert "step 1" in failure.reason and "rank 1" in failure.reason and not failure.fatal
    harness.none(BatchResult)


def test_a_rank_that_returns_other_rows_ends_the_instance() -> None:
    harness = Harness()
    harness.tell(batch())
    harness.tell(result(0))
    harness.tell(msgspec.structs.replace(result(1), rows=()))
    assert harness.failures


def test_a_row_that_failed_on_one_rank_failed_on_all_and_the_instance_lives() -> None:
    harness = Harness()
    harness.tell(batch())
    harness.tell(result(0))
    harness.tell(result(1, error="bad bootstrap"))
    assert harness.one(BatchResult).rows[0].error == "bad bootstrap"
    assert not harness.failures


def test_a_broken_step_ends_the_instance() -> None:
    harness = Harness()
    harness.tell(batch())
    harness.tell(StepFailed(step=1, incarnation=1, rank=1, reason="peer left the collective"))
    assert harness.one(StepFailed).reason == "peer left the collective"
    assert harness.failures


def test_a_rank_that_does_not_answer_ends_the_instance_in_bounded_time() -> None:
    harness = Harness()
    harness.tell(batch())
    harness.tell(result(0))
    harness.fire("step")
    (failure,) = harness.failures
    assert "ranks [1] did not answer" in failure.reason


def test_a_step_that_was_sent_ahead_ends_after_the_one_before_it_whoever_answers_first() -> None:
    harness = Harness()
    harness.tell(batch(1))
    harness.tell(batch(2))
    assert [message.step for _, message in harness.take(ExecuteBatch)] == [1, 1, 2, 2]
    harness.tell(result(1, 1))
    harness.tell(result(1, 2, token=8))
    harness.none(BatchResult)
    harness.tell(result(0, 2, token=8))  # overtook the one before it
    harness.none(BatchResult)
    harness.tell(result(0, 1))
    merged = [message for _, message in harness.take(BatchResult)]
    assert [(message.step, message.rows[0].token_ids) for message in merged] == [(1, (7,)), (2, (8,))]
    assert not harness.timers and not harness.failures


def test_each_of_two_steps_in_flight_has_its_own_time() -> None:
    harness = Harness(step_timeout_ms=1000.0)
    harness.tell(batch(1))
    begun_ns = harness.now_ns
    harness.tell(batch(2))
    harness.now_ns += 900_000_000
    for rank in range(2):
        harness.tell(result(rank, 1))
    (due_ns, _), *others = harness.timers.values()
    assert due_ns - begun_ns > 1_800_000_000 and not others
    harness.fire("step")
    (failure,) = harness.failures
    assert "step 2" in failure.reason and "ranks [0, 1] did not answer" in failure.reason


def test_ranks_that_disagree_in_one_step_end_nothing_else() -> None:
    harness = Harness()
    harness.tell(batch(1))
    harness.tell(batch(2))
    for message in (result(1, 1, token=8), result(1, 2), result(0, 2), result(0, 1)):
        harness.tell(message)
    assert harness.one(StepFailed).step == 1
    harness.none(BatchResult)
    assert len(harness.failures) == 1


@pytest.mark.parametrize("everybody", [False, True])
def test_a_row_that_failed_on_one_rank_only_ends_the_instance_when_a_step_was_sent_ahead(everybody: bool) -> None:
    harness = Harness()
    harness.tell(batch(1))
    harness.tell(batch(2))
    harness.tell(result(0, 1, error="out of memory" if everybody else ""))
    harness.tell(result(1, 1, error="out of memory"))
    assert bool(harness.failures) is not everybody
    if everybody:
        assert harness.one(BatchResult).rows[0].error == "out of memory"
    else:
        assert "out of memory" in harness.failures[0].reason and "rank 1" in harness.failures[0].reason


@pytest.mark.parametrize("silent", [False, True])
def test_what_a_step_behind_a_broken_one_brings_is_dropped(silent: bool) -> None:
    harness = Harness()
    harness.tell(batch(1))
    harness.tell(batch(2))
    harness.tell(result(0, 2))
    if silent:
        harness.fire("step")
    else:
        harness.tell(StepFailed(step=1, incarnation=1, rank=1, reason="peer left the collective"))
    assert harness.one(StepFailed).step == 1
    for message in (result(1, 2), result(0, 1), result(1, 1)):
        harness.tell(message)
    harness.none(BatchResult)
    assert len(harness.failures) == 1


def test_late_results_and_doubled_commands_change_nothing() -> None:
    harness = Harness()
    harness.tell(batch(1))
    harness.tell(batch(1))
    harness.fanned_out(ExecuteBatch, "worker")
    harness.tell(result(0))
    harness.tell(result(0, token=9))
    harness.tell(result(1, incarnation=0))
    harness.tell(result(1, step=2))
    harness.none(BatchResult)
    harness.tell(result(1))
    harness.one(BatchResult)
    harness.tell(result(1))
    harness.tell(batch(1))
    harness.tell(batch(2, incarnation=0))
    assert not harness.sent and not harness.failures


# -- links and pushes --------------------------------------------------------------------------------------------


def test_a_link_is_up_when_every_rank_has_it_and_carries_both_sides_manifests() -> None:
    harness = Harness()
    harness.tell(LinkPeer(peer=info("p0", "PREFILL")))
    request = harness.fanned_out(LinkPeer)
    assert [m.rank for m in request.own_manifests] == [0, 1]
    for rank in (0, 0, 1):
        harness.none(PeerLinked)
        harness.tell(PeerLinked(instance="p0", incarnation=1, rank=rank))
    assert harness.one(PeerLinked).rank == -1
    assert not harness.timers


def test_a_refused_plan_fails_the_link_once_with_its_reason() -> None:
    harness = Harness()
    harness.tell(LinkPeer(peer=info("p0", "PREFILL")))
    harness.take(LinkPeer)
    for rank in (0, 1):
        harness.tell(LinkFailed(instance="p0", incarnation=1, rank=rank, reason="target.3.KEY: gap"))
    assert harness.one(LinkFailed).reason == "target.3.KEY: gap"
    harness.tell(PeerLinked(instance="p0", incarnation=1, rank=1))
    assert not harness.sent


def test_a_link_that_nobody_answers_fails_in_bounded_time() -> None:
    harness = Harness()
    harness.tell(LinkPeer(peer=info("p0", "PREFILL")))
    harness.tell(PeerLinked(instance="p0", incarnation=1, rank=0))
    harness.fire("link")
    assert "ranks [1]" in harness.one(LinkFailed).reason


def test_unlink_is_repeated_until_every_rank_has_heard() -> None:
    harness = Harness()
    harness.tell(UnlinkPeer(instance="p0", incarnation=1))
    harness.fanned_out(UnlinkPeer)
    harness.tell(PeerUnlinked(instance="p0", incarnation=1, rank=0))
    harness.fire("unlink")
    assert [to for to, _ in harness.take(UnlinkPeer)] == [harness.transfer(1)]
    harness.tell(PeerUnlinked(instance="p0", incarnation=1, rank=1))
    harness.tell(PeerUnlinked(instance="p0", incarnation=1, rank=1))
    assert not harness.timers and not harness.sent


def test_a_closed_push_is_closed_again_until_every_rank_has_heard() -> None:
    harness = Harness()
    harness.tell(ClosePush(**key()))
    harness.fanned_out(ClosePush)
    harness.tell(PushClosed(**key(), rank=1))
    harness.fire("close push")
    assert [to for to, _ in harness.take(ClosePush)] == [harness.transfer(0)]
    harness.tell(PushClosed(**key(), rank=0))
    assert harness.one(PushClosed).rank == -1
    assert not harness.timers and harness.machine.pushes.closing_count == 0


def test_pushes_are_opened_and_closed_on_every_rank_and_their_failure_is_passed_on() -> None:
    harness = Harness()
    harness.tell(
        OpenPush(
            **key(),
            target_instance="d1",
            target_incarnation=1,
            mode="PUSH",
            source_block_ids=(0,),
            source_slot=0,
            target_block_ids=(0,),
            target_slot=0,
            leases=(),
        )
    )
    harness.fanned_out(OpenPush)
    harness.tell(ClosePush(**key()))
    harness.fanned_out(ClosePush)
    harness.tell(PushFailed(**key(), source_rank=1, target_instance="d1", reason="torn"), harness.transfer(1))
    assert harness.one(PushFailed).reason == "torn"


# -- receives ----------------------------------------------------------------------------------------------------


def test_leases_are_reserved_when_every_rank_granted() -> None:
    harness = Harness()
    opened(harness)
    assert not harness.timers


def test_one_refusal_gives_back_what_the_others_granted_before_it_is_passed_on() -> None:
    harness = Harness()
    harness.tell(reserve())
    harness.take(OpenReceive)
    harness.tell(ReceiveRefused(**key(), rank=1, reason="staging is full"), harness.transfer(1))
    assert [to for to, _ in harness.take(ReleaseReceive)] == [harness.transfer(0)]
    harness.tell(ReceiveOpened(**key(), rank=0, lease=RankLease(target_rank=0, generation=1)), harness.transfer(0))
    harness.none(LeasesRefused)
    harness.tell(ReceiveReleased(**key(), rank=0), harness.transfer(0))
    assert harness.one(LeasesRefused).reason == "rank 1: staging is full"
    assert harness.machine.receives.live_count == 0 and not harness.timers


def test_a_receive_that_a_doubled_message_opened_again_is_released() -> None:
    harness = Harness()
    harness.tell(reserve())
    for rank in (0, 1):
        harness.tell(ReceiveRefused(**key(), rank=rank, reason="staging is full"), harness.transfer(rank))
    harness.one(LeasesRefused)
    harness.sent.clear()
    harness.tell(ReceiveOpened(**key(), rank=1, lease=RankLease(target_rank=1, generation=2)), harness.transfer(1))
    assert [to for to, _ in harness.take(ReleaseReceive)] == [harness.transfer(1)]
    harness.tell(ReceiveReleased(**key(), rank=1))
    assert not harness.sent


def test_a_rank_that_does_not_answer_is_a_refusal_after_it_confirmed_the_release() -> None:
    harness = Harness()
    harness.tell(reserve())
    harness.tell(ReceiveOpened(**key(), rank=0, lease=RankLease(target_rank=0, generation=1)))
    harness.fire("open")
    harness.fanned_out(ReleaseReceive)
    harness.tell(ReceiveReleased(**key(), rank=0))
    harness.fire("release")
    assert [to for to, _ in harness.take(ReleaseReceive)] == [harness.transfer(1)]
    harness.none(LeasesRefused)
    harness.tell(ReceiveReleased(**key(), rank=1))
    assert "ranks [1] did not answer" in harness.one(LeasesRefused).reason


def test_a_restore_is_complete_when_every_rank_restored() -> None:
    harness = Harness()
    opened(harness)
    harness.tell(pull())
    harness.fanned_out(PullKVCache)
    harness.tell(restored(1))
    harness.tell(restored(1))
    harness.none(AllRestored)
    harness.tell(restored(0))
    everything = harness.one(AllRestored)
    assert (everything.bytes_moved, everything.push_ms) == (20, 1)
    assert everything.bytes_by_role == (("target.KEY", 12), ("target.SSM", 8))
    harness.tell(restored(0))
    assert not harness.sent and harness.machine.receives.live_count == 0


def test_a_failed_restore_is_passed_on_once_and_never_completes() -> None:
    harness = Harness()
    opened(harness)
    harness.tell(pull())
    harness.take(PullKVCache)
    for rank in (1, 0):
        harness.tell(RestoreFailed(**key(), rank=rank, reason="torn"))
    assert harness.one(RestoreFailed).rank == 1
    harness.tell(restored(0))
    harness.tell(restored(1))
    assert not harness.sent


@pytest.mark.parametrize("stage", ["unknown", "opening", "open", "pulling"])
def test_a_release_is_confirmed_when_every_rank_confirmed(stage: str) -> None:
    harness = Harness()
    if stage == "opening":
        harness.tell(reserve())
    elif stage != "unknown":
        opened(harness)
    if stage == "pulling":
        harness.tell(pull())
    harness.sent.clear()
    harness.tell(ReleaseReceive(**key()))
    harness.tell(ReleaseReceive(**key()))
    harness.fanned_out(ReleaseReceive)
    harness.tell(ReceiveReleased(**key(), rank=0))
    harness.tell(ReceiveReleased(**key(), rank=0))
    harness.none(ReceiveReleased)
    harness.tell(restored(0))
    harness.tell(ReceiveReleased(**key(), rank=1))
    assert harness.one(ReceiveReleased).rank == -1
    assert not harness.sent and not harness.timers


def test_a_release_that_crosses_a_refusal_is_answered_as_a_release() -> None:
    harness = Harness()
    harness.tell(reserve())
    harness.tell(ReceiveRefused(**key(), rank=1, reason="staging is full"))
    harness.tell(ReleaseReceive(**key()))
    harness.tell(ReceiveReleased(**key(), rank=0))
    assert harness.one(ReceiveReleased).rank == -1
    harness.none(LeasesRefused)


def test_status_says_which_ranks_are_awaited() -> None:
    harness = Harness()
    harness.tell(batch())
    harness.tell(result(0))
    harness.tell(reserve())
    values, requests = harness.machine.status(harness.now_ns)
    assert ("step", "1: waits for ranks 1") in values
    assert requests[0][:4] == ("a", 0, "opening", "ranks 0, 1")
