"""The API over a real socket: answers, streams, refusals, disconnects, slow clients."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from actors.gateway.jobs import DeliverTokens
from actors.gateway.metrics import GatewayMetrics
from tests.gateway.fake_cluster import WAIT_S, FakeCluster

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The stream's events; checks its form and that it ends with ``[DONE]``."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


# -- completions and chats ---------------------------------------------------------------------------------------------


def test_a_completion_has_text_reason_and_usage(client: httpx.Client, cluster: FakeCluster) -> None:
    answer = client.post(COMPLETIONS, json={"model": "tiny", "prompt": "the quick", "max_tokens": 30}).json()
    prompt, output = cluster.tokenizer.encode("the quick"), cluster.tokenizer.encode("hello world")
    (choice,) = answer["choices"]
    assert (answer["object"], choice["text"], choice["finish_reason"]) == ("text_completion", "hello world", "stop")
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output) + 1,  # the end token is one
        "total_tokens": len(prompt) + len(output) + 1,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert cluster.next_submission().prompt_token_ids == prompt
    assert "kvferry" not in answer
    assert cluster.live() == 0


def test_a_streamed_completion_gives_the_same_text_and_the_usage_in_its_last_chunk(client: httpx.Client) -> None:
    body = {"prompt": "the quick", "max_tokens": 30, "stream": True, "stream_options": {"include_usage": True}}
    whole = client.post(COMPLETIONS, json={"prompt": "the quick", "max_tokens": 30}).json()
    *chunks, last = events(client.post(COMPLETIONS, json=body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


@pytest.mark.parametrize("stream", [False, True])
def test_one_token_is_one_token_and_one_reason(client: httpx.Client, cluster: FakeCluster, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": stream, "return_token_ids": True}
    response = client.post(COMPLETIONS, json=body)
    answers = events(response) if stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert flat(choice["token_ids"] for choice in choices) == [cluster.tokenizer.encode("hello")[0]]
    assert "".join(choice["text"] for choice in choices)
    assert cluster.live() == 0


def test_a_chat_is_rendered_by_the_template_and_answered_by_the_assistant(
    client: httpx.Client, cluster: FakeCluster
) -> None:
    body = {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}}
    answer = client.post(CHAT, json=body).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    submit = cluster.next_submission()
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert cluster.tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False) == text
    assert submit.sampling.max_tokens == 64 - len(submit.prompt_token_ids)


def test_a_streamed_chat_says_first_who_speaks(client: httpx.Client) -> None:
    first, *rest = events(client.post(CHAT, json={"messages": TALK, "stream": True}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest) == "hello world"
    assert rest[-1]["choices"][0]["finish_reason"] == "stop"


def test_text_parts_are_joined_and_other_parts_are_refused(client: httpx.Client, cluster: FakeCluster) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}).raise_for_status()
    assert "a\nb" in cluster.tokenizer.decode(cluster.next_submission().prompt_token_ids)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert client.post(CHAT, json={"messages": image}).status_code == 400


def test_prompts_may_be_text_tokens_or_lists_of_either(client: httpx.Client, cluster: FakeCluster) -> None:
    for prompt, wanted in (
        ("ab", [cluster.tokenizer.encode("ab")]),
        ([5, 6], [(5, 6)]),
        (["a", "b"], [cluster.tokenizer.encode("a"), cluster.tokenizer.encode("b")]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ):
        answer = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2}).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(wanted)))
        assert [cluster.next_submission().prompt_token_ids for _ in wanted] == wanted
        assert answer["usage"]["prompt_tokens"] == sum(map(len, wanted))


def test_token_ids_and_timings_are_there_when_asked_for(client: httpx.Client, cluster: FakeCluster) -> None:
    body = {"prompt": "x", "max_tokens": 3, "return_token_ids": True, "request_id": "my-1"}
    answer = client.post(COMPLETIONS, json=body).json()
    output = list(cluster.tokenizer.encode("hello world"))[:3]
    assert answer["choices"][0]["token_ids"] == output
    assert answer["choices"][0]["prompt_token_ids"] == list(cluster.tokenizer.encode("x"))
    measured = answer["kvferry"]
    assert measured["request_id"] == answer["id"] == "my-1"
    assert (measured["prefill_instance"], measured["decode_instance"]) == ("p0", "d0")
    assert (measured["handoff_ms"], measured["restore_ms"], measured["bytes_moved"]) == (3.0, 2.0, 4096)
    assert measured["bytes_by_role"] == {"KEY": 4096}
    assert (measured["drafted_tokens"], measured["accepted_tokens"]) == (6, 4)
    assert 0 < measured["ttft_ms"] <= measured["e2e_ms"]
    chunks = events(client.post(COMPLETIONS, json=body | {"stream": True}))
    assert flat(chunk["choices"][0]["token_ids"] for chunk in chunks) == output
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list(cluster.tokenizer.encode("x"))
    assert ["kvferry" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


# -- stop strings, n, logprobs, echo ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_the_tokens_of_two_instances_ends_the_text_before_it(
    client: httpx.Client, cluster: FakeCluster, stream: bool
) -> None:
    first, second = cluster.tokenizer.encode("S")[0], cluster.tokenizer.encode("T")[0]
    cluster.writer = lambda submit: [first, second, first, second, first]
    body = {"prompt": "x", "max_tokens": 20, "stop": ["never", "ST"], "stream": stream, "return_token_ids": True}
    response = client.post(COMPLETIONS, json=body)
    answers = events(response) if stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    assert "".join(choice["text"] for choice in choices) == ""
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "ST")
    assert flat(choice["token_ids"] for choice in choices) == [first, second]
    if not stream:
        assert answers[0]["usage"]["completion_tokens"] == 2
    assert cluster.live() == 0


def test_a_stop_string_cancels_the_rest_on_the_instances(
    client: httpx.Client, cluster: FakeCluster, pool: ThreadPoolExecutor
) -> None:
    cluster.script = False
    body = {"prompt": "x", "max_tokens": 40, "stop": "END", "include_stop_str_in_output": True, "stream": True}
    future = pool.submit(client.post, COMPLETIONS, json=body)
    submit = cluster.next_submission()
    for index, token in enumerate(cluster.tokenizer.encode("a END")):
        cluster.say("p0" if index == 0 else "d0", cluster.generation(submit, index, token))
    assert {cluster.next_cancel()[0], cluster.next_cancel()[0]} == {"p0", "d0"}
    chunks = events(future.result(WAIT_S))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a END"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_token_ends_the_text_before_it_and_is_named(client: httpx.Client, cluster: FakeCluster) -> None:
    stop = cluster.tokenizer.encode("!")[0]
    cluster.writer = lambda submit: [*cluster.tokenizer.encode("hey"), stop, 5]
    body = {"prompt": "x", "max_tokens": 20, "stop_token_ids": [stop], "return_token_ids": True}
    (choice,) = client.post(COMPLETIONS, json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hey", "stop", stop)
    assert choice["token_ids"][-1] == stop


def test_several_choices_have_ids_and_seeds_of_their_own_and_share_one_prompt_in_the_usage(
    client: httpx.Client, cluster: FakeCluster
) -> None:
    texts = ["hello", "world", "the end"]
    cluster.writer = lambda submit: list(cluster.tokenizer.encode(texts[int(submit.request_id[-1])]))
    cluster.cached = lambda submit: int(submit.request_id != "a-0")
    body = {"prompt": "x", "max_tokens": 20, "n": 3, "seed": 7, "request_id": "a", "return_token_ids": True}
    answer = client.post(COMPLETIONS, json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["kvferry"]["request_id"] for choice in answer["choices"]] == ["a-0", "a-1", "a-2"]
    submissions = [cluster.next_submission() for _ in range(3)]
    seeds = [submit.sampling.seed for submit in submissions]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert answer["usage"]["prompt_tokens"] == 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "the first sample computed it"
    assert [choice["kvferry"]["cached_tokens"] for choice in answer["choices"]] == [0, 1, 1]
    assert answer["usage"]["completion_tokens"] == sum(len(cluster.tokenizer.encode(text)) + 1 for text in texts)
    assert cluster.live() == 0
    chunks = events(client.post(COMPLETIONS, json=body | {"stream": True}))
    for index, text in enumerate(texts):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text


def test_the_best_of_several_samples_are_the_most_likely_ones(client: httpx.Client, cluster: FakeCluster) -> None:
    plain = cluster.generation

    def biased(submit: Any, index: int, token: int, **options: Any) -> Any:
        message = plain(submit, index, token, **options)
        entry = msgspec.structs.replace(message.logprobs[0], logprob=-9.0 + int(submit.request_id[-1]))
        return msgspec.structs.replace(message, logprobs=(entry,))

    cluster.generation = biased  # type: ignore[method-assign]
    cluster.writer = lambda submit: list(cluster.tokenizer.encode("abcd"[int(submit.request_id[-1])]))
    answer = client.post(COMPLETIONS, json={"prompt": "x", "n": 2, "best_of": 4}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["d", "c"]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 8


def test_logprobs_have_one_entry_per_token_the_first_one_included(client: httpx.Client, cluster: FakeCluster) -> None:
    body = {"prompt": "x", "max_tokens": 3, "logprobs": 2}
    logprobs = client.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]
    names = [cluster.tokenizer.decode([token]) for token in cluster.tokenizer.encode("hello world")[:3]]
    assert logprobs["tokens"] == names
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 3
    assert logprobs["text_offset"] == [0, len(names[0]), len(names[0] + names[1])]
    chunks = events(client.post(COMPLETIONS, json=body | {"stream": True}))
    streamed: list[str] = flat(chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks)
    assert streamed == names
    chat = {"messages": TALK, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    content = client.post(CHAT, json=chat).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names
    assert [bytes(entry["bytes"]).decode() for entry in content] == names
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_have_one_entry_per_prompt_token(
    client: httpx.Client, cluster: FakeCluster, stream: bool
) -> None:
    body = {"prompt": "the quick", "max_tokens": 2, "prompt_logprobs": 1, "stream": stream}
    response = client.post(COMPLETIONS, json=body)
    choice = (events(response)[0] if stream else response.json())["choices"][0]
    ids = cluster.tokenizer.encode("the quick")
    assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in ids[1:]),
    ]
    assert choice["prompt_logprobs"][1][str(ids[1])]["decoded_token"] == cluster.tokenizer.decode([ids[1]])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_puts_the_prompt_and_its_logprobs_first(
    client: httpx.Client, cluster: FakeCluster, stream: bool
) -> None:
    body = {"prompt": "the quick", "max_tokens": 2, "echo": True, "logprobs": 0, "stream": stream}
    response = client.post(COMPLETIONS, json=body)
    choices = [answer["choices"][0] for answer in (events(response) if stream else [response.json()])]
    tokens = [*cluster.tokenizer.encode("the quick"), *cluster.tokenizer.encode("hello world")[:2]]
    assert "".join(choice["text"] for choice in choices) == cluster.tokenizer.decode(tokens)
    logprobs: list[Any] = flat(choice["logprobs"]["token_logprobs"] for choice in choices)
    assert logprobs == [None] + [-0.5] * (len(tokens) - 1)
    offsets: list[int] = flat(choice["logprobs"]["text_offset"] for choice in choices)
    assert offsets == sorted(offsets)


def test_an_echo_without_output_scores_the_prompt_alone(client: httpx.Client, cluster: FakeCluster) -> None:
    body = {"prompt": "the quick", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.post(COMPLETIONS, json=body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "the quick"
    assert len(choice["logprobs"]["tokens"]) == len(cluster.tokenizer.encode("the quick"))
    assert answer["usage"]["completion_tokens"] == 0


def test_a_character_of_several_tokens_is_never_torn_in_a_stream(client: httpx.Client, cluster: FakeCluster) -> None:
    cluster.writer = lambda submit: list(cluster.tokenizer.encode("你好 👋🏽"))
    chunks = events(client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 50, "stream": True}))
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "你好 👋🏽"
    assert not any("\ufffd" in text for text in texts)


# -- refusals and failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_request_under_an_id_in_flight_is_refused_with_409_and_the_first_lives_on(
    client: httpx.Client, cluster: FakeCluster, pool: ThreadPoolExecutor, stream: bool
) -> None:
    cluster.script = False
    first = pool.submit(client.post, COMPLETIONS, json={"prompt": "x"}, headers={"X-Request-Id": "a"})
    submit = cluster.next_submission()
    second = client.post(COMPLETIONS, json={"prompt": "x", "request_id": "a", "stream": stream})
    assert (second.status_code, second.json()["error"]["param"]) == (409, "request_id")
    cluster.answer(submit)
    answer = first.result(WAIT_S)
    assert (answer.json()["id"], answer.headers["X-Request-Id"]) == ("a", "a")
    assert answer.json()["choices"][0]["text"] == "hello world"


def test_a_failure_becomes_one_clear_error(
    client: httpx.Client, cluster: FakeCluster, pool: ThreadPoolExecutor
) -> None:
    cluster.script = False
    for stream, tokens, n in ((False, 0, 1), (False, 1, 2), (True, 0, 1)):
        body = {"prompt": "x", "stream": stream, "n": n}
        future = pool.submit(client.post, COMPLETIONS, json=body)
        submissions = [cluster.next_submission() for _ in range(n)]
        if tokens:
            cluster.say("p0", cluster.generation(submissions[0], 0, 10))
        cluster.say("p0", cluster.failed(submissions[0]))
        response = future.result(WAIT_S)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "it broke")
        assert cluster.live() == 0


def test_a_failure_inside_a_stream_is_its_last_event(client: httpx.Client, cluster: FakeCluster, url: str) -> None:
    cluster.script = False
    connection = raw_request(url, {"prompt": "x", "stream": True})
    submit = cluster.next_submission()
    cluster.say("p0", cluster.generation(submit, 0, cluster.tokenizer.encode("hello")[0]))
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)
    cluster.say("d0", cluster.failed(submit))
    while b"[DONE]" not in received:
        received += connection.recv(4096)
    connection.close()
    *_, error, _ = [line for line in received.split(b"\n") if line.startswith(b"data: ")]
    assert json.loads(error[6:])["error"]["code"] == 500


def test_an_error_before_the_first_token_has_a_status_of_its_own_even_when_streamed(
    client: httpx.Client, cluster: FakeCluster
) -> None:
    cluster.view()
    for stream in (False, True):
        response = client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) > 0
        assert "no instance can serve" in response.json()["error"]["message"]
    assert client.get("/health").status_code == 503


def test_health_says_what_is_missing_until_a_request_would_be_served(
    client: httpx.Client, cluster: FakeCluster
) -> None:
    cluster.view("p0", "d0", linked=False)
    cluster.settle()
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "prefill and decode instances are being linked")
    cluster.view("p0", "d0")
    cluster.settle()
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_the_server_says_what_it_is(client: httpx.Client) -> None:
    assert client.get("/health").json()["status"] == "ok"
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 64)
    assert client.get("/v1/models/tiny").json() == card
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/version").json() == {"version": "0"}
    assert client.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert client.get(COMPLETIONS).status_code == 405


def test_metrics_tell_about_requests_tokens_times_and_speculation(client: httpx.Client) -> None:
    client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3})
    client.post(COMPLETIONS, json={"prompt": "x", "model": "tiny", "max_tokens": 3, "request_id": "b"})
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(lines['kvferry_requests_total{reason="length"}']) == 2
    assert float(lines["kvferry_generation_tokens_total"]) == 6
    assert float(lines["kvferry_time_to_first_token_seconds_count"]) == 2
    assert float(lines["kvferry_inter_token_latency_seconds_count"]) == 4
    assert float(lines["kvferry_handoff_bytes_total"]) == 8192
    assert float(lines["kvferry_speculation_accepted_tokens_total"]) == 8
    assert float(lines["kvferry_decode_steps_total"]) == 4
    assert float(lines["kvferry_speculation_accepted_length_count"]) == 2
    assert float(lines['kvferry_instances{role="DECODE"}']) == 1


def test_tokens_that_are_delivered_together_share_the_time_since_those_before() -> None:
    metrics = GatewayMetrics()
    for first_index, token_ids in ((0, (5,)), (1, (6, 7, 8, 9))):
        job = DeliverTokens(ticket=1, sample=0, first_index=first_index, token_ids=token_ids, waited_ms=400.0)
        metrics.observe(job)
    lines = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if not line.startswith("#"))
    assert float(lines["kvferry_inter_token_latency_seconds_count"]) == 4
    assert float(lines["kvferry_inter_token_latency_seconds_sum"]) == pytest.approx(0.4)


def test_the_application_serves_any_asgi_server(cluster: FakeCluster) -> None:
    async def talk() -> dict[str, Any]:
        transport = httpx.ASGITransport(app=cluster.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer: dict[str, Any] = (await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 30})).json()
            return answer

    assert asyncio.run(talk())["choices"][0]["text"] == "hello world"


def raw_request(url: str, body: dict[str, Any], receive_buffer_bytes: int = 0) -> socket.socket:
    """A connection that has sent its request and reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    connection = socket.socket()
    if receive_buffer_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.settimeout(WAIT_S)
    connection.connect((host, int(port)))
    connection.sendall(head + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_token", [False, True])
def test_a_client_that_leaves_frees_both_instances(
    url: str, cluster: FakeCluster, stream: bool, first_token: bool
) -> None:
    cluster.script = False
    connection = raw_request(url, {"prompt": "x", "stream": stream})
    submit = cluster.next_submission()
    if first_token:
        cluster.say("p0", cluster.generation(submit, 0, 10))
        if stream:
            connection.recv(1)
    connection.close()
    cancels = {cluster.next_cancel(), cluster.next_cancel()}
    assert cancels == {("p0", submit.request_id), ("d0", submit.request_id)}
    assert cluster.live() == 0


def test_a_client_that_reads_nothing_delays_nobody(url: str, client: httpx.Client, cluster: FakeCluster) -> None:
    cluster.script = False
    slow = raw_request(url, {"prompt": "x", "stream": True, "ignore_eos": True}, receive_buffer_bytes=1024)
    submit = cluster.next_submission()
    token = cluster.tokenizer.encode("hello")[0]
    cluster.say("p0", cluster.generation(submit, 0, token))
    for index in range(1, 20_000):  # far more than the socket's buffers hold
        cluster.say("d0", cluster.generation(submit, index, token))
    cluster.say("d0", cluster.finished(submit, 20_000))
    cluster.settle()
    cluster.script = True
    assert (
        client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 30}).json()["choices"][0]["text"] == "hello world"
    )
    slow.close()
