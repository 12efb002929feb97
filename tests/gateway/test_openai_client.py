"""The public ``openai`` client, against the API: what it sends is understood, what it reads is there."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.gateway.fake_cluster import WAIT_S, FakeCluster

TALK = [{"role": "user", "content": "hi"}]
EXTENSIONS = {
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "stop_token_ids": [7],
    "ignore_eos": False,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "priority": "offline",
    "return_token_ids": True,
}


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as api:
        yield api


def test_completions_with_every_option(api: openai.OpenAI, cluster: FakeCluster) -> None:
    answer = api.completions.create(
        model="tiny",
        prompt=["the", "quick"],
        max_tokens=30,
        temperature=0.7,
        top_p=0.9,
        n=2,
        best_of=3,
        seed=11,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias={"5": 1},
        logprobs=2,
        echo=True,
        stop=["zzz"],
        user="me",
        extra_body=EXTENSIONS,
    )
    assert [choice.text for choice in answer.choices] == [
        *["thehello world<|im_end|>"] * 2,
        *["quickhello world<|im_end|>"] * 2,
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * (len(cluster.tokenizer.encode("hello world")) + 1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs)
    sampling = cluster.next_submission().sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.1)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.seed) == ((7,), 1, 11)


def test_streamed_completions(api: openai.OpenAI) -> None:
    stream = api.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=30,
        n=2,
        logprobs=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXTENSIONS,
    )
    texts = ["", ""]
    reasons = []
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == ["hello world<|im_end|>"] * 2
    assert reasons == ["stop", "stop"]
    assert usage is not None
    assert usage.prompt_tokens == 1
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_chats_with_every_option(api: openai.OpenAI, cluster: FakeCluster) -> None:
    answer = api.chat.completions.create(
        model="tiny",
        messages=TALK,  # type: ignore[arg-type]
        max_completion_tokens=30,
        temperature=0,
        top_p=0.5,
        n=2,
        seed=3,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        logit_bias={"5": -1},
        logprobs=True,
        top_logprobs=3,
        stop="zzz",
        response_format={"type": "text"},
        extra_body=EXTENSIONS | {"chat_template_kwargs": {"enable_thinking": False}, "skip_special_tokens": True},
    )
    assert [choice.message.content for choice in answer.choices] == ["hello world"] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == len(cluster.tokenizer.encode("hello world")) + 1
    assert len(logprobs.content[0].top_logprobs) == 3


def test_streamed_chats(api: openai.OpenAI) -> None:
    stream = api.chat.completions.create(
        model="tiny",
        messages=TALK,  # type: ignore[arg-type]
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello world"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens


def test_errors_are_what_the_client_expects(api: openai.OpenAI, cluster: FakeCluster) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        api.completions.create(model="tiny", prompt="x", temperature=9)
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        api.chat.completions.create(
            model="tiny",
            messages=TALK,  # type: ignore[arg-type]
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    with pytest.raises(openai.NotFoundError, match="other"):
        api.completions.create(model="other", prompt="x")
    cluster.view()
    with pytest.raises(openai.InternalServerError, match="no instance can serve"):
        api.completions.create(model="tiny", prompt="x")


def test_models_are_listed(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"
