"""Prefill side: what is known of one request attempt, and the book of all of them by state."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from actors.scheduler.batching import Outcome
from actors.scheduler.offers import Offer
from actors.scheduler.report import ms_between
from actors.scheduler.sequence import Sequence
from actors.scheduler.settings import SchedulerSettings
from actors.scheduler.transitions import PREFILL, PrefillEvent, PrefillState, next_state
from messages.handoff import FirstGeneration
from messages.requests import PhaseTimes, SubmitRequest

S = PrefillState

MAY_BE_WITHDRAWN = (S.OFFERING, S.ACCEPTED)
"""In these states an offline request gives way to an online one."""

WAITS_FOR_DECODE = (S.QUEUED, S.OFFERING, S.BACKOFF, S.PREFILLED, S.REOFFERING, S.STRANDED)
"""In these states an online request keeps offline ones from being offered."""


@dataclass(eq=False)
class PrefillRequest:
    """One gateway attempt of one request. ``offer`` is the current one; others of it may still be open."""

    submit: SubmitRequest
    sequence: Sequence
    since_ns: int  # in this state
    is_online: bool = field(init=False)
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
        self.is_online = self.submit.priority == "online"

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
        """Its first chunk, or its leader's, is in a step."""
        self.started_ns = self.started_ns or now_ns
        if self.offer is not None:
            self.allocation_ms = ms_between(self.offer.offered_ns, self.offer.accepted_ns)

    def sampled(self, now_ns: int, outcome: Outcome) -> None:
        """Its prefill is complete, and its first token here, if that was not known before."""
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
            token_id=self.sequence.output[-1],
            token_index=len(self.sequence.output) - 1,
            chunk_count=self.chunk_count,
            computed_tokens=self.sequence.computed,
            source_block_ids=tuple(holding.blocks),
            source_slot=holding.slot,
            logprobs=first.logprobs,
            bootstrap_hidden=first.row.bootstrap_hidden,
            bootstrap_dtype=first.row.bootstrap_dtype,
            times=self.times,
            sampled_ns=self.sampled_ns,
            cached_tokens=self.sequence.cached_tokens,
        )

    def waits_for(self, step: str) -> str:
        """What it waits for, in words; ``step`` names the step that will run next or runs."""
        target = self.offer.instance if self.offer is not None else ""
        match self.state:
            case S.FOLLOWING if self.sequence.leader is not None:
                return f"the prompt that {self.sequence.leader.request_id} computes"
            case S.QUEUED:
                return "its turn to be offered"
            case S.OFFERING | S.REOFFERING:
                return f"RequestAccepted of {target}"
            case S.BACKOFF | S.STRANDED:
                return f"the next round ({self.last_refusal})"
            case S.FOLLOWING | S.ACCEPTED | S.PREFILLING | S.ORPHANED:
                return step
            case S.HANDED_OFF:
                return f"HandoffComplete of {target}"
            case _:
                return "a decode instance"


def _queue_key(request: PrefillRequest) -> tuple[bool, int]:
    return (not request.is_online, request.sequence.order)


def _order(request: PrefillRequest) -> int:
    return request.sequence.order


class PrefillBook:
    """All live requests by id, and those to be offered in order: online before offline, then by arrival."""

    def __init__(self) -> None:
        self.requests: dict[str, PrefillRequest] = {}
        self.queue: list[PrefillRequest] = []  # QUEUED
        self.ready: list[PrefillRequest] = []  # PREFILLED
        self._withdrawable: dict[PrefillRequest, None] = {}  # offline ones that are MAY_BE_WITHDRAWN
        self._count = dict.fromkeys(PrefillState, 0)
        self._online = dict.fromkeys(PrefillState, 0)

    def count(self, *states: PrefillState) -> int:
        """How many requests are in these states."""
        return sum([self._count[state] for state in states])

    @property
    def online_waits(self) -> bool:
        """Whether an online request still looks for a decode instance."""
        return any(self._online[state] for state in WAITS_FOR_DECODE)

    @property
    def youngest_offline(self) -> PrefillRequest | None:
        """The offline request that came last of those that are offered but have not begun."""
        return max(self._withdrawable, key=_order) if self._withdrawable else None

    def add(self, request: PrefillRequest) -> None:
        """A new request."""
        self.requests[request.submit.request_id] = request
        self._enter(request)

    def move(self, now_ns: int, request: PrefillRequest, event: PrefillEvent) -> None:
        """To the next state (see ``transitions.PREFILL``), and into the list that goes with it."""
        state = next_state(PREFILL, request.state, event)
        self._count[request.state] -= 1
        self._online[request.state] -= request.is_online
        if request.state is S.QUEUED:
            self.queue.remove(request)
        elif request.state is S.PREFILLED:
            self.ready.remove(request)
        else:
            self._withdrawable.pop(request, None)
        request.state = state
        request.since_ns = now_ns
        if state is S.ENDED:
            del self.requests[request.submit.request_id]
        else:
            self._enter(request)

    def _enter(self, request: PrefillRequest) -> None:
        self._count[request.state] += 1
        self._online[request.state] += request.is_online
        if request.state is S.QUEUED:
            insort(self.queue, request, key=_queue_key)
        elif request.state is S.PREFILLED:
            insort(self.ready, request, key=_queue_key)
        elif request.state in MAY_BE_WITHDRAWN and not request.is_online:
            self._withdrawable[request] = None
