"""The tables of transitions: complete, reachable, and refusing what they do not say."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import pytest

from actors.scheduler.transitions import (
    DECODE,
    PREFILL,
    DecodeEvent,
    DecodeState,
    IllegalTransition,
    PrefillEvent,
    PrefillState,
    next_state,
)


@pytest.mark.parametrize("table, first", [(PREFILL, PrefillState.QUEUED), (DECODE, DecodeState.WAITING)])
def test_every_state_is_reachable_and_can_end(table: Mapping[tuple[Enum, Enum], Enum], first: Enum) -> None:
    reached, frontier = {first}, [first]
    while frontier:
        state = frontier.pop()
        for (source, _), target in table.items():
            if source is state and target not in reached:
                reached.add(target)
                frontier.append(target)
    assert reached == set(type(first))
    ends = {target for target in reached if target.name == "ENDED"}
    while True:
        more = {source for (source, _), target in table.items() if target in ends} - ends
        if not more:
            break
        ends |= more
    assert ends == reached


def test_every_event_is_used() -> None:
    assert {event for _, event in PREFILL} == set(PrefillEvent)
    assert {event for _, event in DECODE} == set(DecodeEvent)


def test_an_illegal_pair_raises_one_named_error() -> None:
    with pytest.raises(IllegalTransition, match=r"COMPLETE.*QUEUED"):
        next_state(PREFILL, PrefillState.QUEUED, PrefillEvent.COMPLETE)
