"""Whether the gateway takes a request. Pure."""

from __future__ import annotations

from actors.gateway.attempts import RETRY_AFTER_S
from actors.gateway.book import Book
from actors.gateway.jobs import DeliverRefusal
from actors.gateway.routing import Router
from messages.gateway import ClientSubmit

STOPPING = "the server is stopping"
"""What clients and ``/health`` are told while the gateway drains."""


def refuse(message: ClientSubmit, book: Book, router: Router, *, draining: bool) -> DeliverRefusal | None:
    """Why this ticket is not admitted, or None: 503 stopping or nobody serves, 409 id in flight, 400 too long."""
    ticket = message.ticket
    if draining:
        return DeliverRefusal(ticket=ticket, code=503, message=STOPPING, retry_after_s=RETRY_AFTER_S)
    if taken := book.taken(message.request_id, (sample.request_id for sample in message.samples)):
        text = f"request id {taken!r} is already in flight; choose another or wait until that request has ended"
        return DeliverRefusal(ticket=ticket, code=409, message=text, param="request_id")
    if not router.can_serve():
        alive = ", ".join(sorted(router.instances)) or "none"
        text = f"no instance can serve now (alive: {alive}); try again in {RETRY_AFTER_S} s"
        return DeliverRefusal(ticket=ticket, code=503, message=text, retry_after_s=RETRY_AFTER_S)
    longest = max(message.samples, key=lambda sample: len(sample.prompt_token_ids) + sample.sampling.max_tokens)
    prompt, output = len(longest.prompt_token_ids), longest.sampling.max_tokens
    if prompt + output > (limit := router.length_max()):
        text = (
            f"prompt ({prompt} tokens) plus max_tokens ({output}) is {prompt + output} tokens, but the longest "
            f"sequence that a live instance holds is {limit} tokens"
        )
        return DeliverRefusal(ticket=ticket, code=400, message=text, param="max_tokens")
    return None
