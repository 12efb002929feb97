"""The OpenAI-compatible server: routes, bodies in, answers out. Runs on one event loop, in a thread of the front node.

Routes: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health``, ``/metrics``, ``/version``.
Fields are described in ``schema.py``. A request's id is its response's ``id`` and header ``X-Request-Id``, and the id
under which traces know it (with several choices: ``<id>-<k>``).

Streams begin when the first token, or an error, is there: an error before the first token has its own HTTP status; one
after it is an event ``{"error": …}``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from actors.gateway.chat import ChatResponder
from actors.gateway.completions import CompletionResponder
from actors.gateway.edge import Edge, SampleStream, TicketStream
from actors.gateway.errors import ApiError
from actors.gateway.parameters import Plan, Prompt, chat_prompt, check_request_id, completion_prompts, make_plan
from actors.gateway.responses import Heading, Responder
from actors.gateway.schema import BODY_BYTES_MAX, ChatBody, CompletionBody, parse_body
from actors.gateway.seeds import SeedCounter
from actors.gateway.tokenizer import CheckpointTokenizer

LONG_BODY_BYTES = 16 << 10
"""Bodies longer than this are tokenised on a thread of their own, so that they do not hold up other requests."""


@dataclass(frozen=True)
class Service:
    """What the handlers need. ``length_max`` serves while no instance has said its own; ``clock`` gives seconds.

    ``stream_interval`` is how many tokens of a streamed answer may come together, after its first.
    """

    model: str
    version: str
    run_id: str  # tells ids of this front's life from those of others
    length_max: int
    edge: Edge
    tokenizer: CheckpointTokenizer
    seeds: SeedCounter
    clock: Callable[[], float]
    stream_interval: int = 1


def make_app(service: Service) -> Starlette:
    """The ASGI application."""
    handlers = _Handlers(service)
    routes = [
        Route("/v1/completions", handlers.completions, methods=["POST"]),
        Route("/v1/chat/completions", handlers.chat_completions, methods=["POST"]),
        Route("/v1/models", handlers.models, methods=["GET"]),
        Route("/v1/models/{model:path}", handlers.model, methods=["GET"]),
        Route("/health", handlers.health, methods=["GET"]),
        Route("/metrics", handlers.metrics, methods=["GET"]),
        Route("/version", handlers.version, methods=["GET"]),
    ]
    exceptions: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected_error}
    return Starlette(routes=routes, exception_handlers=exceptions)


class _Handlers:
    """One method per route. The event loop only."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._request_count = 0

    # -- generation --------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        data = await _read(request)
        body = parse_body(data, CompletionBody)
        prompts = await self._tokenised(data, lambda: completion_prompts(body, self._service.tokenizer))
        plan, heading = self._plan(request, body, prompts, "cmpl")
        return await self._answer(request, plan, heading, CompletionResponder(plan, heading, self._service.tokenizer))

    async def chat_completions(self, request: Request) -> Response:
        data = await _read(request)
        body = parse_body(data, ChatBody)
        prompts = await self._tokenised(data, lambda: chat_prompt(body, self._service.tokenizer))
        plan, heading = self._plan(request, body, prompts, "chatcmpl")
        return await self._answer(request, plan, heading, ChatResponder(plan, heading, self._service.tokenizer))

    async def _tokenised(self, data: bytes, work: Callable[[], tuple[Prompt, ...]]) -> tuple[Prompt, ...]:
        return await asyncio.to_thread(work) if len(data) > LONG_BODY_BYTES else work()

    def _plan(
        self, request: Request, body: CompletionBody | ChatBody, prompts: tuple[Prompt, ...], prefix: str
    ) -> tuple[Plan, Heading]:
        service = self._service
        if body.model not in (None, service.model):
            raise ApiError(404, f"model {body.model!r} is not served here; this server has {service.model!r}", "model")
        self._request_count += 1
        request_id = f"{prefix}-{service.run_id}-{self._request_count}"
        if (header := request.headers.get("x-request-id")) is not None:
            request_id = check_request_id("X-Request-Id", header)
        if body.request_id is not None:
            request_id = check_request_id("request_id", body.request_id)
        plan = make_plan(
            body,
            prompts,
            service.tokenizer,
            request_id=request_id,
            seed=service.seeds.next(),
            length_max=service.edge.length_max or service.length_max,
            stream_interval=service.stream_interval,
        )
        return plan, Heading(request_id, service.model, int(service.clock()))

    async def _answer(self, request: Request, plan: Plan, heading: Heading, responder: Responder) -> Response:
        service = self._service
        samples = [
            SampleStream(sample, plan.text_stream(service.tokenizer, sample), discard=plan.echo_only)
            for sample in plan.samples
        ]
        stream = service.edge.open(heading.request_id, samples, plan.priority)
        headers = {"X-Request-Id": heading.request_id}
        watcher = asyncio.create_task(_watch(request.receive, stream))
        handed_over = False
        try:
            while await stream.news() and not plan.stream:
                if stream.failure is not None:
                    break
            if stream.abandoned:
                return Response(status_code=499)
            if (failure := stream.failure) is not None:
                raise failure
            if not plan.stream:
                return _json(responder.whole(stream), headers=headers)
            handed_over = True
            return _EventStream(service.edge, stream, responder, watcher, headers)
        finally:
            if not handed_over:
                watcher.cancel()
                service.edge.release(stream)

    # -- about the server ----------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._service.model:
            raise ApiError(404, f"model {name!r} is not served here; this server has {self._service.model!r}", "model")
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._service.model,
            "object": "model",
            "created": 0,
            "owned_by": "kvferry",
            "max_model_len": self._service.edge.length_max or self._service.length_max,
        }

    async def health(self, request: Request) -> Response:
        edge = self._service.edge
        instances = [{"instance": name, "role": role} for name, role, _ in edge.instances]
        return _json({"status": edge.missing or "ok", "instances": instances}, 503 if edge.missing else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.edge.metrics.render(), media_type="text/plain; version=0.0.4")

    async def version(self, request: Request) -> Response:
        return _json({"version": self._service.version})


class _EventStream(Response):
    """Server-sent events. The client's pace is only its own: text waits in its stream while ``send`` waits."""

    def __init__(
        self,
        edge: Edge,
        stream: TicketStream,
        responder: Responder,
        watcher: asyncio.Task[None],
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=headers | {"Cache-Control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._edge = edge
        self._stream = stream
        self._responder = responder
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the request is over or the client is gone; then let go of the request."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for events in self._events():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            if not self._stream.abandoned:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watcher.cancel()
            self._edge.release(self._stream)

    async def _events(self) -> AsyncIterator[bytes]:
        more = True
        while more and not self._stream.abandoned:
            if (failure := self._stream.failure) is not None:
                yield _event(failure.body()) + b"data: [DONE]\n\n"
                return
            if chunks := self._responder.chunks(self._stream):
                yield b"".join(_event(chunk) for chunk in chunks)
            if self._stream.is_over:
                more = False
            else:
                await self._stream.news()
        if self._stream.abandoned:
            return
        last = self._responder.last_chunk(self._stream)
        yield (b"" if last is None else _event(last)) + b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def _read(request: Request) -> bytes:
    """The body, up to ``BODY_BYTES_MAX``."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > BODY_BYTES_MAX:
                raise ApiError(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before its request was complete") from error
    return b"".join(parts)


async def _watch(receive: Receive, stream: TicketStream) -> None:
    """Abandon the stream when its client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.abandon()


async def _api_error(request: Request, error: ApiError) -> Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
    return _json(error.body(), error.code, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return _json(ApiError(error.status_code, error.detail).body(), error.status_code, dict(error.headers or {}))


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return _json(ApiError(500, f"unexpected {type(error).__name__}: {error}").body(), 500)
