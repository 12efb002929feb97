"""What both sides of a transfer share about request attempts: key, states as a table, memory of ended ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

TOMBSTONES_MAX = 4096
"""Ended attempts remembered per side. A late message of an older one finds nothing open: no change either."""

Attempt = tuple[str, int]
"""(request id, epoch)."""

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


class IllegalTransition(RuntimeError):
    """An event that this state does not allow. Nothing was changed."""


class Table(Generic[State, Event]):
    """A transition table: (state, event) → next state. A pair that is not in it is illegal."""

    def __init__(self, rows: Mapping[tuple[State, Event], State]) -> None:
        self.rows = dict(rows)

    def allows(self, state: State, event: Event) -> bool:
        """Whether ``event`` is legal in ``state``."""
        return (state, event) in self.rows

    def after(self, state: State, event: Event, whose: str) -> State:
        """The state that follows; raises ``IllegalTransition`` naming ``whose`` state it is."""
        if (state, event) not in self.rows:
            raise IllegalTransition(f"{whose}: {event.value} while {state.value}")
        return self.rows[state, event]


class Tombstones:
    """Attempts that have ended or must never begin; the oldest are forgotten first."""

    def __init__(self, limit: int = TOMBSTONES_MAX) -> None:
        self._limit = limit
        self._ended: OrderedDict[Attempt, None] = OrderedDict()

    def add(self, attempt: Attempt) -> None:
        """Remember ``attempt``."""
        self._ended[attempt] = None
        self._ended.move_to_end(attempt)
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._ended

    def __len__(self) -> int:
        return len(self._ended)
