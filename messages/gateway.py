"""The conversation inside the front: its HTTP side and the gateway's machine.

A *ticket* is one HTTP request in the front's life; unlike a request id, which a client may choose, no two live HTTP
requests ever share one. A *sample* is one sequence of a ticket: prompts times ``n`` (or ``best_of``), each a request of
its own to the instances.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from messages.base import Message
from messages.requests import SamplingParams


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. ``request_id`` is the client request's id, or ``<id>-<k>`` when it has several."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


class ClientSubmit(Message, frozen=True, kw_only=True):
    """HTTP → gateway: take these samples, all of them or none. Everything in them is already validated."""

    ticket: int
    request_id: str
    samples: tuple[Sample, ...]
    priority: Literal["online", "offline"] = "online"


class ClientCancel(Message, frozen=True, kw_only=True):
    """HTTP → gateway: the client is gone; nothing of this ticket is wanted any more. Unknown tickets are ignored."""

    ticket: int
    reason: str = "client disconnected"


class ClientStopped(Message, frozen=True, kw_only=True):
    """HTTP → gateway: a stop string ended this sample with its first ``token_count`` tokens (only HTTP knows text)."""

    ticket: int
    sample: int
    token_count: int


class Delivered(Message, frozen=True, kw_only=True):
    """Stream → gateway: a sample's end is in its client's stream; nothing of it is left to deliver."""

    ticket: int
    sample: int
