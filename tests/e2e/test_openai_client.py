"""The public ``openai`` client against a speculating P2/D1 cluster: every option has its effect, across the border.

The first token is made on P, the others on D, three drafts at a time: an option that one side forgot, or that a verify
pass skipped at a drafted position, changes tokens here. What they should be is computed with ``transformers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer

from scripts.cluster import Cluster
from scripts.compare import TIE_TOLERANCES, equal_by_tie_rule
from scripts.models import DEMO_MODEL_DIR
from tests.e2e.conftest import wait_until_idle
from tests.e2e.reference import Rule, TransformersReference

SPECULATING = {
    "topology": "P2/D1",
    "num_speculative_tokens": 3,
    "block_count": 64,
    "max_seqs_per_batch": 6,
    "max_model_len": 256,
}
pytestmark = pytest.mark.parametrize("cluster", [SPECULATING], indirect=True, ids=["P2/D1-S3"])

PROMPT = "def read_config(path):\n    with open(path) as file:\n        reader = ConfigReader("
TALK: Any = [{"role": "user", "content": "What does the function close do?"}]
MAX_TOKENS = 16
EOS = 2
KANJI = "漢"  # three byte tokens in the demo model's vocabulary
WAIT_S = 60.0


@dataclass
class Answer:
    """What all four ways of asking have in common."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: Any
    logprobs: list[float]
    top_counts: list[int]


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))


def completion(api: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True} | fields.pop("extra_body", {})
    defaults: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": MAX_TOKENS}
    return api.completions.create(**defaults | fields, prompt=prompt, extra_body=extra)


def chat(api: openai.OpenAI, **fields: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True} | fields.pop("extra_body", {})
    defaults: dict[str, Any] = {"model": "demo", "temperature": 0, "max_completion_tokens": MAX_TOKENS}
    return api.chat.completions.create(**defaults | fields, messages=TALK, extra_body=extra)


def ids(choice: Any) -> list[int]:
    return list(choice.model_extra["token_ids"])


def spelled(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


def check(reference: TransformersReference, prompt: list[int], token_ids: list[int], rule: Rule) -> None:
    expected = reference.steered(prompt, len(token_ids), rule)
    assert equal_by_tie_rule(expected.token_ids, token_ids, expected.gaps), (expected.token_ids, token_ids)


def counts_of(outputs: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.bincount(torch.tensor(list(outputs), dtype=torch.int64), minlength=logits.shape[0]).float()


def additive(frequency: float, presence: float) -> Rule:
    def rule(prompt: Sequence[int], outputs: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        counts = counts_of(outputs, logits)
        return logits - frequency * counts - presence * (counts > 0).float()

    return rule


def repetition(penalty: float) -> Rule:
    def rule(prompt: Sequence[int], outputs: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        for token in {*prompt, *outputs}:
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        return logits

    return rule


def biased(bias: dict[int, float]) -> Rule:
    def rule(prompt: Sequence[int], outputs: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        for token, value in bias.items():
            logits[token] += value
        return logits

    return rule


def masked(token_ids: Sequence[int], min_tokens: int) -> Rule:
    def rule(prompt: Sequence[int], outputs: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(outputs) < min_tokens:
            logits[list(token_ids)] = -torch.inf
        return logits

    return rule


def forced(*token_ids: int) -> dict[str, Any]:
    """Options that make up to four different tokens come out first, in this order.

    Each token's bias towers over the next one's, and the repetition penalty takes it away once it is out.
    """
    bias = {str(token): 100 - 20 * place for place, token in enumerate(token_ids)}
    return {"logit_bias": bias, "extra_body": {"repetition_penalty": 20.0}}


def with_extra(options: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return options | {"extra_body": options.get("extra_body", {}) | extra}


# -- choosing tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, additive(0.0, 0.0)),
        ({"frequency_penalty": 1.5}, additive(1.5, 0.0)),
        ({"presence_penalty": 2.0}, additive(0.0, 2.0)),
        ({"frequency_penalty": 1.0, "presence_penalty": -0.5}, additive(1.0, -0.5)),
        ({"extra_body": {"repetition_penalty": 1.5}}, repetition(1.5)),
    ],
    ids=["plain", "frequency", "presence", "both", "repetition"],
)
def test_penalties_and_biases_change_tokens_as_they_would_without_drafts_and_hand_offs(
    api: openai.OpenAI,
    tokenizer: Tokenizer,
    reference: TransformersReference,
    options: dict[str, Any],
    rule: Rule,
) -> None:
    prompt = tokenizer.encode(PROMPT).ids
    choice = completion(api, **options, max_tokens=24).choices[0]
    check(reference, prompt, ids(choice), rule)
    assert choice.finish_reason == "length"
    assert choice.text == tokenizer.decode(ids(choice))
    if options:
        assert ids(choice) != reference.greedy(prompt, 24).token_ids, "the option had no effect at all"


def test_biases_ban_and_favour_tokens(
    api: openai.OpenAI, tokenizer: Tokenizer, reference: TransformersReference
) -> None:
    """The first and the third greedy token are banned, so P and D both must obey; another one is favoured."""
    prompt = tokenizer.encode(PROMPT).ids
    greedy = reference.greedy(prompt, MAX_TOKENS).token_ids
    bias = {greedy[0]: -100.0, greedy[2]: -100.0, tokenizer.encode(" def").ids[0]: 6.0}
    choice = completion(api, logit_bias={str(token): value for token, value in bias.items()}).choices[0]
    check(reference, prompt, ids(choice), biased(bias))
    assert not {greedy[0], greedy[2]} & set(ids(choice))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "extra_body": {"top_k": 1}},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "extra_body": {"min_p": 1.0}},
        {"temperature": 1e-6},
    ],
    ids=["top_k", "top_p", "min_p", "temperature"],
)
def test_a_distribution_narrowed_to_one_token_is_greedy(
    api: openai.OpenAI, tokenizer: Tokenizer, reference: TransformersReference, options: dict[str, Any]
) -> None:
    choice = completion(api, **options, seed=5).choices[0]
    check(reference, tokenizer.encode(PROMPT).ids, ids(choice), additive(0.0, 0.0))


def test_a_seed_repeats_its_tokens_and_other_seeds_bring_others(api: openai.OpenAI) -> None:
    sampled = [ids(completion(api, temperature=1.5, seed=seed).choices[0]) for seed in (1, 1, 2, 3)]
    assert sampled[0] == sampled[1]
    assert len({tuple(tokens) for tokens in sampled}) == 3


def test_min_tokens_masks_what_would_end_the_request(
    api: openai.OpenAI, tokenizer: Tokenizer, reference: TransformersReference
) -> None:
    """C06: across the border, and along drafted positions."""
    prompt = tokenizer.encode(PROMPT).ids
    ends = reference.greedy(prompt, 4).token_ids
    choice = completion(api, extra_body={"stop_token_ids": ends, "min_tokens": 9}).choices[0]
    check(reference, prompt, ids(choice), masked(ends, 9))
    assert len(ids(choice)) >= 9
    assert not set(ids(choice)[:9]) & set(ends)


# -- ending ------------------------------------------------------------------------------------------------------------


def test_eos_ends_a_request_unless_it_is_ignored(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """C05; and EOS is text only when special tokens are not skipped."""
    eos = forced(EOS)
    ended = completion(api, **with_extra(eos, ignore_eos=False)).choices[0]
    assert (ids(ended), ended.finish_reason, ended.text) == ([EOS], "stop", "")
    going = completion(api, **with_extra(eos, skip_special_tokens=False), max_tokens=4).choices[0]
    assert (len(ids(going)), going.finish_reason) == (4, "length")
    assert going.text == spelled(tokenizer, ids(going))
    assert going.text.startswith("<|im_end|>")
    skipped = completion(api, **eos, max_tokens=4).choices[0]
    assert skipped.text == tokenizer.decode(ids(going), skip_special_tokens=True)
    assert ids(skipped) == ids(going)


def test_eos_inside_an_accepted_run_ends_the_request_there(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode(" def").ids[0], tokenizer.encode("import").ids[0]
    choice = completion(api, **with_extra(forced(first, second, EOS), ignore_eos=False)).choices[0]
    assert ids(choice) == [first, second, EOS]
    assert choice.finish_reason == "stop"


def test_a_stop_token_ends_the_request_wherever_it_comes(
    api: openai.OpenAI, tokenizer: Tokenizer, reference: TransformersReference
) -> None:
    """C09: for each place of the greedy text, also inside a run of accepted drafts."""
    greedy = reference.greedy(tokenizer.encode(PROMPT).ids, MAX_TOKENS).token_ids
    for place, token in enumerate(greedy):
        if token in greedy[:place]:
            continue
        choice = completion(api, extra_body={"stop_token_ids": [token]}).choices[0]
        assert ids(choice) == greedy[: place + 1]
        assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", token)
        assert choice.text == spelled(tokenizer, greedy[:place])


def test_a_stop_string_is_found_wherever_it_begins_and_ends(
    cluster: Cluster, api: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    """C08, C09: inside a token, across tokens 0 and 1, across two tokens of one accepted run; kept if asked for."""
    free = completion(api).choices[0]
    edges = [len(spelled(tokenizer, ids(free)[: count + 1])) for count in range(MAX_TOKENS)]
    stops = [free.text[edge - 1 : edge + 1] for edge in edges[:-1]]
    for stop in dict.fromkeys(stops):
        begin = free.text.index(stop)
        choice = completion(api, stop=stop).choices[0]
        assert (choice.text, choice.finish_reason) == (free.text[:begin], "stop"), stop
        assert choice.model_extra["stop_reason"] == stop
        kept = completion(api, stop=[stop], extra_body={"include_stop_str_in_output": True}).choices[0]
        assert kept.text == free.text[:begin] + stop
    spanning = free.text[edges[0] - 1 : edges[0] + 1]
    assert free.text.index(spanning) == edges[0] - 1, "the first one spans the border"
    wait_until_idle(cluster)


def test_of_several_stop_strings_the_first_to_be_completed_wins(api: openai.OpenAI) -> None:
    free = completion(api).choices[0].text
    late, early = sorted((free[-5:], free[3:7]), key=lambda stop: -(free.index(stop) + len(stop)))
    choice = completion(api, stop=["never there", late, early]).choices[0]
    assert choice.text == free[: free.index(early)]
    assert choice.model_extra["stop_reason"] == early


def test_a_character_of_several_tokens_is_never_torn(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """C09: it begins on P and ends on D; as a stop string, and with a stop token in its middle."""
    pieces = tokenizer.encode(KANJI).ids
    assert len(pieces) == 3
    free = completion(api, **forced(*pieces), max_tokens=3).choices[0]
    assert (ids(free), free.text) == (pieces, KANJI)
    chunks = completion(api, **forced(*pieces), max_tokens=3, stream=True)
    assert [chunk.choices[0].text for chunk in chunks if chunk.choices[0].text] == [KANJI]
    stopped = completion(api, **forced(*pieces), stop=KANJI).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    torn = completion(api, **with_extra(forced(*pieces), stop_token_ids=[pieces[1]])).choices[0]
    assert ids(torn) == pieces[:2]
    assert torn.text == spelled(tokenizer, pieces[:1])


# -- several samples ---------------------------------------------------------------------------------------------------


def test_three_samples_have_ids_of_their_own_and_leave_nothing_behind(cluster: Cluster, api: openai.OpenAI) -> None:
    """C28; the first sample is what the seed gives alone."""
    answer = completion(api, temperature=1.2, seed=7, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({tuple(ids(choice)) for choice in answer.choices}) == 3
    measured = [choice.model_extra["kvferry"] for choice in answer.choices]
    assert len({found["request_id"] for found in measured}) == 3
    assert answer.usage.completion_tokens == 3 * MAX_TOKENS
    assert ids(completion(api, temperature=1.2, seed=7).choices[0]) == ids(answer.choices[0])
    wait_until_idle(cluster)


def test_best_of_gives_the_samples_that_are_most_likely_per_token(api: openai.OpenAI) -> None:
    every = completion(api, temperature=1.2, seed=7, n=4, logprobs=0)
    means = [sum(choice.logprobs.token_logprobs) / MAX_TOKENS for choice in every.choices]
    ranked = sorted(range(4), key=lambda index: -means[index])
    best = completion(api, temperature=1.2, seed=7, n=2, best_of=4)
    assert [ids(choice) for choice in best.choices] == [ids(every.choices[index]) for index in ranked[:2]]
    assert best.usage.completion_tokens == 4 * MAX_TOKENS


def test_batches_of_prompts_and_token_ids(
    api: openai.OpenAI, tokenizer: Tokenizer, reference: TransformersReference
) -> None:
    texts = [PROMPT, "import os", "class"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    by_text, by_ids = completion(api, texts), completion(api, prompts)
    assert [ids(choice) for choice in by_text.choices] == [ids(choice) for choice in by_ids.choices]
    assert by_text.usage.prompt_tokens == sum(map(len, prompts))
    for prompt, choice in zip(prompts, by_text.choices, strict=True):
        check(reference, prompt, ids(choice), additive(0.0, 0.0))
    assert ids(completion(api, prompts[0]).choices[0]) == ids(by_text.choices[0])


# -- reporting ---------------------------------------------------------------------------------------------------------


def test_logprobs_of_every_token_and_the_first_ones_equal_the_reference(
    api: openai.OpenAI, tokenizer: Tokenizer, reference: TransformersReference
) -> None:
    """C27: the first entry comes from P with the hand-off; they are the model's own, whatever the penalties."""
    prompt = tokenizer.encode(PROMPT).ids
    for options, rule in (({}, additive(0.0, 0.0)), ({"frequency_penalty": 1.5}, additive(1.5, 0.0))):
        choice = completion(api, logprobs=4, **options).choices[0]
        expected = reference.steered(prompt, MAX_TOKENS, rule)
        assert ids(choice) == expected.token_ids
        found = choice.logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == MAX_TOKENS
        assert found.token_logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert all(len(top) in (4, 5) for top in found.top_logprobs)
        assert "".join(found.tokens) == choice.text
        assert found.text_offset[0] == 0


def test_chat_logprobs(api: openai.OpenAI, reference: TransformersReference) -> None:
    answer = chat(api, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    expected = reference.greedy(choice.model_extra["prompt_token_ids"], MAX_TOKENS)
    content = choice.logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * MAX_TOKENS
    assert [entry.logprob for entry in content] == pytest.approx(expected.logprobs, abs=1e-3)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content), "greedy takes the best"


def test_prompt_logprobs_and_echo(api: openai.OpenAI, tokenizer: Tokenizer, reference: TransformersReference) -> None:
    """The prompt spans several prefill chunks."""
    prompt = tokenizer.encode(PROMPT * 3).ids
    expected = reference.prompt_logprobs(prompt)
    choice = completion(api, prompt, extra_body={"prompt_logprobs": 2}).choices[0]
    entries = choice.model_extra["prompt_logprobs"]
    assert len(entries) == len(prompt)
    assert entries[0] is None
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], prompt[1:], strict=True)]
    assert found == pytest.approx(expected, abs=1e-3)
    echoed = completion(api, PROMPT * 3, echo=True, logprobs=1).choices[0]
    assert echoed.text == PROMPT * 3 + choice.text
    assert echoed.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
    assert len(echoed.logprobs.tokens) == len(prompt) + MAX_TOKENS
    assert "".join(echoed.logprobs.tokens) == echoed.text
    only = completion(api, PROMPT, echo=True, max_tokens=0)
    assert (only.choices[0].text, only.usage.completion_tokens) == (PROMPT, 0)


EVERYTHING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.5, "extra_body": {"top_k": 20, "min_p": 0.01}},
    {"stop": ["("], "extra_body": {"include_stop_str_in_output": True, "min_tokens": 2}},
    {"logit_bias": {"338": 4}, "presence_penalty": 1.0, "extra_body": {"repetition_penalty": 1.2}},
    {"n": 2, "temperature": 1.0, "seed": 9},
    {"extra_body": {"priority": "offline", "skip_special_tokens": False, "ignore_eos": False}},
]


@pytest.mark.parametrize("options", EVERYTHING, ids=lambda options: "+".join(options) or "plain")
def test_streamed_or_not_completion_or_chat_the_answer_is_the_same(api: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = chat(api, **options, logprobs=True)
    rendered = whole.choices[0].model_extra["prompt_token_ids"]
    same = completion(api, rendered, **options, logprobs=0)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streams = [chat(api, **options, **usage, logprobs=True), completion(api, rendered, **options, **usage, logprobs=0)]
    count = len(whole.choices)
    for stream in streams:
        texts, tokens, logprobs = [""] * count, [[] for _ in range(count)], [0] * count
        reasons: list[Any] = [None] * count
        last = None
        for chunk in stream:
            last = chunk
            for choice in chunk.choices:
                text = choice.text if hasattr(choice, "text") else choice.delta.content
                texts[choice.index] += text or ""
                tokens[choice.index] += choice.model_extra.get("token_ids") or []
                if choice.logprobs is not None:
                    entries = choice.logprobs.content if hasattr(choice, "delta") else choice.logprobs.tokens
                    logprobs[choice.index] += len(entries)
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert last is not None
        assert last.choices == []
        assert last.usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, tokens))
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens
        assert texts == [choice.message.content for choice in whole.choices] == [c.text for c in same.choices]
        assert tokens == [ids(choice) for choice in whole.choices] == [ids(choice) for choice in same.choices]
        assert logprobs == [len(row) for row in tokens], "as many entries as tokens"
        assert reasons == [choice.finish_reason for choice in whole.choices]


def test_measurements_of_speculation_come_with_the_answer(api: openai.OpenAI) -> None:
    found = completion(api, max_tokens=24).model_extra["kvferry"]
    assert found["drafted_tokens"] >= found["accepted_tokens"] == sum(found["accepted_by_position"])
    assert len(found["accepted_by_position"]) == 3
    assert found["decode_steps"] + found["accepted_tokens"] == 23, "each decode step gives one token and its drafts"
    assert found["mean_accepted_length"] == pytest.approx(23 / found["decode_steps"])


# -- refusing ----------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any]] = [
    ("temperature", 2.5),
    ("top_p", 0.0),
    ("top_k", -2),
    ("min_p", 1.5),
    ("frequency_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"99999": 1}),
    ("min_tokens", 17),
    ("max_tokens", 0),
    ("stop", ["x"] * 17),
    ("stop", [""]),
    ("stop_token_ids", [-1]),
    ("n", 0),
    ("best_of", 0),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("stream_options", {"include_usage": True}),
    ("seed", "x"),
    ("ignore_eos", 7),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={str(value)[:12]}" for name, value in BAD])
def test_a_value_out_of_range_gets_a_400_that_names_it(api: openai.OpenAI, name: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        completion(api, extra_body={name: value})
    assert raised.value.status_code == 400
    assert name in str(raised.value)
    assert raised.value.param == name


@pytest.mark.parametrize(
    ("name", "value"), [("top_logprobs", 21), ("max_completion_tokens", 0), ("n", 129), ("temperature", -0.1)]
)
def test_chats_refuse_likewise(api: openai.OpenAI, name: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat(api, logprobs=True, extra_body={name: value})
    assert raised.value.param == name


def test_after_all_of_this_nothing_is_held_and_the_next_answer_is_right(
    cluster: Cluster, api: openai.OpenAI, tokenizer: Tokenizer, reference: TransformersReference
) -> None:
    wait_until_idle(cluster)
    check(reference, tokenizer.encode(PROMPT).ids, ids(completion(api).choices[0]), additive(0.0, 0.0))
    expected = reference.greedy(tokenizer.encode(PROMPT).ids, MAX_TOKENS)
    assert min(expected.gaps) > TIE_TOLERANCES["float32"], "the prompt is one whose greedy text does not hang on a tie"
