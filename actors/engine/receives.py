"""Decode side: the receives of this instance, each spread over all of its ranks.

A receive belongs to one request attempt, ``(request_id, epoch)``:

    (new) --ReserveLeases--> OPENING --every rank opened--> OPEN --PullKVCache--> PULLING
    PULLING --every rank restored--> (gone, AllRestored)
    OPENING --a rank refused, or is silent too long--> REFUSING --every rank released--> (gone, LeasesRefused)
    any of them, or none --ReleaseReceive--> RELEASING --every rank released--> (gone, ReceiveReleased)

A release is repeated to the ranks that have not confirmed it; it never ends because time passed. What a rank says
about a receive that is gone, or twice, changes nothing. ``RestoreFailed`` of any rank is passed on once; the scheduler
answers with a release.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from actors.runtime.machine import Effect, Handlers, Note, Send, StartTimer, StatusRequests, StopTimer
from messages.base import Message, control_address, rank_address
from messages.handoff import RankLease
from messages.timers import RequestTimer
from messages.transfer import (
    AllRestored,
    LeasesRefused,
    LeasesReserved,
    OpenReceive,
    PullKVCache,
    ReceiveOpened,
    ReceiveRefused,
    ReceiveReleased,
    ReleaseReceive,
    ReserveLeases,
    Restored,
    RestoreFailed,
)


class ReceiveState(Enum):
    """See the module's theory."""

    OPENING = "opening"
    OPEN = "open"
    PULLING = "pulling"
    REFUSING = "refusing"
    RELEASING = "releasing"


@dataclass(eq=False)
class Receive:
    """One attempt's receive, and what each rank has said about its present state."""

    request_id: str
    epoch: int
    state: ReceiveState
    since_ns: int
    leases: dict[int, RankLease] = field(default_factory=dict)
    restored: dict[int, Restored] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    failed: bool = False
    reason: str = ""


class Receives:
    """See the module's theory."""

    def __init__(self, instance: str, tp_size: int, *, open_timeout_ms: float, resend_ms: float) -> None:
        self._scheduler = control_address(instance, "scheduler")
        self._transfers = tuple(rank_address(instance, rank, "transfer") for rank in range(tp_size))
        self._open_timeout_ms = open_timeout_ms
        self._resend_ms = resend_ms
        self._receives: dict[tuple[str, int], Receive] = {}

    def handlers(self) -> Handlers[list[Effect]]:
        """What is done with messages about receives."""
        handlers: Handlers[list[Effect]] = Handlers()
        on = handlers.on
        on(ReserveLeases, self._on_reserve_leases)
        on(ReceiveOpened, self._on_receive_opened)
        on(ReceiveRefused, self._on_receive_refused)
        on(PullKVCache, self._on_pull)
        on(Restored, self._on_restored)
        on(RestoreFailed, self._on_restore_failed)
        on(ReleaseReceive, self._on_release_receive)
        on(ReceiveReleased, self._on_receive_released)
        return handlers

    @property
    def live_count(self) -> int:
        """Receives that are not gone."""
        return len(self._receives)

    def status(self) -> StatusRequests:
        """One row per receive: which ranks it waits for."""
        rows = []
        for receive in self._receives.values():
            missing = [str(rank) for rank in range(len(self._transfers)) if not self._has_answered(receive, rank)]
            waits_for = f"ranks {', '.join(missing)}" if receive.state is not ReceiveState.OPEN else "FirstGeneration"
            rows.append((receive.request_id, receive.epoch, receive.state.value, waits_for, receive.since_ns))
        return tuple(rows)

    # -- opening -------------------------------------------------------------------------------------------------

    def _on_reserve_leases(self, now_ns: int, sender: str, message: ReserveLeases) -> list[Effect]:
        key = (message.request_id, message.epoch)
        if key in self._receives:
            return []
        self._receives[key] = Receive(message.request_id, message.epoch, ReceiveState.OPENING, now_ns)
        request = OpenReceive(
            request_id=message.request_id,
            epoch=message.epoch,
            source_instance=message.source_instance,
            source_incarnation=message.source_incarnation,
            mode=message.mode,
            target_block_ids=message.target_block_ids,
            target_slot=message.target_slot,
            prompt_tokens=message.prompt_tokens,
        )
        effects: list[Effect] = [Send(transfer, request) for transfer in self._transfers]
        effects.append(self._timer("open", key, self._open_timeout_ms))
        return effects

    def _on_receive_opened(self, now_ns: int, sender: str, message: ReceiveOpened) -> list[Effect]:
        receive = self._receives.get((message.request_id, message.epoch))
        if receive is None or receive.state in (ReceiveState.REFUSING, ReceiveState.RELEASING):
            # a doubled OpenReceive opened what was given up: nobody wants it
            if receive is not None:
                receive.released.discard(message.rank)
            return [Send(self._transfers[message.rank], _release(message))]
        if receive.state is not ReceiveState.OPENING:
            return []
        receive.leases[message.rank] = message.lease
        if len(receive.leases) < len(self._transfers):
            return []
        self._enter(receive, ReceiveState.OPEN, now_ns)
        leases = tuple(receive.leases[rank] for rank in range(len(self._transfers)))
        reserved = LeasesReserved(request_id=message.request_id, epoch=message.epoch, leases=leases)
        return [StopTimer(("open", message.request_id, message.epoch)), Send(self._scheduler, reserved)]

    def _on_receive_refused(self, now_ns: int, sender: str, message: ReceiveRefused) -> list[Effect]:
        receive = self._receives.get((message.request_id, message.epoch))
        if receive is None or receive.state not in (ReceiveState.OPENING, ReceiveState.REFUSING):
            return []
        receive.released.add(message.rank)  # it holds nothing
        if receive.state is ReceiveState.REFUSING:
            return self._finish_release(receive)
        receive.reason = f"rank {message.rank}: {message.reason}"
        self._enter(receive, ReceiveState.REFUSING, now_ns)
        return [StopTimer(("open", message.request_id, message.epoch)), *self._ask_release(receive)]

    # -- pulling -------------------------------------------------------------------------------------------------

    def _on_pull(self, now_ns: int, sender: str, message: PullKVCache) -> list[Effect]:
        receive = self._receives.get((message.request_id, message.epoch))
        if receive is None or receive.state is not ReceiveState.OPEN:
            return []
        self._enter(receive, ReceiveState.PULLING, now_ns)
        return [Send(transfer, message) for transfer in self._transfers]

    def _on_restored(self, now_ns: int, sender: str, message: Restored) -> list[Effect]:
        key = (message.request_id, message.epoch)
        receive = self._receives.get(key)
        if receive is None or receive.state is not ReceiveState.PULLING or receive.failed:
            return []
        receive.restored[message.rank] = message
        ranks = receive.restored.values()
        if len(receive.restored) < len(self._transfers):
            return []
        del self._receives[key]
        by_role: dict[str, int] = {}
        for rank in ranks:
            for role, count in rank.bytes_by_role:
                by_role[role] = by_role.get(role, 0) + count
        everything = AllRestored(
            request_id=message.request_id,
            epoch=message.epoch,
            bytes_moved=sum(rank.bytes_moved for rank in ranks),
            push_ms=max(rank.push_ms for rank in ranks),
            pull_ms=max(rank.pull_ms for rank in ranks),
            merge_ms=max(rank.merge_ms for rank in ranks),
            sync_ms=max(rank.sync_ms for rank in ranks),
            bytes_by_role=tuple(sorted(by_role.items())),
            verified_bytes=sum(rank.verified_bytes for rank in ranks),
        )
        return [Send(self._scheduler, everything)]

    def _on_restore_failed(self, now_ns: int, sender: str, message: RestoreFailed) -> list[Effect]:
        receive = self._receives.get((message.request_id, message.epoch))
        if receive is None or receive.state not in (ReceiveState.OPENING, ReceiveState.OPEN, ReceiveState.PULLING):
            return []
        if receive.failed:
            return []
        receive.failed = True
        return [Send(self._scheduler, message)]

    # -- releasing -----------------------------------------------------------------------------------------------

    def _on_release_receive(self, now_ns: int, sender: str, message: ReleaseReceive) -> list[Effect]:
        key = (message.request_id, message.epoch)
        receive = self._receives.get(key)
        if receive is None:
            receive = Receive(message.request_id, message.epoch, ReceiveState.RELEASING, now_ns)
            self._receives[key] = receive
        elif receive.state is ReceiveState.RELEASING:
            return []
        self._enter(receive, ReceiveState.RELEASING, now_ns)
        effects: list[Effect] = [StopTimer(("open", message.request_id, message.epoch))]
        return effects + self._ask_release(receive)

    def _on_receive_released(self, now_ns: int, sender: str, message: ReceiveReleased) -> list[Effect]:
        receive = self._receives.get((message.request_id, message.epoch))
        if receive is None or receive.state not in (ReceiveState.REFUSING, ReceiveState.RELEASING):
            return []
        receive.released.add(message.rank)
        return self._finish_release(receive)

    def _finish_release(self, receive: Receive) -> list[Effect]:
        if len(receive.released) < len(self._transfers):
            return []
        key = (receive.request_id, receive.epoch)
        del self._receives[key]
        answer: Message
        if receive.state is ReceiveState.REFUSING:
            answer = LeasesRefused(request_id=receive.request_id, epoch=receive.epoch, reason=receive.reason)
        else:
            answer = ReceiveReleased(request_id=receive.request_id, epoch=receive.epoch, rank=-1)
        return [StopTimer(("release", *key)), Send(self._scheduler, answer)]

    def _ask_release(self, receive: Receive) -> list[Effect]:
        """Ask every rank that has not confirmed, and again later."""
        done = self._finish_release(receive)
        if done:
            return done
        key = (receive.request_id, receive.epoch)
        effects: list[Effect] = [
            Send(transfer, _release(receive))
            for rank, transfer in enumerate(self._transfers)
            if rank not in receive.released
        ]
        return [*effects, self._timer("release", key, self._resend_ms)]

    # -- time ----------------------------------------------------------------------------------------------------

    def on_timer(self, now_ns: int, sender: str, message: RequestTimer) -> list[Effect]:
        """Ranks have not opened, or have not released, in time."""
        receive = self._receives.get((message.request_id, message.epoch))
        if message.purpose == "open":
            if receive is None or receive.state is not ReceiveState.OPENING:
                return []
            silent = [rank for rank in range(len(self._transfers)) if rank not in receive.leases]
            receive.reason = f"ranks {silent} did not answer within {self._open_timeout_ms:.0f} ms"
            self._enter(receive, ReceiveState.REFUSING, now_ns)
            note = Note(
                "warning",
                "receive not opened",
                (("request_id", message.request_id), ("epoch", message.epoch), ("reason", receive.reason)),
            )
            return [note, *self._ask_release(receive)]
        if message.purpose == "release":
            if receive is None or receive.state not in (ReceiveState.REFUSING, ReceiveState.RELEASING):
                return []
            return self._ask_release(receive)
        return []

    def _timer(self, purpose: str, key: tuple[str, int], delay_ms: float) -> StartTimer:
        due = RequestTimer(request_id=key[0], epoch=key[1], purpose=purpose)
        return StartTimer((purpose, *key), delay_ms, due)

    def _enter(self, receive: Receive, state: ReceiveState, now_ns: int) -> None:
        receive.state = state
        receive.since_ns = now_ns

    def _has_answered(self, receive: Receive, rank: int) -> bool:
        match receive.state:
            case ReceiveState.OPENING:
                return rank in receive.leases
            case ReceiveState.PULLING:
                return rank in receive.restored
            case ReceiveState.REFUSING | ReceiveState.RELEASING:
                return rank in receive.released
            case ReceiveState.OPEN:
                return True


def _release(about: Receive | ReceiveOpened) -> ReleaseReceive:
    return ReleaseReceive(request_id=about.request_id, epoch=about.epoch)
