"""What a timer says when it is due. A timer is an effect that comes back as one of these messages, sent by the actor
to itself, so that a recorded inbox replays without a clock."""

from __future__ import annotations

from messages.base import Message


class RequestTimer(Message, frozen=True, kw_only=True):
    """Something about one request attempt is due (an offer's retry, a reservation's deadline, …)."""

    request_id: str
    epoch: int
    purpose: str


class InstanceTimer(Message, frozen=True, kw_only=True):
    """Something about one instance is due (a heartbeat, a restart after backoff, a link's deadline, …)."""

    instance: str
    incarnation: int
    purpose: str
