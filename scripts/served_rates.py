"""Rates of a whole cluster, measured as its clients see them: streamed over HTTP, timed token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from actors.runtime.config import Options
from scripts.client import RequestError, error_text, event_of
from scripts.cluster import Cluster
from scripts.rates import Rates


@dataclass
class Answer:
    """One streamed answer: what arrived when (seconds of one clock), and the ``kvferry`` object of its last event."""

    arrived: list[tuple[float, list[int]]] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)

    def tokens_between(self, begin: float, end: float) -> float:
        """Tokens that were made between two moments; those of one event spread over the time since the one before."""
        count = 0.0
        for (before, _), (when, ids) in pairwise(self.arrived):
            shared = min(when, end) - max(before, begin)
            count += len(ids) * shared / (when - before) if shared > 0 else 0.0
        return count


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

    @property
    def url(self) -> str:
        """Where it serves."""
        return self._cluster.url

    def pids(self) -> tuple[int, ...]:
        """The processes that serve: every node but the supervisor's, which is this process."""
        return tuple(int(node["pid"]) for node in self._cluster.status()["nodes"].values())

    def measure(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Rates:
        """All prompts at once. Prefill ends with the last first token; decode is what is made from then on, until the
        first sequence ends, so that all sequences run all the time that is counted."""
        began = time.perf_counter()
        answers = asyncio.run(self._stream_all(prompts, output_tokens))
        prefilled = max(answer.arrived[0][0] for answer in answers)
        ended = min(answer.arrived[-1][0] for answer in answers)
        made = sum(answer.tokens_between(prefilled, ended) for answer in answers)
        steps = sum(answer.measured["decode_steps"] for answer in answers)
        accepted = sum(answer.measured["accepted_tokens"] for answer in answers)
        return Rates(
            prefill=sum(map(len, prompts)) / (prefilled - began),
            decode=made / max(1e-9, ended - prefilled),
            tokens=tuple(tuple(token for _, ids in answer.arrived for token in ids) for answer in answers),
            accepted_per_step=1 + accepted / max(1, steps),
        )

    async def _stream_all(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Answer]:
        return list(await asyncio.gather(*(self._one(prompt, output_tokens) for prompt in prompts)))

    async def _one(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        """One stream, read line by line from the socket: this client shares the cores with what it measures, and a
        client library would take as much of them per token as the whole way from the ranks to here."""
        payload = {
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        body = msgspec.json.encode(payload)
        url = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = Answer()
        try:
            status = int((await reader.readline()).split()[1])
            if status != 200:
                raise RequestError(status, error_text((await reader.read()).partition(b"\r\n\r\n")[2]))
            while line := await reader.readline():
                event = event_of(line.decode())
                ids = event["choices"][0].get("token_ids") if event and event["choices"] else None
                if ids:
                    answer.arrived.append((time.perf_counter(), ids))
                if event:
                    answer.measured |= event.get("kvferry", {})
        finally:
            writer.close()
        return answer
