"""What the machine asks of whoever holds an instance's requests: the local, the prefill or the decode side."""

from __future__ import annotations

from typing import Protocol

from actors.runtime.machine import Handlers, StatusRequests
from actors.scheduler.batching import Outcome, Step
from messages.requests import CancelRequest
from messages.timers import RequestTimer


class Side(Protocol):
    """One instance's requests. Effects go to the outbox that the side was built with."""

    @property
    def live_count(self) -> int:
        """Requests that have not ended."""
        ...

    @property
    def waiting_count(self) -> int:
        """Requests of which nothing runs yet."""
        ...

    def handlers(self) -> Handlers[None]:
        """What is done with messages about requests."""
        ...

    def on_cancel_request(self, now_ns: int, sender: str, message: CancelRequest) -> None:
        """Nobody waits for this request any more."""
        ...

    def on_timer(self, now_ns: int, message: RequestTimer) -> None:
        """A timer of one request attempt is due."""
        ...

    def on_instance_lost(self, now_ns: int, instance: str, incarnation: int) -> None:
        """This incarnation of a peer, and all before it, are dead."""
        ...

    def on_peer_linked(self, now_ns: int) -> None:
        """A peer can be used from now on."""
        ...

    @property
    def waits_for_steps(self) -> bool:
        """Whether somebody outside the batching core goes on only when no step is in flight."""
        ...

    def before_step(self, now_ns: int) -> None:
        """Prepare what can be prepared: called after every message."""
        ...

    def on_step_started(self, now_ns: int, step: Step) -> None:
        """This step will be sent to the engine next."""
        ...

    def on_outcomes(self, now_ns: int, outcomes: list[Outcome]) -> None:
        """What a step did."""
        ...

    def drain(self, reason: str) -> None:
        """Take nothing new; answer with ``reason``."""
        ...

    def fail_all(self, now_ns: int, reason: str) -> None:
        """End every request with a retryable error: the instance stops."""
        ...

    def status(self) -> StatusRequests:
        """One row per live request."""
        ...
