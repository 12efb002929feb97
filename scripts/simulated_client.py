"""The clients of a simulated cluster: what they asked for, what they got, and whether that is right (I1, I6, I7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from actors.gateway.jobs import DeliverEnd, DeliverRefusal, DeliverTokens, PublishInstances, PublishLoad
from actors.runtime.context import Done, Emit
from actors.runtime.machine import Job
from actors.runtime.simulated_nodes import SimulatedContext
from actors.runtime.simulation import Simulation
from messages.base import GATEWAY
from messages.gateway import ClientCancel, ClientSubmit, Delivered, Sample
from messages.requests import SamplingParams
from scripts.simulated_memory import Violation
from scripts.simulated_model import expected_output

HTTP = "front/http"
RESUBMIT_MS = 800.0
"""A client that is told "not now" (503), or finds nobody listening, asks again after so long."""

State = Literal["new", "sent", "finished", "cancelled", "error", "lost"]


@dataclass
class Request:
    """One sample that a client asked for; ``siblings`` are asked for together with it (``n``), not on their own.

    Names are ``r<number>``, or ``r<number>-<sample>`` for the samples of one prompt.
    """

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: Literal["online", "offline"]
    cancel_after_ms: float = -1.0
    state: State = "new"
    ticket: int = 0
    tokens: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    reason: str = ""
    error: str = ""
    submitted_ns: int = 0
    attempts: int = 0
    siblings: list[Request] = field(default_factory=list)
    is_sibling: bool = False

    @property
    def is_over(self) -> bool:
        """The client waits for nothing more."""
        return self.state not in ("new", "sent")


class Clients:
    """All clients. They talk to whichever front is alive."""

    def __init__(
        self, simulation: Simulation, requests: list[Request], deadline_ms: float, speculative_tokens: int
    ) -> None:
        self._simulation = simulation
        self.requests = requests
        self._deadline_ns = int(deadline_ms * 1e6)
        self._tickets: dict[int, tuple[Request, ...]] = {}
        self._ticket = 0
        self.open_count = len(requests)
        for request in requests:
            request.expected, request.reason = expected_output(
                request.name, request.prompt, request.sampling, speculative_tokens
            )

    def submit(self, request: Request) -> None:
        """The client sends its request, now."""
        if request.is_over or request.is_sibling:
            return
        simulation = self._simulation
        front = simulation.nodes.get("front")
        samples = (request, *request.siblings)
        for sample in samples:
            sample.submitted_ns = sample.submitted_ns or simulation.now_ns
        if front is None or not front.alive or front.stalled:
            simulation.call_at(RESUBMIT_MS, lambda: self.submit(request))
            return
        self._ticket += 1
        ticket = self._ticket
        for sample in samples:
            sample.ticket = ticket
            sample.state = "sent"
            sample.tokens = []
        self._tickets[ticket] = samples
        message = ClientSubmit(
            ticket=ticket,
            request_id=request.name,
            samples=tuple(
                Sample(request_id=sample.name, prompt_token_ids=sample.prompt, sampling=sample.sampling)
                for sample in samples
            ),
            priority=request.priority,
        )
        simulation.send_from(front, HTTP, GATEWAY, message, "")
        if request.cancel_after_ms >= 0:
            simulation.call_at(request.cancel_after_ms, lambda: self.cancel(ticket))

    def cancel(self, ticket: int) -> None:
        """The client of this ticket goes away."""
        samples = [sample for sample in self._tickets.get(ticket, ()) if not sample.is_over]
        front = self._simulation.nodes.get("front")
        if not samples or front is None or not front.alive:
            return
        for sample in samples:
            self._close(sample, "cancelled")
        self._simulation.send_from(front, HTTP, GATEWAY, ClientCancel(ticket=ticket), "")

    def front_died(self) -> None:
        """Every connection broke: whoever waited for an answer gets none. (Nobody may answer later, either.)"""
        for request in [sample for samples in self._tickets.values() for sample in samples]:
            if not request.is_over:
                self._close(request, "lost")
        self._tickets.clear()

    def deliver(self, job: DeliverTokens) -> None:
        """Tokens for a client (I1: the next index, once, in order; and the right ones)."""
        request = self._sample(job)
        if request is None or request.state == "cancelled":
            return
        if request.state != "sent":
            raise Violation(f"I1: {request.name} gets tokens after its end ({request.state})")
        if job.first_index != len(request.tokens):
            raise Violation(f"I1: {request.name} gets token {job.first_index} after {len(request.tokens)} tokens")
        request.tokens += job.token_ids
        count = len(request.tokens)
        if request.tokens != request.expected[:count]:
            raise Violation(
                f"I6: {request.name} got {request.tokens[-4:]} up to index {count - 1}, expected"
                f" {request.expected[max(0, count - 4) : count]}"
            )

    def end(self, job: DeliverEnd) -> None:
        """The last word on a request (I1: one, and the right one)."""
        request = self._sample(job)
        if request is None or request.state == "cancelled":
            return
        if request.state != "sent":
            raise Violation(f"I1: {request.name} is told twice how it ended ({request.state}, now {job.reason})")
        if job.reason == "error":
            request.error = f"{job.code} {job.message}"
            self._close(request, "error")
            return
        if job.reason == "cancelled":
            raise Violation(f"I1: {request.name} ended as cancelled, but its client is there")
        if (request.tokens, job.reason) != (request.expected, request.reason):
            raise Violation(
                f"I1: {request.name} ended ({job.reason}) after {len(request.tokens)} tokens, expected"
                f" {len(request.expected)} ({request.reason})"
            )
        if job.usage.completion_tokens != len(request.tokens) or job.usage.prompt_tokens != len(request.prompt):
            raise Violation(f"I1: {request.name} is billed {job.usage} for {len(request.tokens)} tokens")
        self._close(request, "finished")

    def refuse(self, job: DeliverRefusal) -> None:
        """Not admitted. For now: ask again. For good: an error."""
        samples = [sample for sample in self._tickets.pop(job.ticket, ()) if not sample.is_over]
        for sample in samples:
            if job.code == 503:
                sample.state = "new"
            else:
                sample.error = f"{job.code} {job.message}"
                self._close(sample, "error")
        if samples and job.code == 503:
            self._simulation.call_at(RESUBMIT_MS, lambda: self.submit(samples[0]))

    def overdue(self) -> Request | None:
        """A request that is open longer than it may be (I7)."""
        now_ns = self._simulation.now_ns
        for request in self.requests:
            if not request.is_over and request.submitted_ns and now_ns - request.submitted_ns > self._deadline_ns:
                return request
        return None

    def _sample(self, job: DeliverTokens | DeliverEnd) -> Request | None:
        samples = self._tickets.get(job.ticket)
        return samples[job.sample] if samples is not None else None

    def _close(self, request: Request, state: State) -> None:
        request.state = state
        self.open_count -= 1


class ClientExecutor:
    """The gateway's jobs: hand things to clients."""

    def __init__(self, clients: Clients, context: SimulatedContext) -> None:
        self._clients = clients
        self._context = context

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Deliver at once; the answer to an end comes a little later, as from the HTTP side's own thread."""
        match job:
            case DeliverTokens():
                self._clients.deliver(job)
            case DeliverEnd():
                self._clients.end(job)
                delivered = Delivered(ticket=job.ticket, sample=job.sample)
                self._context.call_later(0.05, lambda: done(delivered))
            case DeliverRefusal():
                self._clients.refuse(job)
            case PublishInstances() | PublishLoad():
                pass
            case _:
                raise TypeError(f"{type(job).__name__} is no job of a gateway")

    def close(self) -> None:
        """Nothing outlives a node's life here."""
