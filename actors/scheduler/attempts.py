"""Decode side: the offers that are here, those that were, and what their prefill instances are answered."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

import msgspec

from actors.scheduler.blocks import Holding
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import Peers
from actors.scheduler.report import ms_between
from actors.scheduler.sequence import Sequence
from actors.scheduler.transitions import DECODE, DecodeEvent, DecodeState, next_state
from messages.base import control_address
from messages.handoff import (
    AddNewRequest,
    FirstGeneration,
    HandoffComplete,
    HandoffFailed,
    RankLease,
    RequestAccepted,
    RequestRefused,
    RequestReleased,
)
from messages.requests import PhaseTimes
from messages.transfer import AllRestored

NO_TIMES: Final = PhaseTimes()

ENDED_MAX: Final = 8192
"""How many attempts that ended are remembered."""

Key = tuple[str, int]
"""(request id, epoch)."""


class Ending(Enum):
    """How an attempt ended here, as far as its prefill instance may ask."""

    COMPLETED = "completed"  # it was restored
    GIVEN_UP = "given up"


@dataclass(eq=False)
class Attempt:
    """One offer of one request."""

    offer: AddNewRequest
    order: int
    since_ns: int  # in this state
    state: DecodeState = DecodeState.WAITING
    holding: Holding | None = None
    first: FirstGeneration | None = None
    first_ns: int = 0
    times: PhaseTimes = NO_TIMES
    sequence: Sequence | None = None
    released_by_source: bool = False
    reason: str = ""  # why it is draining

    @property
    def key(self) -> Key:
        return (self.offer.request_id, self.offer.epoch)

    @property
    def total(self) -> int:
        """Tokens that are prefilled: prompt and, but for the last token, what earlier attempts delivered."""
        return len(self.offer.prompt_token_ids) + self.first_index

    @property
    def first_index(self) -> int:
        """Index of the output token that ``FirstGeneration`` brings: the last that is known before this decodes."""
        return max(0, len(self.offer.delivered_token_ids) - 1)

    def restored(self, now_ns: int, message: AllRestored, final_tokens: int) -> Sequence:
        """All ranks restored: the sequence that decodes from here on, and where the time went so far."""
        offer, first = self.offer, self.first
        if first is None:
            raise AssertionError(f"{self.key} is restored before its first token")
        self.times = msgspec.structs.replace(
            first.times,
            push_ms=message.push_ms,
            pull_ms=message.pull_ms,
            merge_ms=message.merge_ms,
            sync_ms=message.sync_ms,
            restore_ms=ms_between(self.first_ns, now_ns),
            handoff_ms=ms_between(first.sampled_ns, now_ns),
            bytes_moved=message.bytes_moved,
            bytes_by_role=message.bytes_by_role,
            verified_bytes=message.verified_bytes,
        )
        return Sequence(
            request_id=offer.request_id,
            epoch=offer.epoch,
            prompt=offer.prompt_token_ids,
            output=list(offer.delivered_token_ids) or [first.token_id],
            sampling=offer.sampling,
            priority=offer.priority,
            order=self.order,
            final_tokens=final_tokens,
            holding=self.holding,
            computed=self.total,
            is_decoding=True,
            restored=True,
            bootstrap_hidden=first.bootstrap_hidden,
            bootstrap_dtype=first.bootstrap_dtype,
            cached_tokens=first.cached_tokens,
        )

    def standing(self, step: str) -> tuple[str, str]:
        """(state, what it waits for) in words; ``step`` names the step that runs or will run next."""
        if self.sequence is not None and self.sequence.holding is None:
            return "preempted", "blocks"
        waits_for = {
            DecodeState.RESERVING: "LeasesReserved of the engine",
            DecodeState.RESERVED: f"FirstGeneration of {self.offer.source_instance}",
            DecodeState.RESTORING: "AllRestored of the engine",
            DecodeState.DRAINING: "ReceiveReleased of the engine",
        }
        return self.state.value, waits_for.get(self.state, step)

    def move(self, now_ns: int, event: DecodeEvent) -> None:
        """To the next state (see ``transitions.DECODE``)."""
        self.state = next_state(DECODE, self.state, event)
        self.since_ns = now_ns


def same_source(first: AddNewRequest, second: AddNewRequest) -> bool:
    """Whether the same life of the same prefill instance made both offers."""
    return (first.source_instance, first.source_incarnation) == (second.source_instance, second.source_incarnation)


class Attempts:
    """Live attempts by key, and a bounded memory of ended ones."""

    def __init__(self) -> None:
        self.live: dict[Key, Attempt] = {}
        self.ended: OrderedDict[Key, Ending] = OrderedDict()
        self._by_request: dict[str, list[Attempt]] = {}

    def add(self, attempt: Attempt) -> None:
        """A new one. Its key was never here."""
        self.live[attempt.key] = attempt
        self._by_request.setdefault(attempt.offer.request_id, []).append(attempt)

    def of_request(self, request_id: str) -> list[Attempt]:
        """Its live attempts, in the order in which they came."""
        return list(self._by_request.get(request_id, ()))

    def end(self, attempt: Attempt, event: DecodeEvent, ending: Ending) -> None:
        """``event`` ends it; remember how it ended. ``since_ns`` keeps the beginning of its last state."""
        attempt.state = next_state(DECODE, attempt.state, event)
        del self.live[attempt.key]
        siblings = self._by_request[attempt.offer.request_id]
        siblings.remove(attempt)
        if not siblings:
            del self._by_request[attempt.offer.request_id]
        self.remember(attempt.key, ending)

    def remember(self, key: Key, ending: Ending) -> None:
        """This key has ended here, or must not begin."""
        self.ended[key] = ending
        self.ended.move_to_end(key)
        while len(self.ended) > ENDED_MAX:
            self.ended.popitem(last=False)


class Answers:
    """What a decode instance answers a prefill instance. Nothing is sent to one that is known to be dead."""

    def __init__(self, instance: str, incarnation: int, peers: Peers, out: Outbox) -> None:
        self._instance = instance
        self._incarnation = incarnation
        self._peers = peers
        self._out = out

    def accept(
        self, attempt: Attempt, target_block_ids: tuple[int, ...], target_slot: int, leases: tuple[RankLease, ...]
    ) -> None:
        """The reservation stands."""
        self._send(
            attempt.offer,
            RequestAccepted(
                request_id=attempt.offer.request_id,
                epoch=attempt.offer.epoch,
                instance=self._instance,
                incarnation=self._incarnation,
                target_block_ids=target_block_ids,
                target_slot=target_slot,
                leases=leases,
            ),
        )

    def refuse(self, offer: AddNewRequest, code: Literal[400, 404, 409, 413], reason: str) -> None:
        """No, and nothing of it is here."""
        self._send(
            offer,
            RequestRefused(
                request_id=offer.request_id,
                epoch=offer.epoch,
                instance=self._instance,
                incarnation=self._incarnation,
                code=code,
                reason=reason,
            ),
        )

    def complete(self, source: AddNewRequest | FirstGeneration) -> None:
        """All ranks restored; the source may free its memory."""
        self._send(
            source,
            HandoffComplete(
                request_id=source.request_id,
                epoch=source.epoch,
                instance=self._instance,
                incarnation=self._incarnation,
            ),
        )

    def fail(self, source: AddNewRequest | FirstGeneration, reason: str) -> None:
        """This attempt will not be decoded here, and nothing of it is left."""
        self._send(
            source,
            HandoffFailed(
                request_id=source.request_id,
                epoch=source.epoch,
                instance=self._instance,
                incarnation=self._incarnation,
                reason=reason,
            ),
        )

    def released(self, key: Key, to: str) -> None:
        """Nothing of this attempt is left here."""
        self._out.send(
            to,
            RequestReleased(request_id=key[0], epoch=key[1], instance=self._instance, incarnation=self._incarnation),
        )

    def given_up(self, attempt: Attempt, reason: str) -> None:
        """An attempt ended before it was restored: answer who asked for it, or say that it failed."""
        offer = attempt.offer
        if not attempt.released_by_source:
            self.fail(offer, reason)
        elif not self._peers.is_dead(offer.source_instance, offer.source_incarnation):
            self.released(attempt.key, control_address(offer.source_instance, "scheduler"))

    def _send(
        self,
        source: AddNewRequest | FirstGeneration,
        message: RequestAccepted | RequestRefused | HandoffComplete | HandoffFailed,
    ) -> None:
        if not self._peers.is_dead(source.source_instance, source.source_incarnation):
            self._out.send(control_address(source.source_instance, "scheduler"), message)
