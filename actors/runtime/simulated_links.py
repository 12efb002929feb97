"""The network of a simulated cluster: when a message between two nodes arrives, how often, or that it never does.

A link (one direction between two nodes) keeps order, as a ZeroMQ socket pair does, unless a fault says otherwise. All
chance comes from one seeded generator. Times are nanoseconds of virtual time.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the simulated links behave. Rates are probabilities per message between nodes.

    ``local_us`` is how long, at most, a message between two actors of one node waits in its receiver's mailbox.
    ``duplicate`` and ``delay`` make a message late; ``reorder`` lets the next one of its link pass first, unless none
    comes within ``reorder_ms``. ``latency_us`` alone never lets one overtake another.
    """

    latency_us: tuple[float, float] = (30.0, 300.0)
    local_us: float = 40.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_ms: float = 100.0
    echo: float = 0.0
    echo_ms: float = 20.0
    delay: float = 0.0
    delay_ms: float = 50.0
    detect_ms: float = 5.0  # from a node's death until its peers learn that their links broke


Link = tuple[str, str]
"""(sending node, receiving node)."""


class Links:
    """Latency, order, loss and partitions of every link."""

    __slots__ = (
        "_blocked",
        "_faulty",
        "_held",
        "_last_due",
        "_low_ns",
        "_random",
        "_span_ns",
        "dropped_count",
        "duplicated_count",
        "reorders",
        "settings",
    )

    def __init__(self, settings: LinkSettings, random: Random) -> None:
        self._random = random
        self._last_due: dict[Link, int] = {}
        self._blocked: dict[Link, bool] = {}
        self._held: dict[Link, list[tuple[Any, bytes]]] = {}
        self.dropped_count = 0
        self.duplicated_count = 0
        self.change(settings)

    def change(self, settings: LinkSettings) -> None:
        """Use other rates from now on (a simulation heals by setting them to zero)."""
        self.settings = settings
        self._low_ns = int(settings.latency_us[0] * 1e3)
        self._span_ns = settings.latency_us[1] * 1e3 - self._low_ns
        self.reorders = settings.reorder > 0.0
        self._faulty = bool(settings.drop or settings.duplicate or settings.delay)

    def due(self, now_ns: int, link: Link, source: Any, frame: bytes) -> tuple[int, ...]:
        """When ``frame`` of ``source`` arrives: once as a rule, not at all when lost or held, twice when duplicated."""
        if self._blocked and link in self._blocked:
            if self._blocked[link]:
                self._held.setdefault(link, []).append((source, frame))
            else:
                self.dropped_count += 1
            return ()
        chance = self._random.random
        due = now_ns + self._low_ns + int(chance() * self._span_ns)
        if self._faulty:
            settings = self.settings
            if settings.drop and chance() < settings.drop:
                self.dropped_count += 1
                return ()
            if settings.delay and chance() < settings.delay:
                return (due + int(chance() * settings.delay_ms * 1e6),)
            if settings.duplicate and chance() < settings.duplicate:
                self.duplicated_count += 1
                due = max(due, self._last_due.get(link, 0))
                self._last_due[link] = due
                return (due, due + int(chance() * settings.delay_ms * 1e6))
        last = self._last_due.get(link, 0)
        if due < last:
            due = last
        self._last_due[link] = due
        return (due,)

    def lets_pass(self) -> bool:
        """Whether a message that is about to travel lets the next one of its link pass first."""
        return self._random.random() < self.settings.reorder

    def is_blocked(self, link: Link) -> bool:
        """Whether the link is cut."""
        return link in self._blocked

    def block(self, source: str, target: str, *, hold: bool = True) -> None:
        """Cut the link from ``source`` to ``target``; ``hold`` keeps what is sent until it heals, else it is lost."""
        self._blocked[(source, target)] = hold

    def unblock(self, source: str, target: str) -> list[tuple[Any, bytes]]:
        """Mend one link; returns (source, frame) of what was held back, in order."""
        self._blocked.pop((source, target), None)
        return self._held.pop((source, target), [])

    def blocked(self) -> list[Link]:
        """The links that are cut, in the order in which they were."""
        return list(self._blocked)

    def forget(self, source: str, target: str) -> None:
        """Drop what a broken link still held."""
        self._held.pop((source, target), None)
