"""The envelope that carries one message from actor to actor, and the union of everything that may be inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import msgspec

from messages import batch, cluster, gateway, handoff, lifecycle, requests, timers, transfer
from messages.base import Message

MESSAGE_TYPES: tuple[type[Message], ...] = tuple(
    value
    for module in (requests, gateway, handoff, batch, transfer, cluster, lifecycle, timers)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
)
"""Every message type, in the order of its conversation's file."""

if TYPE_CHECKING:
    AnyMessage = Message
else:
    AnyMessage = Union[MESSAGE_TYPES]  # noqa: UP007 - a union built from a tuple


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message on its way.

    ``sender`` and ``to`` are addresses ``node/actor`` (``d0.r0/staging``). ``message_id`` is ``node#incarnation.count``
    and unique in a run; ``parent_id`` is the message whose handling caused this one; ``trace_id`` is the request;
    ``epoch`` its attempt; ``incarnation`` the life of the sender's node. ``sent_ns`` is the host's monotonic clock.
    """

    message_id: str
    sender: str
    to: str
    sent_ns: int
    message: AnyMessage
    parent_id: str = ""
    trace_id: str = ""
    epoch: int = 0
    incarnation: int = 0
