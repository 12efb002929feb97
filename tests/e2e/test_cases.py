"""Situations that broke other systems, on a P2/D1 cluster of real processes (numbers as in the list of cases)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from scripts.client import RequestError, complete_all, open_client, stream
from scripts.cluster import Cluster
from scripts.compare import equal_by_tie_rule
from tests.e2e.conftest import ask, prompt_of, wait_until_idle
from tests.e2e.reference import TransformersReference

SMALL = {"topology": "P2/D1", "block_count": 24, "max_seqs_per_batch": 3, "max_model_len": 256}
"""Twenty-four blocks of 16 tokens and three state slots: two long requests already fill an instance."""

pytestmark = pytest.mark.parametrize("cluster", [SMALL], indirect=True, ids=["P2/D1-small"])


def greedy(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "return_token_ids": True, "max_tokens": 8, "ignore_eos": True} | fields


async def collect(url: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
    async with open_client(url) as client:
        return [event async for event in stream(client, payload)]


def check(reference: TransformersReference, prompt: list[int], token_ids: list[int], count: int) -> None:
    expected = reference.greedy(prompt, count)
    assert len(token_ids) == count
    assert equal_by_tie_rule(expected.token_ids, token_ids, expected.gaps)


def test_one_token_is_exactly_one_token_streamed_and_not(cluster: Cluster, reference: TransformersReference) -> None:
    """C04, and C30: the usage is right in the stream's last chunk too."""
    prompt = prompt_of(40)
    answer = ask(cluster, [prompt], max_tokens=1)[0]
    choice = answer["choices"][0]
    check(reference, prompt, choice["token_ids"], 1)
    assert choice["finish_reason"] == "length"
    options = {"stream_options": {"include_usage": True}}
    events = asyncio.run(collect(cluster.url, greedy(prompt, max_tokens=1) | options))
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids") or []] == choice["token_ids"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (40, 1, 41)
    wait_until_idle(cluster)


def test_a_first_token_that_ends_the_request_ends_it_on_the_prefill_instance(
    cluster: Cluster, reference: TransformersReference
) -> None:
    """C05, with a stop token id in the place of EOS."""
    prompt = prompt_of(40)
    first = reference.greedy(prompt, 1).token_ids[0]
    answer = ask(cluster, [prompt], stop_token_ids=[first])[0]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    wait_until_idle(cluster)


def test_min_tokens_hold_across_the_border(cluster: Cluster, reference: TransformersReference) -> None:
    """C06: neither the first token (on P) nor the following ones (on D) may end the request early."""
    prompt = prompt_of(40)
    ends = reference.greedy(prompt, 3).token_ids
    answer = ask(cluster, [prompt], stop_token_ids=ends, min_tokens=5, max_tokens=6)[0]
    assert 5 <= answer["usage"]["completion_tokens"] <= 6
    assert not set(answer["choices"][0]["token_ids"][:5]) & set(ends)


@pytest.mark.parametrize(("length", "max_tokens"), [(257, 1), (250, 10)])
def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(
    cluster: Cluster, length: int, max_tokens: int
) -> None:
    """C07."""
    (answer,) = complete_all(cluster.url, [greedy(prompt_of(length), max_tokens=max_tokens)])
    assert isinstance(answer, RequestError)
    assert answer.status == 400
    assert "256" in str(answer)
    assert str(length) in str(answer)
    wait_until_idle(cluster)


def test_a_sample_that_ends_at_its_first_token_does_not_hold_up_the_others(cluster: Cluster) -> None:
    """C05 for one of the samples of a prompt: it ends on P, the others are handed off."""
    fields = {"n": 3, "seed": 4, "temperature": 1.5, "max_tokens": 6}
    plain = [choice["token_ids"] for choice in ask(cluster, [prompt_of(60)], **fields)[0]["choices"]]
    assert len({tokens[0] for tokens in plain}) == 3
    stop = plain[1][0]
    choices = ask(cluster, [prompt_of(60)], **fields, stop_token_ids=[stop])[0]["choices"]
    assert [choice["token_ids"] for choice in choices] == [
        tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in plain
    ]
    assert choices[1]["finish_reason"] == "stop" and len(choices[0]["token_ids"]) > 1
    wait_until_idle(cluster)


def test_more_samples_than_an_instance_has_slots_are_served(cluster: Cluster) -> None:
    """Three fit beside each other; the others form a group again."""
    (answer,) = ask(cluster, [prompt_of(70)], n=7, seed=5, temperature=0.8, max_tokens=5)
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [5] * 7
    wait_until_idle(cluster)


def test_many_interleaved_hand_offs_never_mix_bytes(cluster: Cluster, reference: TransformersReference) -> None:
    """C11, C17, C23, C24: more requests than slots, every block and slot reused several times, all answers right."""
    prompts = [prompt_of(20 + 13 * (salt % 5), salt) for salt in range(18)]
    for prompt, answer in zip(prompts, ask(cluster, prompts, max_tokens=8), strict=True):
        check(reference, prompt, answer["choices"][0]["token_ids"], 8)
        assert answer["kvferry"]["verified_bytes"] >= answer["kvferry"]["bytes_moved"] > 0
    wait_until_idle(cluster)


def test_requests_of_half_the_pool_wait_for_each_other_and_both_complete(
    cluster: Cluster, reference: TransformersReference
) -> None:
    """C22: each holds half of both pools while it grows; preemption changes no token."""
    prompts = [prompt_of(150, salt) for salt in (1, 2, 3)]
    for prompt, answer in zip(prompts, ask(cluster, prompts, max_tokens=60), strict=True):
        check(reference, prompt, answer["choices"][0]["token_ids"], 60)
    wait_until_idle(cluster)


def test_a_client_that_leaves_frees_both_sides(cluster: Cluster, reference: TransformersReference) -> None:
    """C19: it leaves right after token 0, while the hand-off is under way."""

    async def leave_after_the_first_token(n: int) -> None:
        async with open_client(cluster.url) as client:
            async for event in stream(client, greedy(prompt_of(120), max_tokens=120, n=n)):
                if event["choices"] and event["choices"][0].get("token_ids"):
                    return

    for n in (1, 1, 3):
        asyncio.run(leave_after_the_first_token(n))
    wait_until_idle(cluster)
    prompt = prompt_of(90, salt=4)
    check(reference, prompt, ask(cluster, [prompt], max_tokens=8)[0]["choices"][0]["token_ids"], 8)


def test_a_second_request_with_the_same_id_is_refused_and_both_sides_live_on(cluster: Cluster) -> None:
    """C21."""
    payload = greedy(prompt_of(30), max_tokens=100, request_id="mine")

    async def twice() -> list[int]:
        async with open_client(cluster.url) as client:
            posts = [client.post("/v1/completions", json=payload) for _ in range(2)]
            return sorted(response.status_code for response in await asyncio.gather(*posts))

    assert asyncio.run(twice()) == [200, 409]
    assert ask(cluster, [prompt_of(30)], request_id="mine")[0]["usage"]["completion_tokens"] == 12


def test_offline_requests_complete_beside_online_ones(cluster: Cluster, reference: TransformersReference) -> None:
    """C26."""
    prompts = [prompt_of(40, salt) for salt in range(8)]
    payloads = [
        greedy(prompt, priority="offline" if salt % 2 else "online", max_tokens=8)
        for salt, prompt in enumerate(prompts)
    ]
    for prompt, answer in zip(prompts, complete_all(cluster.url, payloads), strict=True):
        assert isinstance(answer, dict), answer
        check(reference, prompt, answer["choices"][0]["token_ids"], 8)


def test_a_seed_gives_the_same_tokens_alone_and_beside_any_neighbours(cluster: Cluster) -> None:
    """C29, on one topology; the first token is drawn on P, the others on D."""
    mine = greedy(prompt_of(50, salt=9), temperature=0.9, top_p=0.95, top_k=50, seed=1234, max_tokens=20)
    others = [greedy(prompt_of(20 + salt, salt), temperature=1.0, seed=salt, max_tokens=20) for salt in range(5)]
    (alone,) = complete_all(cluster.url, [mine])
    together = complete_all(cluster.url, [*others[:2], mine, *others[2:]])[2]
    assert isinstance(alone, dict)
    assert isinstance(together, dict)
    assert alone["choices"][0]["token_ids"] == together["choices"][0]["token_ids"]


def test_a_stop_string_that_spans_the_border_is_found_and_cut(
    cluster: Cluster, reference: TransformersReference
) -> None:
    """C08: it begins in token 0, from P, and ends in token 1, from D."""
    prompt = prompt_of(45, salt=2)
    free = ask(cluster, [prompt], max_tokens=6)[0]["choices"][0]["text"]
    spanning = free[:4]
    answer = ask(cluster, [prompt], max_tokens=6, stop=[spanning])[0]
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    wait_until_idle(cluster)


def test_bad_input_gets_a_clear_error_and_harms_nobody(cluster: Cluster) -> None:
    bad: list[tuple[dict[str, Any] | str, str]] = [
        ({"prompt": [1, 2, 10**9]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "nonsense": 1}, "nonsense"),
        ({}, "prompt"),
        ("{not json", "JSON"),
    ]
    with httpx.Client(base_url=cluster.url, trust_env=False) as client:
        for body, named in bad:
            text = body if isinstance(body, str) else json.dumps(body)
            response = client.post("/v1/completions", content=text, headers={"content-type": "application/json"})
            assert response.status_code == 400, (body, response.text)
            assert named in response.json()["error"]["message"]
    assert ask(cluster, [prompt_of(5)])[0]["usage"]["completion_tokens"] == 12
