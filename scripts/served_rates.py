"""Rates of a whole cluster, measured as its clients see them: streamed over HTTP, timed token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

import httpx

from actors.runtime.config import Options
from scripts.client import open_client, stream
from scripts.cluster import Cluster
from scripts.rates import Rates


class ServedRates:
    """A running cluster and its ``Measure``; a context manager."""

    def __init__(self, options: Options) -> None:
        self._cluster = Cluster(options)

    def __enter__(self) -> ServedRates:
        self._cluster.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.stop()

    def measure(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Rates:
        """All prompts at once. Prefill ends with the last first token; decode is what arrives from then on, until the
        first sequence ends, so that all sequences run all the time that is counted."""
        began = time.perf_counter()
        arrivals = asyncio.run(self._stream_all(prompts, output_tokens))
        prefilled = max(arrived[0][0] for arrived in arrivals)
        ended = min(arrived[-1][0] for arrived in arrivals)
        counted = [len(ids) for arrived in arrivals for when, ids in arrived if prefilled < when <= ended]
        return Rates(
            prefill=sum(map(len, prompts)) / (prefilled - began),
            decode=sum(counted) / max(1e-9, ended - prefilled),
            tokens=tuple(tuple(token for _, ids in arrived for token in ids) for arrived in arrivals),
            accepted_per_step=sum(counted) / max(1, len(counted)),
        )

    async def _stream_all(
        self, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> list[list[tuple[float, list[int]]]]:
        async with open_client(self._cluster.url) as client:
            return list(await asyncio.gather(*(self._one(client, prompt, output_tokens) for prompt in prompts)))

    async def _one(
        self, client: httpx.AsyncClient, prompt: Sequence[int], output_tokens: int
    ) -> list[tuple[float, list[int]]]:
        payload = {
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        arrived = []
        async for event in stream(client, payload):
            ids = event["choices"][0].get("token_ids") if event["choices"] else None
            if ids:
                arrived.append((time.perf_counter(), ids))
        return arrived
