"""Which peers a rank is linked with, and the plans of each link. Pure; part of the transfer machine.

A link belongs to one incarnation of one peer instance. It is ``mapping`` until the shell has mapped the peer's regions,
``linked`` while hand-offs may use it, and ``lost`` once the peer's incarnation is dead: nothing new begins on it, and
it is unmapped when no attempt and no job refers to it any more.

A prefill rank keeps a plan for every rank of the peer; a decode rank one plan, for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from actors.transfer.jobs import MapPeer
from actors.transfer.plan import plan
from actors.transfer.routes import PlanRefused, TransferPlan
from actors.transfer.staging import lease_bytes
from messages.cluster import InstanceInfo, LinkPeer
from messages.layout import Manifest, RegionDescriptor


class TooEarly(PlanRefused):
    """Not all ranks of this instance are ready: a later proposal may be good."""


class LinkState(Enum):
    """Where a link stands."""

    MAPPING = "mapping"
    LINKED = "linked"
    LOST = "lost"


PeerKey = tuple[str, int]
"""(instance, incarnation)."""


@dataclass
class PeerLink:
    """One incarnation of one peer."""

    instance: str
    incarnation: int
    peer_is_source: bool
    asked_by: str  # the engine that gets PeerLinked
    plans: dict[int, TransferPlan]  # by target rank
    sources: tuple[Manifest, ...] = ()  # kept on the target side, to verify restores
    target: Manifest | None = None
    state: LinkState = LinkState.MAPPING
    mapped: bool = False  # the shell has answered; before that it must not be asked to unmap
    users: set[tuple[str, int]] = field(default_factory=set)  # attempts that still refer to it

    @property
    def key(self) -> PeerKey:
        """(instance, incarnation)."""
        return self.instance, self.incarnation


class LinkTable:
    """All links of one rank, by (instance, incarnation)."""

    def __init__(self, rank: int, windows: int, verify: bool) -> None:
        self.rank = rank
        self._windows = windows
        self._verify = verify
        self._links: dict[PeerKey, PeerLink] = {}
        self.lost: dict[PeerKey, PeerLink] = {}  # those of them whose peer is dead

    def find(self, instance: str, incarnation: int) -> PeerLink | None:
        """The link with that life of that peer, in any state."""
        return self._links.get((instance, incarnation))

    def usable(self, instance: str, incarnation: int) -> PeerLink | None:
        """The link, if new attempts may use it."""
        link = self.find(instance, incarnation)
        return link if link is not None and link.state is LinkState.LINKED else None

    def lose(self, link: PeerLink) -> None:
        """The peer is dead, or could not be mapped: nothing new begins on this link."""
        link.state = LinkState.LOST
        self.lost[link.key] = link

    def forget(self, link: PeerLink) -> None:
        """The link is gone."""
        del self._links[link.key]
        del self.lost[link.key]

    def __len__(self) -> int:
        return len(self._links)

    def propose(self, asked_by: str, message: LinkPeer) -> tuple[PeerLink, MapPeer]:
        """A new link and the job that maps its regions. Raises ``PlanRefused`` with the reason for people."""
        peer = message.peer
        own = sorted(message.own_manifests, key=lambda manifest: manifest.rank)
        mine = next((manifest for manifest in own if manifest.rank == self.rank), None)
        if mine is None:
            raise TooEarly(f"the engine named no manifest of rank {self.rank} of its own instance")
        if peer.role == "PREFILL":
            link, job = self._toward_source(asked_by, peer, mine)
        elif peer.role == "DECODE":
            link, job = self._toward_target(asked_by, peer, own, mine)
        else:
            raise PlanRefused(
                f"{peer.instance} is {peer.role}: only PREFILL and DECODE instances hand over to each other"
            )
        self._links[link.key] = link
        return link, job

    def _toward_source(self, asked_by: str, peer: InstanceInfo, mine: Manifest) -> tuple[PeerLink, MapPeer]:
        """This rank will receive from ``peer``."""
        found = plan(peer.manifests, mine, source_incarnation=peer.incarnation)
        needed = lease_bytes(found, self._windows)
        if needed > mine.staging_bytes:
            raise PlanRefused(
                f"one staging lease for {peer.instance} takes {needed >> 20} MiB, rank {mine.rank} of {mine.instance} "
                f"has {mine.staging_bytes >> 20} MiB of staging; raise staging_mb or lower "
                "max_tokens_per_chunk_for_prefill"
            )
        readable = set(range(found.source_tp_size)) if self._verify else set(found.source_ranks)
        regions = [region for manifest in peer.manifests if manifest.rank in readable for region in _caches(manifest)]
        link = PeerLink(
            instance=peer.instance,
            incarnation=peer.incarnation,
            peer_is_source=True,
            asked_by=asked_by,
            plans={self.rank: found},
            sources=peer.manifests if self._verify else (),
            target=mine if self._verify else None,
        )
        return link, _map_job(link, [mine.staging_region_id], regions)

    def _toward_target(
        self, asked_by: str, peer: InstanceInfo, own: Sequence[Manifest], mine: Manifest
    ) -> tuple[PeerLink, MapPeer]:
        """This rank will send to ``peer``."""
        plans: dict[int, TransferPlan] = {}
        staging: list[str] = []
        regions: list[RegionDescriptor] = []
        for target in sorted(peer.manifests, key=lambda manifest: manifest.rank):
            found = plan(own, target, source_incarnation=mine.incarnation, target_incarnation=peer.incarnation)
            if mine.rank in found.push_ranks:
                plans[target.rank] = found
                staging.append(target.staging_region_id)
                regions += target.regions
        link = PeerLink(
            instance=peer.instance,
            incarnation=peer.incarnation,
            peer_is_source=False,
            asked_by=asked_by,
            plans=plans,
        )
        return link, _map_job(link, staging, regions)


def _caches(manifest: Manifest) -> list[RegionDescriptor]:
    """The regions of a manifest that hold its cache tensors."""
    used = {layout.region_id for layout in manifest.tensors}
    return [region for region in manifest.regions if region.region_id in used]


def _map_job(link: PeerLink, staging: Sequence[str], regions: Sequence[RegionDescriptor]) -> MapPeer:
    return MapPeer(
        instance=link.instance,
        incarnation=link.incarnation,
        plans=tuple(link.plans.values()),
        staging_region_ids=tuple(staging),
        regions=tuple(regions),
        sources=link.sources,
        target=link.target,
    )
