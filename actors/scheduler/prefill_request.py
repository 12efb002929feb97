"""Prefill side: what is known of one request attempt, and the message that hands it off."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.scheduler.batching import Outcome
from actors.scheduler.offers import Offer
from actors.scheduler.report import ms_between
from actors.scheduler.sequence import Sequence
from actors.scheduler.settings import SchedulerSettings
from actors.scheduler.transitions import PrefillState
from messages.handoff import FirstGeneration
from messages.requests import PhaseTimes, SubmitRequest


@dataclass(eq=False)
class PrefillRequest:
    """One gateway attempt of one request. ``offer`` is the current one; others of it may still be open."""

    submit: SubmitRequest
    sequence: Sequence
    since_ns: int  # in this state
    state: PrefillState = PrefillState.QUEUED
    offer: Offer | None = None
    next_epoch: int = 0
    asked: set[str] = field(default_factory=set)  # decode instances asked in this round
    too_large: dict[str, str] = field(default_factory=dict)  # decode instance → why it can never hold it
    rounds: int = 0
    last_refusal: str = ""
    arrived_ns: int = 0
    allocation_ms: float = 0.0
    started_ns: int = 0
    sampled_ns: int = 0
    chunk_count: int = 0  # that travelled, or will, under the current offer
    first: Outcome | None = None

    def __post_init__(self) -> None:
        self.arrived_ns = self.since_ns
        self.next_epoch = self.sequence.epoch

    @property
    def is_online(self) -> bool:
        return self.submit.priority == "online"

    @property
    def epoch(self) -> int:
        """The newest epoch under which it was offered: what the gateway is told."""
        return max(self.sequence.epoch, self.next_epoch - 1)

    @property
    def times(self) -> PhaseTimes:
        """Where its time went so far."""
        return PhaseTimes(
            queue_ms=max(0.0, ms_between(self.arrived_ns, self.started_ns) - self.allocation_ms),
            allocation_ms=self.allocation_ms,
            prefill_ms=ms_between(self.started_ns, self.sampled_ns),
        )

    def started(self, now_ns: int) -> None:
        """Its first chunk is in a step."""
        self.started_ns = now_ns
        if self.offer is not None:
            self.allocation_ms = ms_between(self.offer.offered_ns, self.offer.accepted_ns)

    def sampled(self, now_ns: int, outcome: Outcome) -> None:
        """Its first token is here."""
        self.sampled_ns = now_ns
        self.first = outcome
        self.chunk_count = self.sequence.chunk_count

    def first_generation(self, offer: Offer, settings: SchedulerSettings) -> FirstGeneration:
        """What a decode instance needs to go on."""
        first, holding = self.first, self.sequence.holding
        if first is None or first.row is None or holding is None:
            raise AssertionError(f"{offer.key} is handed off before its first token")
        return FirstGeneration(
            request_id=offer.request_id,
            epoch=offer.epoch,
            source_instance=settings.instance,
            source_incarnation=settings.incarnation,
            token_id=first.token_ids[0],
            token_index=first.first_index,
            chunk_count=self.chunk_count,
            computed_tokens=self.sequence.computed,
            source_block_ids=tuple(holding.blocks),
            source_slot=holding.slot,
            logprobs=first.logprobs,
            bootstrap_hidden=first.row.bootstrap_hidden,
            bootstrap_dtype=first.row.bootstrap_dtype,
            times=self.times,
            sampled_ns=self.sampled_ns,
        )


def queue_key(request: PrefillRequest) -> tuple[bool, int]:
    """Online before offline, then in the order of arrival."""
    return (not request.is_online, request.sequence.order)
