"""Bodies and their values: what is accepted works, what is not is refused by name, with the value and the limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.gateway.errors import ApiError
from actors.gateway.parameters import (
    WHOLE_INTERVAL,
    Plan,
    chat_prompt,
    check_request_id,
    completion_prompts,
    make_plan,
)
from actors.gateway.schema import ACCEPTED_WITHOUT_EFFECT, UNSUPPORTED, ChatBody, CompletionBody, parse_body
from actors.gateway.seeds import SeedCounter, mix, sample_seeds
from actors.gateway.tokenizer import CheckpointTokenizer

TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> CheckpointTokenizer:
    return CheckpointTokenizer(checkpoint)


def plan(
    tokenizer: CheckpointTokenizer,
    *,
    chat: bool = False,
    length_max: int = 64,
    stream_interval: int = 1,
    **fields: Any,
) -> Plan:
    data = json.dumps(({"messages": TALK} if chat else {"prompt": "the quick"}) | fields).encode()
    body: CompletionBody | ChatBody
    if chat:
        body = parse_body(data, ChatBody)
        prompts = chat_prompt(body, tokenizer)
    else:
        body = parse_body(data, CompletionBody)
        prompts = completion_prompts(body, tokenizer)
    return make_plan(
        body, prompts, tokenizer, request_id="r", seed=99, length_max=length_max, stream_interval=stream_interval
    )


def refusal(tokenizer: CheckpointTokenizer, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        plan(tokenizer, **fields)
    assert caught.value.code == 400
    return caught.value


def test_every_sampling_option_reaches_the_instances(tokenizer: CheckpointTokenizer) -> None:
    made = plan(
        tokenizer,
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=5,
        frequency_penalty=1.5,
        presence_penalty=-1.5,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "4": 2.5},
        min_tokens=2,
        stop_token_ids=[6],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=4,
        priority="offline",
    )
    sampling = made.samples[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 7)
    assert (sampling.min_p, sampling.seed, sampling.frequency_penalty) == (0.1, 5, 1.5)
    assert (sampling.presence_penalty, sampling.repetition_penalty) == (-1.5, 1.1)
    assert sampling.logit_bias == ((4, 2.5), (5, -100.0))
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (2, (6,), True)
    assert (sampling.eos_token_ids, sampling.logprobs, sampling.prompt_logprobs) == ((2, 0), 3, 4)
    assert made.priority == "offline"


def test_what_is_not_given_has_the_checkpoint_s_value_or_openai_s_default(tokenizer: CheckpointTokenizer) -> None:
    sampling = plan(tokenizer).samples[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 20, 16)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (-1, -1)
    assert plan(tokenizer, top_k=-1).samples[0].sampling.top_k == 0


def test_a_chat_may_use_the_rest_of_the_context(tokenizer: CheckpointTokenizer) -> None:
    made = plan(tokenizer, chat=True)
    assert made.samples[0].sampling.max_tokens == 64 - len(made.prompts[0].token_ids)
    assert plan(tokenizer, chat=True, max_completion_tokens=5, max_tokens=6).samples[0].sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-320),
        ("repetition_penalty", 1e39),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"9" * 5000: 1}),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("n", 0),
        ("n", 1000),
        ("best_of", 0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 99),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [99999]),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", [5, "x"]),
        ("prompt", [99999]),
        ("prompt", 7),
        ("prompt", [True]),
        ("seed", 1.5),
        ("temperature", "hot"),
        ("stream", "yes"),
        ("priority", "urgent"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", {"nonsense": True}),
    ],
)
def test_a_value_out_of_range_is_refused_and_the_parameter_is_named(
    tokenizer: CheckpointTokenizer, name: str, value: object
) -> None:
    error = refusal(tokenizer, **{name: value})
    assert error.param == name
    assert error.message.startswith(name)
    assert error.body()["error"]["type"] == "invalid_request_error"


def test_counts_that_contradict_each_other_are_refused(tokenizer: CheckpointTokenizer) -> None:
    assert refusal(tokenizer, n=3, best_of=2).param == "best_of"
    assert refusal(tokenizer, best_of=2, stream=True).param == "best_of"
    assert refusal(tokenizer, prompt=["x"] * 100, n=100).param == "n"
    assert refusal(tokenizer, chat=True, top_logprobs=2).param == "top_logprobs"


def test_a_prompt_and_output_beyond_the_context_are_refused_with_the_numbers(tokenizer: CheckpointTokenizer) -> None:
    prompt = list(range(5, 55))
    error = refusal(tokenizer, prompt=prompt, max_tokens=15)
    for number in ("64", "65", "50", "15"):
        assert number in error.message
    assert plan(tokenizer, prompt=prompt, max_tokens=14).samples
    assert refusal(tokenizer, chat=True, length_max=3).param == "max_tokens"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_refused_with_a_reason_unless_it_asks_for_nothing(
    tokenizer: CheckpointTokenizer, name: str
) -> None:
    neutral, reason = UNSUPPORTED[name]
    error = refusal(tokenizer, **{name: {"something": 1}})
    assert (error.param, reason in error.message) == (name, True)
    for value in (None, *neutral):
        assert plan(tokenizer, **{name: value}).samples


def test_unknown_parameters_are_refused_and_labels_are_accepted(tokenizer: CheckpointTokenizer) -> None:
    assert refusal(tokenizer, temprature=1).param == "temprature"
    assert refusal(tokenizer, chat=True, echo=True).param == "echo"
    assert plan(tokenizer, **dict.fromkeys(ACCEPTED_WITHOUT_EFFECT, "x")).samples


def test_a_top_k_beyond_the_vocabulary_means_all_tokens_and_fits_a_message(tokenizer: CheckpointTokenizer) -> None:
    (sample,) = plan(tokenizer, top_k=1 << 64).samples
    assert sample.sampling.top_k == tokenizer.vocab_size


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(data, CompletionBody)
    assert caught.value.code == 400


def test_a_word_that_is_none_of_those_allowed_is_refused_with_them(tokenizer: CheckpointTokenizer) -> None:
    error = refusal(tokenizer, priority="high")
    assert (error.param, "'high'; allowed: online, offline" in error.message) == ("priority", True), error.message


def test_missing_fields_are_named(tokenizer: CheckpointTokenizer) -> None:
    with pytest.raises(ApiError, match="messages is missing"):
        parse_body(b"{}", ChatBody)
    assert refusal(tokenizer, prompt=None).param == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "robot", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": "x", "name": 5}],
        ["x"],
    ],
)
def test_messages_that_are_not_text_of_a_known_role_are_refused(
    tokenizer: CheckpointTokenizer, messages: list[Any]
) -> None:
    assert "messages" in refusal(tokenizer, chat=True, messages=messages).message


def test_template_variables_may_not_replace_parameters(tokenizer: CheckpointTokenizer) -> None:
    for name in ("tools", "self"):
        assert refusal(tokenizer, chat=True, chat_template_kwargs={name: 1}).param == "chat_template_kwargs"


def test_request_ids_are_short_and_printable() -> None:
    assert check_request_id("request_id", "a-B_1.x:y") == "a-B_1.x:y"
    for bad in ("", "a b", "é", "a\nb", "x" * 129):
        with pytest.raises(ApiError, match="request_id"):
            check_request_id("request_id", bad)


def test_samples_have_ids_and_seeds_of_their_own(tokenizer: CheckpointTokenizer) -> None:
    made = plan(tokenizer, prompt=["the", "quick"], n=2)
    assert [sample.request_id for sample in made.samples] == ["r-0", "r-1", "r-2", "r-3"]
    assert len({sample.sampling.seed for sample in made.samples}) == 4
    again = plan(tokenizer, prompt=["the", "quick"], n=2)
    assert made.samples == again.samples


def test_a_client_s_seed_gives_the_same_first_choice_whatever_n_is(tokenizer: CheckpointTokenizer) -> None:
    alone = plan(tokenizer, seed=5).samples[0].sampling.seed
    assert alone == 5
    assert plan(tokenizer, seed=5, n=4).samples[0].sampling.seed == 5
    assert 0 <= plan(tokenizer, seed=-5).samples[0].sampling.seed < 2**63


def test_best_of_asks_for_logprobs_that_the_client_does_not_see(tokenizer: CheckpointTokenizer) -> None:
    made = plan(tokenizer, n=1, best_of=3)
    assert (made.logprobs, made.samples[0].sampling.logprobs, len(made.samples)) == (-1, 0, 3)


def test_seeds_repeat_with_the_server_s_seed_and_differ_otherwise() -> None:
    first, again, other = SeedCounter(1, 1), SeedCounter(1, 1), SeedCounter(1, 2)
    seeds = [first.next() for _ in range(100)]
    assert seeds == [again.next() for _ in range(100)]
    assert len(set(seeds) | {other.next() for _ in range(100)}) == 200
    assert len(set(sample_seeds(3, 50))) == 50
    assert all(0 <= mix(3, k) < 2**63 for k in range(50))


def test_tokens_that_nobody_reads_before_the_end_come_in_groups_unless_text_may_end_the_answer(
    tokenizer: CheckpointTokenizer,
) -> None:
    def interval(**fields: Any) -> int:
        return plan(tokenizer, **fields).samples[0].sampling.output_interval

    assert interval() == interval(chat=True) == WHOLE_INTERVAL
    assert interval(stop="x") == 1
    assert interval(stream=True) == interval(stream=True, stop="x") == 1
    assert interval(stream=True, stream_interval=4) == 4
    assert interval(stream_interval=4) == WHOLE_INTERVAL
