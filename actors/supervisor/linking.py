"""Whether a tree's instances can hand requests over to each other: what its readiness waits for. Pure."""

from __future__ import annotations

from actors.supervisor.topology import Topology
from messages.cluster import ClusterView


class Linking:
    """The links of one topology, as the registry's newest view tells them."""

    def __init__(self, topology: Topology) -> None:
        self._sources = [plan.name for plan in topology.instances if plan.role == "PREFILL"]
        self._targets = [plan.name for plan in topology.instances if plan.role == "DECODE"]
        self._linked: frozenset[tuple[str, str]] = frozenset()
        self._refused: dict[tuple[str, str], str] = {}

    def follow(self, view: ClusterView) -> list[tuple[str, str, str]]:
        """Take what ``view`` says; returns the refusals (prefill, decode, reason) that are new."""
        self._linked = frozenset(view.links)
        news = [refusal for refusal in view.refused if self._refused.get(refusal[:2]) != refusal[2]]
        self._refused = {(source, target): why for source, target, why in view.refused}
        return news

    @property
    def pending(self) -> list[str]:
        """Pairs of which nobody knows yet: an offer between them may be refused once more."""
        pairs = [(source, target) for source in self._sources for target in self._targets]
        return [f"{pair[0]} with {pair[1]}" for pair in pairs if pair not in self._linked and pair not in self._refused]

    @property
    def hopeless(self) -> str:
        """Why some prefill instance can hand over to nobody, "" while each can or still may."""
        for source in self._sources:
            refusals = [f"{target}: {why}" for (name, target), why in self._refused.items() if name == source]
            if len(refusals) == len(self._targets):
                return f"{source} can hand over to no decode instance; links refused by {'; '.join(refusals)}"
        return ""
