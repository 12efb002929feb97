"""Where the node's thread meets the HTTP side's event loop: deliveries in, text out, and the client's words back.

One ``TicketStream`` per HTTP request. The machine's jobs arrive on the node's thread (``Edge.submit``), are put into
the ticket's inbox, and are worked off on the event loop: tokens become text there, stop strings are found there. So a
slow client delays nobody: its text waits in its own stream, bounded by its own ``max_tokens``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from actors.gateway.detokenizer import TextStream
from actors.gateway.errors import ApiError
from actors.gateway.jobs import DeliverEnd, DeliverRefusal, DeliverTokens, PublishInstances, PublishLoad
from actors.gateway.metrics import GatewayMetrics
from actors.runtime.context import Done, Emit
from actors.runtime.machine import Job
from messages.base import Message
from messages.codec import UnencodableValue, check_carried
from messages.gateway import ClientCancel, ClientStopped, ClientSubmit, Delivered, Sample
from messages.requests import TokenLogprobs

Post = Callable[[Message], None]
"""Tell the gateway's machine something, from any thread."""


_STARTING = "the server is starting"


@dataclass
class Delta:
    """What one sample gained since it was last looked at."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, other: Delta) -> None:
        """Append what came later."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.offsets += other.offsets


class SampleStream:
    """One sample's output. Event loop only.

    ``total`` is all of it, ``take`` gives what is new. ``end`` is the machine's last word; ``failure`` its error.
    ``discard`` drops every token (a request for the prompt's log-probabilities alone).
    """

    def __init__(self, sample: Sample, text: TextStream, *, discard: bool = False) -> None:
        self.sample = sample
        self.total = Delta()
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.end: DeliverEnd | None = None
        self._text = text
        self._new = Delta()
        self._discard = discard

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return bool(self._text.stop)

    @property
    def finish_reason(self) -> str | None:
        """ "stop" or "length" once it has ended."""
        if self.end is None:
            return None
        return "stop" if self.stopped else self.end.reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended it, as vLLM reports it."""
        if self.stopped:
            return self._text.stop
        last = self.total.token_ids[-1] if self.total.token_ids else -1
        ended_by_token = self.end is not None and self.end.reason == "stop"
        return last if ended_by_token and last in self.sample.sampling.stop_token_ids else None

    @property
    def failure(self) -> ApiError | None:
        """Why it has no proper end."""
        end = self.end
        if end is None or self.stopped or end.reason not in ("error", "cancelled"):
            return None
        if end.reason == "cancelled":
            return ApiError(499, "the request was cancelled")
        return ApiError(end.code, end.message, retry_after_s=end.retry_after_s)

    def feed(self, job: DeliverTokens) -> bool:
        """Take tokens; true when they completed a stop string, after which nothing more is taken."""
        if job.prompt_logprobs:
            self.prompt_logprobs = job.prompt_logprobs
        if self._discard or self.stopped:
            return False
        for position, token_id in enumerate(job.token_ids):
            step = self._text.push(token_id)
            logprobs = list(job.logprobs[position : position + 1])
            self._add(Delta(step.text, [token_id], logprobs, [step.offset]))
            if step.stopped:
                return True
        return False

    def finish(self, job: DeliverEnd) -> None:
        """The last word: what was held back is shown."""
        if not self._discard:
            self._add(Delta(self._text.flush()))
        self.end = job

    def take(self) -> Delta:
        """What is new since the last call."""
        new, self._new = self._new, Delta()
        return new

    def _add(self, delta: Delta) -> None:
        self.total.add(delta)
        self._new.add(delta)


class Inbox:
    """What the machine said and the event loop has not heard: one wake-up for all that a step brings to all streams."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._jobs: list[tuple[TicketStream, Job]] = []

    def bind(self) -> None:
        """Work jobs off on the event loop that calls this, from now on."""
        self._loop = asyncio.get_running_loop()

    def put(self, stream: TicketStream, job: Job) -> None:
        """Queue a job of ``stream``. Any thread; never blocks."""
        with self._lock:
            self._jobs.append((stream, job))
            if len(self._jobs) > 1:
                return  # the loop is on its way
        self.call(self._work_off)

    def call(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the event loop soon. Any thread."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            return  # the loop is closed: the server has stopped, nobody waits

    def _work_off(self) -> None:
        with self._lock:
            jobs, self._jobs = self._jobs, []
        for stream, job in jobs:
            stream.work_off(job)


class TicketStream:
    """All samples of one HTTP request. Event loop only, except ``deliver`` and ``abandon``."""

    def __init__(self, ticket: int, samples: Sequence[SampleStream], post: Post, inbox: Inbox) -> None:
        self.ticket = ticket
        self.samples = samples
        self.refusal: ApiError | None = None
        self.abandoned = False
        self._post = post
        self._inbox = inbox
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.refusal is not None or all(sample.end is not None for sample in self.samples)

    @property
    def failure(self) -> ApiError | None:
        """The first error among its samples, or its refusal."""
        if self.refusal is not None:
            return self.refusal
        return next((sample.failure for sample in self.samples if sample.failure is not None), None)

    def deliver(self, job: Job) -> None:
        """Take a job of the machine. Any thread; never blocks."""
        self._inbox.put(self, job)

    def abandon(self) -> None:
        """The client is gone: wake whoever waits. Any thread."""
        self.abandoned = True
        self._inbox.call(self._news.set)

    async def news(self) -> bool:
        """Wait until something came or the client is gone; false when nothing more will come."""
        if not self.is_over and not self.abandoned:
            await self._news.wait()
        self._news.clear()
        return not self.is_over and not self.abandoned

    def work_off(self, job: Job) -> None:
        """Turn a job into text, and wake whoever waits for news. Event loop only."""
        if self.refusal is not None:
            return  # it has failed, and its cancellation is on its way
        try:
            self._apply(job)
        except Exception as error:  # one request's text must not take the others with it
            self.refusal = ApiError(500, f"the answer could not be turned into text: {error!r}")
            self._post(ClientCancel(ticket=self.ticket, reason="text failed"))
        self._news.set()

    def _apply(self, job: Job) -> None:
        match job:
            case DeliverTokens():
                sample = self.samples[job.sample]
                if sample.feed(job):
                    count = len(sample.total.token_ids)
                    self._post(ClientStopped(ticket=self.ticket, sample=job.sample, token_count=count))
            case DeliverEnd():
                self.samples[job.sample].finish(job)
            case DeliverRefusal():
                self.refusal = ApiError(job.code, job.message, job.param, job.retry_after_s)


def _refusal_of(samples: Sequence[Sample]) -> ApiError | None:
    """Why instances cannot be told of these samples. The one gate for values that clients send: what a message cannot
    carry, whatever it is, fails here and fails its own request only. A prompt that samples share is looked at once."""
    seen: set[int] = set()
    for sample in samples:
        prompt = sample.prompt_token_ids
        try:
            check_carried(msgspec.structs.replace(sample, prompt_token_ids=()) if id(prompt) in seen else sample)
        except UnencodableValue as error:
            return ApiError(400, f"the request holds a value that cannot be passed on: {error}")
        seen.add(id(prompt))
    return None


class Edge:
    """Carries out the gateway machine's jobs, and lets HTTP handlers talk to it. Thread-safe.

    ``instances``, ``missing`` and ``length_max`` are the latest the machine published.
    """

    def __init__(self, post: Post, metrics: GatewayMetrics) -> None:
        self.metrics = metrics
        self.instances: tuple[tuple[str, str, int], ...] = ()
        self.missing = _STARTING
        self.length_max = 0
        self._post = post
        self._lock = threading.Lock()
        self._inbox = Inbox()
        self._streams: dict[int, TicketStream] = {}
        self._ticket_count = 0
        self._not_serving = _STARTING  # "": the machine listens

    # -- HTTP handlers, on the event loop ------------------------------------------------------------------------------

    def open(self, request_id: str, samples: Sequence[SampleStream], priority: str) -> TicketStream:
        """Submit a request; its stream is in place before the machine hears of it."""
        with self._lock:
            self._ticket_count += 1
            self._inbox.bind()
            stream = TicketStream(self._ticket_count, samples, self._post, self._inbox)
            if self._not_serving:
                stream.refusal = ApiError(503, self._not_serving, retry_after_s=1)
            else:
                stream.refusal = _refusal_of([sample.sample for sample in samples])
            if stream.refusal is not None:
                return stream
            self._streams[stream.ticket] = stream
        submit = ClientSubmit(
            ticket=stream.ticket,
            request_id=request_id,
            samples=tuple(sample.sample for sample in samples),
            priority="offline" if priority == "offline" else "online",
        )
        self._post(submit)
        return stream

    def release(self, stream: TicketStream, reason: str = "client disconnected") -> None:
        """The handler is done with it; what is not over yet is cancelled."""
        with self._lock:
            known = self._streams.pop(stream.ticket, None)
        if known is not None and not stream.is_over:
            self._post(ClientCancel(ticket=stream.ticket, reason=reason))

    # -- JobExecutor, on the node's thread ----------------------------------------------------------------------------

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Carry out one job of the machine at once; ``done`` hears of ends only."""
        match job:
            case DeliverTokens() | DeliverEnd() | DeliverRefusal():
                self.metrics.observe(job)
                self._deliver(job.ticket, job)
                if isinstance(job, DeliverEnd):
                    done(Delivered(ticket=job.ticket, sample=job.sample))
            case PublishInstances():
                self._publish(job)
                self.metrics.observe(job)
            case PublishLoad():
                self.metrics.observe(job)
            case _:
                raise TypeError(f"{type(job).__name__} is no job of the gateway")

    def _publish(self, job: PublishInstances) -> None:
        """The machine has a view: from its first one on it can take requests."""
        with self._lock:
            self.instances, self.missing, self.length_max = job.instances, job.missing, job.length_max
            if self._not_serving == _STARTING:
                self._not_serving = ""

    def _deliver(self, ticket: int, job: Job) -> None:
        with self._lock:
            stream = self._streams.get(ticket)
        if stream is not None:
            stream.deliver(job)

    def close(self) -> None:
        """The actor stops: whoever still waits gets an error."""
        with self._lock:
            self._not_serving = "the server is stopping"
            streams = list(self._streams.values())
        for stream in streams:
            stream.deliver(DeliverRefusal(ticket=stream.ticket, code=503, message="the server stopped"))
