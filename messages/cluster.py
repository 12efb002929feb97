"""The conversation about who is alive, in which role, with which layout, and which instances are linked."""

from __future__ import annotations

from typing import Literal

import msgspec

from messages.base import Message
from messages.layout import Manifest

InstanceRole = Literal["MIX", "PREFILL", "DECODE"]


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the registry knows of one live instance."""

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


class Heartbeat(Message, frozen=True, kw_only=True):
    """Scheduler → registry, about once a second: alive, and how busy."""

    instance: str
    incarnation: int
    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    slots_free: int
    slots_total: int
    leases: int = 0


class ClusterView(Message, frozen=True, kw_only=True):
    """Registry → gateway and every scheduler, whenever it changes: all live instances."""

    version: int
    registry_incarnation: int
    instances: tuple[InstanceInfo, ...]


class InstanceLost(Message, frozen=True, kw_only=True):
    """Supervisor → registry → everybody: this incarnation is dead; nothing of it reads or writes any more."""

    instance: str
    incarnation: int
    reason: str


class LinkPeer(Message, frozen=True, kw_only=True):
    """Scheduler → engine → transfers: a peer of the opposite role appeared; plan and map its regions."""

    peer: InstanceInfo


class PeerLinked(Message, frozen=True, kw_only=True):
    """Transfer (rank ≥ 0) → engine, engine (rank -1) → scheduler: plans hold and regions are mapped."""

    instance: str
    incarnation: int
    rank: int


class LinkFailed(Message, frozen=True, kw_only=True):
    """Transfer → engine → scheduler: the plan was refused or a region could not be mapped."""

    instance: str
    incarnation: int
    rank: int
    reason: str


class UnlinkPeer(Message, frozen=True, kw_only=True):
    """Scheduler → engine → transfers: the peer's incarnation is dead; unmap it and drop what it still owed."""

    instance: str
    incarnation: int
