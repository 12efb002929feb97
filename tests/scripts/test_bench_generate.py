"""``kvferry bench generate``: what its client measures of a whole cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.runtime.config import Options
from scripts.client import open_client, stream
from scripts.served_rates import Answer, ServedRates

OPTIONS = Options(
    topology="TP1", model="demo", port=0, threads_per_rank=1, block_count=32, stream_interval=4, log_level="error"
)


def test_tokens_that_come_together_were_made_one_after_the_other() -> None:
    answer = Answer(arrived=[(1.0, [5]), (3.0, [6, 7]), (7.0, [8, 9, 10, 11])])
    assert answer.tokens_between(1.0, 7.0) == 6
    assert answer.tokens_between(2.0, 4.0) == pytest.approx(2)
    assert answer.tokens_between(5.0, 9.0) == pytest.approx(2)
    assert answer.tokens_between(7.0, 9.0) == 0


def test_a_streams_tokens_come_in_groups_of_the_interval_and_all_are_counted() -> None:
    prompts = [list(range(10, 26)), list(range(20, 36))]

    async def groups(url: str) -> list[int]:
        payload: dict[str, Any] = {"prompt": prompts[0], "max_tokens": 11, "ignore_eos": True, "return_token_ids": True}
        async with open_client(url) as client:
            events = [event async for event in stream(client, payload)]
        return [len(ids) for event in events if event["choices"] and (ids := event["choices"][0]["token_ids"])]

    with ServedRates(OPTIONS) as served:
        assert asyncio.run(groups(served.url)) == [1, 4, 4, 2]
        rates = served.measure(prompts, 11)
    assert [len(tokens) for tokens in rates.tokens] == [11, 11]
    assert rates.prefill > 0 and rates.decode > 0 and rates.accepted_per_step == 1
