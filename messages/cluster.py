"""The conversation about who is alive, in which role, with which layout, and which instances are linked."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from messages.base import Message
from messages.layout import Manifest

InstanceRole = Literal["MIX", "PREFILL", "DECODE"]

OPPOSITE_ROLE: Final[dict[InstanceRole, InstanceRole]] = {"PREFILL": "DECODE", "DECODE": "PREFILL"}
"""Whom instances of a role link with; a mixed one links with nobody."""


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the registry knows of one live instance. ``manifests``, one per rank, are long: only who links gets them."""

    instance: str
    incarnation: int
    role: InstanceRole
    tp_size: int
    max_model_len: int
    block_count: int
    slot_count: int
    manifests: tuple[Manifest, ...] = ()


class RegisterInstance(Message, frozen=True, kw_only=True):
    """Scheduler → registry: all ranks are ready. Sent again until the registry's view names this incarnation."""

    info: InstanceInfo


class LinkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one side's link to a peer came out: it is linked, or ``refused`` says why it will not be."""

    instance: str
    incarnation: int
    refused: str = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Scheduler → registry (and on to the gateway), every ``heartbeat_ms``: alive, how busy, and linked with whom.

    ``links`` has the peers of the opposite role whose link is made or given up; one is sent at once when that changes.
    ``view_version`` is the version of the view its sender holds, -1 when it does not say; the registry answers an old
    one with the current view, so that a lost view heals.
    """

    instance: str
    incarnation: int
    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    slots_free: int
    slots_total: int
    leases: int = 0
    view_version: int = -1
    links: tuple[LinkReport, ...] = ()


class ClusterView(Message, frozen=True, kw_only=True):
    """Registry → gateway and every scheduler, whenever it changes: all live instances.

    A larger (``registry_incarnation``, ``version``) is newer. An instance that is absent gets no new work, but may
    still write (it was silent too long, or the registry is new and has not heard of it yet): only ``InstanceLost``, or
    a pair (instance, last dead incarnation) in ``lost``, says that it is dead.

    ``links`` are the pairs (prefill, decode) of which both sides say that they are linked; ``refused`` those that will
    not be, as one side says, with its reason. A pair in neither is still being linked.

    A scheduler's view has the manifests of the instances of the opposite role, with which it links; other views, and
    what a scheduler is told of other instances, have none.
    """

    version: int
    registry_incarnation: int
    instances: tuple[InstanceInfo, ...]
    lost: tuple[tuple[str, int], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str, str], ...] = ()


class ViewRequest(Message, frozen=True, kw_only=True):
    """Anyone → registry: send me the current ``ClusterView``."""


class InstanceSilent(Message, frozen=True, kw_only=True):
    """Registry → supervisor: no heartbeat for ``silent_ms``; it left the view. Only its end proves that it is dead."""

    instance: str
    incarnation: int
    silent_ms: int


class InstanceLost(Message, frozen=True, kw_only=True):
    """Supervisor → registry → everybody: this incarnation is dead; nothing of it reads or writes any more."""

    instance: str
    incarnation: int
    reason: str


class LinkPeer(Message, frozen=True, kw_only=True):
    """Scheduler → engine → transfers: a peer of the opposite role appeared; plan and map its regions.

    The engine fills in ``own_manifests``, one of every rank of its own instance: a plan is made from both sides'.
    """

    peer: InstanceInfo
    own_manifests: tuple[Manifest, ...] = ()


class PeerLinked(Message, frozen=True, kw_only=True):
    """Transfer (rank ≥ 0) → engine, engine (rank -1) → scheduler: plans hold and regions are mapped."""

    instance: str
    incarnation: int
    rank: int


class LinkFailed(Message, frozen=True, kw_only=True):
    """Transfer → engine → scheduler: the plan was refused, a region could not be mapped, or a rank said nothing.

    ``final``: these two lives can never be linked (their layouts do not fit), so nobody need try again.
    """

    instance: str
    incarnation: int
    rank: int
    reason: str
    final: bool = False


class UnlinkPeer(Message, frozen=True, kw_only=True):
    """Scheduler → engine → transfers: the peer's incarnation is dead; unmap it and drop what it still owed."""

    instance: str
    incarnation: int


class PeerUnlinked(Message, frozen=True, kw_only=True):
    """Transfer → engine: ``UnlinkPeer`` was heard. The engine repeats it to the ranks that have not said so."""

    instance: str
    incarnation: int
    rank: int
