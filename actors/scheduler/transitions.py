"""Transitions of a request's hand-off as data: the machines look them up, the documents print them.

``PREFILL`` is the prefill instance's view of one gateway attempt, ``DECODE`` the decode instance's view of one offer of
it (one epoch). A pair that is not in the table is a bug of the scheduler (late messages are sorted out before), raises
``IllegalTransition`` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeVar

from actors.runtime.machine import TableKey


class IllegalTransition(AssertionError):
    """A machine tried what its table does not allow."""


class PrefillState(TableKey):
    """Where a request stands on its prefill instance."""

    QUEUED = "queued"  # holds nothing; will be offered when it is near the head
    FOLLOWING = "following"  # holds nothing; another sample of its prompt computes it
    OFFERING = "offering"  # holds memory here; one decode instance was asked
    BACKOFF = "backoff"  # holds nothing; every decode instance said no, or there is none
    ACCEPTED = "accepted"  # memory here and there; waits for its first chunk
    PREFILLING = "prefilling"  # chunks run, and travel while they run
    ORPHANED = "orphaned"  # its decode instance is lost; chunks run on, nothing travels
    PREFILLED = "prefilled"  # the first token is out; no decode instance has it
    REOFFERING = "reoffering"  # as OFFERING, with the state ready
    STRANDED = "stranded"  # as BACKOFF, with the state ready
    HANDED_OFF = "handed off"  # FirstGeneration is sent; memory stays until the decode instance confirms
    ENDED = "ended"


class PrefillEvent(TableKey):
    """What moves it on."""

    OFFER = "AddNewRequest sent"
    ACCEPT = "RequestAccepted"
    REFUSE = "RequestRefused"
    BACK_OFF = "nobody left to ask"
    RETRY = "backoff over, or a peer linked"
    WITHDRAW = "an online request needs the memory"
    FOLLOW = "another sample computes its prompt"
    LEAD = "must compute its prompt itself"
    START = "first chunk in a step"
    SAMPLE = "first token sampled"
    LOSE = "decode instance dead, failed, silent or released it"
    COMPLETE = "HandoffComplete"
    END = "finished, failed, cancelled or superseded"


P, PE = PrefillState, PrefillEvent

PREFILL: Final[Mapping[tuple[PrefillState, PrefillEvent], PrefillState]] = {
    (P.QUEUED, PE.FOLLOW): P.FOLLOWING,
    (P.FOLLOWING, PE.LEAD): P.QUEUED,
    (P.FOLLOWING, PE.SAMPLE): P.PREFILLED,
    (P.QUEUED, PE.OFFER): P.OFFERING,
    (P.QUEUED, PE.BACK_OFF): P.BACKOFF,
    (P.OFFERING, PE.ACCEPT): P.ACCEPTED,
    (P.OFFERING, PE.REFUSE): P.QUEUED,
    (P.OFFERING, PE.LOSE): P.QUEUED,
    (P.OFFERING, PE.WITHDRAW): P.QUEUED,
    (P.BACKOFF, PE.RETRY): P.QUEUED,
    (P.ACCEPTED, PE.START): P.PREFILLING,
    (P.ACCEPTED, PE.LOSE): P.QUEUED,
    (P.ACCEPTED, PE.WITHDRAW): P.QUEUED,
    (P.PREFILLING, PE.SAMPLE): P.HANDED_OFF,
    (P.PREFILLING, PE.LOSE): P.ORPHANED,
    (P.ORPHANED, PE.SAMPLE): P.PREFILLED,
    (P.PREFILLED, PE.OFFER): P.REOFFERING,
    (P.PREFILLED, PE.BACK_OFF): P.STRANDED,
    (P.REOFFERING, PE.ACCEPT): P.HANDED_OFF,
    (P.REOFFERING, PE.REFUSE): P.PREFILLED,
    (P.REOFFERING, PE.LOSE): P.PREFILLED,
    (P.STRANDED, PE.RETRY): P.PREFILLED,
    (P.HANDED_OFF, PE.LOSE): P.PREFILLED,
    (P.HANDED_OFF, PE.COMPLETE): P.ENDED,
    **{(state, PE.END): P.ENDED for state in P if state is not P.ENDED},
}


class DecodeState(TableKey):
    """Where an offer stands on its decode instance."""

    WAITING = "waiting for a step"  # an offline request's memory comes free when the step in flight is over
    RESERVING = "reserving"  # memory is held; the ranks open their receiving side
    RESERVED = "reserved"  # accepted; chunks may arrive
    RESTORING = "restoring"  # FirstGeneration is here; the ranks pull, merge and synchronise
    DECODING = "decoding"  # in the batching core, preempted ones too
    DRAINING = "draining"  # given up; memory stays until every rank says that its writers stopped
    ENDED = "ended"


class DecodeEvent(TableKey):
    """What moves it on."""

    HOLD = "memory granted"
    REFUSE = "RequestRefused sent"
    GRANT = "LeasesReserved"
    FIRST = "FirstGeneration"
    RESTORE = "AllRestored"
    DRAIN = "released, cancelled, failed, late, or the prefill instance died"
    DRAINED = "ReceiveReleased"
    END = "finished, failed, cancelled, released or superseded"


D, DE = DecodeState, DecodeEvent

DECODE: Final[Mapping[tuple[DecodeState, DecodeEvent], DecodeState]] = {
    (D.WAITING, DE.HOLD): D.RESERVING,
    (D.WAITING, DE.REFUSE): D.ENDED,
    (D.WAITING, DE.END): D.ENDED,
    (D.RESERVING, DE.GRANT): D.RESERVED,
    (D.RESERVING, DE.REFUSE): D.ENDED,
    (D.RESERVING, DE.DRAIN): D.DRAINING,
    (D.RESERVED, DE.FIRST): D.RESTORING,
    (D.RESERVED, DE.DRAIN): D.DRAINING,
    (D.RESTORING, DE.RESTORE): D.DECODING,
    (D.RESTORING, DE.DRAIN): D.DRAINING,
    (D.DECODING, DE.END): D.ENDED,
    (D.DRAINING, DE.DRAINED): D.ENDED,
}

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def next_state(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """Where ``event`` leads from ``state``; raises ``IllegalTransition`` when the table does not say."""
    try:
        return table[(state, event)]
    except KeyError:
        raise IllegalTransition(f"{event.name} ({event.value}) in state {state.name}") from None
