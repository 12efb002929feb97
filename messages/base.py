"""What every message is: a frozen, tagged struct; and how actors are addressed.

Numbers that tell a late message from a current one (see docs/architecture.md):

* ``epoch`` counts the attempts of one request. The gateway's attempt ``n`` starts at ``first_epoch(n)``; a prefill
  instance that offers the same prefilled state to another decode instance adds one. A larger epoch is always newer.
* ``incarnation`` counts the lives of one instance.
* ``generation`` counts the uses of one staging lease.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1
"""Compared once, in a link's handshake; peers that differ refuse each other."""

EPOCHS_PER_ATTEMPT = 1 << 16


def first_epoch(attempt: int) -> int:
    """The epoch with which the gateway submits attempt ``attempt`` (0, 1, …) of a request."""
    return attempt * EPOCHS_PER_ATTEMPT


def attempt_of(epoch: int) -> int:
    """The gateway's attempt to which ``epoch`` belongs."""
    return epoch // EPOCHS_PER_ATTEMPT


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type", omit_defaults=True):
    """Base of everything actors say. Messages carry ids, names, shapes and numbers, never tensors."""


def node_of(address: str) -> str:
    """``d0.r0/staging`` → ``d0.r0``."""
    return address.partition("/")[0]


def actor_of(address: str) -> str:
    """``d0.r0/staging`` → ``staging``."""
    return address.partition("/")[2]


def instance_of(address: str) -> str:
    """``d0.r0/staging`` → ``d0``; ``front/gateway`` → ``front``."""
    return node_of(address).partition(".")[0]


def rank_address(instance: str, rank: int, actor: str) -> str:
    """Address of an actor on one tensor-parallel rank of an instance, for example ``d0.r0/transfer``."""
    return f"{instance}.r{rank}/{actor}"


def control_address(instance: str, actor: str) -> str:
    """Address of an actor on an instance's control node, for example ``d0.ctl/scheduler``."""
    return f"{instance}.ctl/{actor}"


GATEWAY = "front/gateway"
REGISTRY = "front/registry"
SUPERVISOR = "supervisor/root"
