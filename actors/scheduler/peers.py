"""The instances this one hands requests to, or gets them from: which are linked, and whose turn it is.

A peer is LINKING (the engine maps its caches), LINKED or BROKEN (the link was refused; it is tried again unless that
cannot help or was tried often enough). A peer that left the registry's view is *unlisted*: it gets no new work but is
not dead. A peer that let an offer time out is *silent* until it says anything: it is asked only when nobody else can
be, one offer at a time, so that a stuck decode instance holds up nothing that another could take (C25).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import Enum

from messages.cluster import InstanceInfo, LinkReport


class LinkState(Enum):
    """Where the link to a peer stands."""

    LINKING = "linking"
    LINKED = "linked"
    BROKEN = "broken"


@dataclass(eq=False)
class Peer:
    """One incarnation of one instance of the opposite role."""

    info: InstanceInfo
    state: LinkState = LinkState.LINKING
    listed: bool = True
    link_attempts: int = 1
    link_error: str = ""
    link_given_up: bool = False
    silent: bool = False
    unanswered: int = 0  # offers it has not answered

    def link_report(self) -> LinkReport | None:
        """How the link came out; None while it is being made or will be tried again."""
        if self.state is LinkState.LINKED:
            return LinkReport(instance=self.info.instance, incarnation=self.info.incarnation)
        if self.state is LinkState.BROKEN and self.link_given_up:
            return LinkReport(
                instance=self.info.instance, incarnation=self.info.incarnation, refused=self.link_error or "no reason"
            )
        return None

    @property
    def is_usable(self) -> bool:
        """Whether it may get new work."""
        return self.state is LinkState.LINKED and self.listed


class Peers:
    """All peers by instance, at most one incarnation each, and every incarnation known to be dead."""

    def __init__(self, unanswered_max: int) -> None:
        self._unanswered_max = unanswered_max
        self._peers: dict[str, Peer] = {}  # by name
        self._dead: dict[str, int] = {}
        self._turn = ""  # who was chosen last

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def get(self, instance: str, incarnation: int) -> Peer | None:
        """That incarnation of ``instance``, if it is a peer now."""
        peer = self._peers.get(instance)
        return peer if peer is not None and peer.info.incarnation == incarnation else None

    def current(self, instance: str) -> Peer | None:
        """Whatever incarnation of ``instance`` is a peer now."""
        return self._peers.get(instance)

    def add(self, info: InstanceInfo) -> Peer:
        """A new peer; the older incarnation was buried before."""
        peer = self._peers[info.instance] = Peer(info)
        self._peers = dict(sorted(self._peers.items()))
        return peer

    def bury(self, instance: str, incarnation: int) -> Peer | None:
        """This incarnation, and all before it, are dead. The peer that this ends, if any."""
        self._dead[instance] = max(incarnation, self._dead.get(instance, -1))
        peer = self._peers.get(instance)
        if peer is not None and peer.info.incarnation <= incarnation:
            return self._peers.pop(instance)
        return None

    def is_dead(self, instance: str, incarnation: int) -> bool:
        """Whether this incarnation is known to be dead."""
        return incarnation <= self._dead.get(instance, -1)

    @property
    def usable(self) -> list[Peer]:
        """Peers that may get new work, by name."""
        return [peer for peer in self._peers.values() if peer.is_usable]

    def choose(self, excluded: Container[str]) -> Peer | None:
        """Round-robin, the next peer that may get an offer now and is not ``excluded``."""
        candidates = [peer for peer in self.usable if peer.info.instance not in excluded]
        ready = [p for p in candidates if not p.silent and p.unanswered < self._unanswered_max]
        if not ready and all(peer.silent for peer in candidates):
            ready = [peer for peer in candidates if peer.unanswered == 0]
        if not ready:
            return None
        after = [peer for peer in ready if peer.info.instance > self._turn]
        chosen = (after or ready)[0]
        self._turn = chosen.info.instance
        return chosen

    def heard_from(self, instance: str, incarnation: int) -> None:
        """That peer says something: it is not stuck."""
        peer = self.get(instance, incarnation)
        if peer is not None:
            peer.silent = False
