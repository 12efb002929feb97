"""A small client of the served API: what generate, demo and the benchmarks use, the same way any user would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from actors.runtime.config import CommandFailed

CONCURRENCY_MAX = 256


class RequestError(CommandFailed):
    """The server answered with an error; ``status`` is the HTTP code."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


def error_text(body: bytes) -> str:
    """What an error's body says, OpenAI's way or any other."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")


def event_of(line: str) -> dict[str, Any] | None:
    """The event in one line of a stream; None for lines without one. Raises ``RequestError`` for an error."""
    if not line.startswith("data: {"):
        return None
    event: dict[str, Any] = json.loads(line[6:])
    if "error" in event:
        raise RequestError(int(event["error"].get("code") or 500), str(event["error"]["message"]))
    return event


def open_client(url: str) -> httpx.AsyncClient:
    """A client without timeouts: the server bounds every request itself (``--request-timeout-ms``)."""
    limits = httpx.Limits(max_connections=CONCURRENCY_MAX, max_keepalive_connections=CONCURRENCY_MAX)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)


async def complete(client: httpx.AsyncClient, payload: dict[str, Any]) -> dict[str, Any]:
    """One ``/v1/completions`` call, not streamed. Raises ``RequestError``."""
    response = await client.post("/v1/completions", json=payload)
    if response.status_code != 200:
        raise RequestError(response.status_code, error_text(response.content))
    body: dict[str, Any] = response.json()
    return body


async def stream(client: httpx.AsyncClient, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of one streamed ``/v1/completions`` call. Raises ``RequestError``, also for an error in the stream."""
    async with client.stream("POST", "/v1/completions", json=payload | {"stream": True}) as response:
        if response.status_code != 200:
            raise RequestError(response.status_code, error_text(await response.aread()))
        async for line in response.aiter_lines():
            event = event_of(line)
            if event is not None:
                yield event


async def _complete_all(
    url: str, payloads: Sequence[dict[str, Any]], concurrency: int
) -> list[dict[str, Any] | RequestError]:
    gate = asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, payload: dict[str, Any]) -> dict[str, Any] | RequestError:
        async with gate:
            try:
                return await complete(client, payload)
            except RequestError as error:
                return error
            except httpx.HTTPError as error:
                return RequestError(503, f"connection to the server failed: {error!r}")

    async with open_client(url) as client:
        return list(await asyncio.gather(*(one(client, payload) for payload in payloads)))


def complete_all(
    url: str, payloads: Sequence[dict[str, Any]], concurrency: int = CONCURRENCY_MAX
) -> list[dict[str, Any] | RequestError]:
    """All of ``payloads``, ``concurrency`` at once; answers in input order, an error in place of a failed request."""
    return asyncio.run(_complete_all(url, payloads, concurrency))
