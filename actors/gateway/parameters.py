"""From an API request to samples: prompts tokenised, every value checked, seeds and ids given. Pure.

A parameter that is not given has the value that the checkpoint's ``generation_config.json`` recommends, else OpenAI's
default (``temperature`` 1, ``top_p`` 1, no ``top_k``, ``max_tokens`` 16 for completions and the rest of the context for
chats).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from actors.gateway.chat_template import ChatTemplateError
from actors.gateway.detokenizer import TextStream
from actors.gateway.errors import ApiError, invalid
from actors.gateway.schema import ChatBody, CompletionBody, GenerationBody, check_messages
from actors.gateway.seeds import mix, sample_seeds
from actors.gateway.tokenizer import CheckpointTokenizer
from messages.gateway import Sample
from messages.requests import SamplingParams

COMPLETION_TOKENS_DEFAULT = 16
LOGPROBS_MAX = 20
N_MAX = 128
SAMPLES_MAX = 1024
STOPS_MAX = 16
TOKEN_ID_DIGITS_MAX = 10
REQUEST_ID_LENGTH_MAX = 128
WHOLE_INTERVAL = 16
"""Tokens of an answer that is not streamed which come to the gateway together: nobody reads them before its end, and no
more of them have to be made again when an instance dies."""

_RANGES: dict[str, tuple[float, float, float]] = {
    "temperature": (0.0, 2.0, 1.0),
    "min_p": (0.0, 1.0, 0.0),
    "frequency_penalty": (-2.0, 2.0, 0.0),
    "presence_penalty": (-2.0, 2.0, 0.0),
    "repetition_penalty": (0.01, 100.0, 1.0),  # beyond that float32 logits overflow
}
"""Parameter → (least, most, OpenAI's default)."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and its text if it was given as text."""

    token_ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True)
class Plan:
    """A checked request. Samples are ordered by prompt, ``best_of`` of them each; the client sees ``n`` of those."""

    prompts: tuple[Prompt, ...]
    samples: tuple[Sample, ...]
    n: int
    best_of: int
    logprobs: int  # alternatives per token that the client sees, -1: none
    prompt_logprobs: int
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo: bool
    echo_only: bool  # max_tokens 0: one token is generated and thrown away
    stream: bool
    include_usage: bool
    return_token_ids: bool
    priority: Literal["online", "offline"]

    def text_stream(self, tokenizer: CheckpointTokenizer, sample: Sample) -> TextStream:
        """What turns this sample's tokens into its text."""
        sampling = sample.sampling
        ending = sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)
        return TextStream(
            tokenizer.detokenizer(skip_special_tokens=self.skip_special_tokens),
            stops=self.stops,
            include_stop=self.include_stop,
            ending_ids=ending,
            min_tokens=sampling.min_tokens,
        )


def check_request_id(param: str, value: str) -> str:
    """A client's own id, if it may serve as one."""
    if not 0 < len(value) <= REQUEST_ID_LENGTH_MAX or not value.isascii() or not value.isprintable() or " " in value:
        allowed = f"1 to {REQUEST_ID_LENGTH_MAX} printable ASCII characters without spaces"
        raise invalid(param, value, allowed)
    return value


def completion_prompts(body: CompletionBody, tokenizer: CheckpointTokenizer) -> tuple[Prompt, ...]:
    """The prompts of a completion request. Raises ``ApiError``."""
    given = body.prompt
    if given is None:
        raise ApiError(400, "prompt is missing", "prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and _are_integers(given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise invalid("prompt", given, "a string, a list of token ids, or a list of either")
    return tuple(_prompt(item, body.add_special_tokens, tokenizer) for item in given)


def _prompt(item: Any, add_special_tokens: bool, tokenizer: CheckpointTokenizer) -> Prompt:
    if isinstance(item, str):
        prompt = Prompt(tokenizer.encode(item, add_special_tokens=add_special_tokens), item)
    elif isinstance(item, list) and _are_integers(item):
        prompt = Prompt(_check_token_ids("prompt", item, tokenizer), None)
    else:
        raise invalid("prompt", item, "a string or a list of token ids")
    if not prompt.token_ids:
        raise invalid("prompt", item, "it must have at least one token")
    return prompt


def chat_prompt(body: ChatBody, tokenizer: CheckpointTokenizer) -> tuple[Prompt, ...]:
    """The one prompt of a chat request, rendered by the checkpoint's template. Raises ``ApiError``."""
    messages = check_messages(body.messages)
    reserved = {"messages", "tools", "documents", "add_generation_prompt", "self"} & set(body.chat_template_kwargs)
    if reserved:
        raise invalid("chat_template_kwargs", sorted(reserved)[0], "that name has a parameter of its own")
    try:
        text = tokenizer.render_chat(
            messages, add_generation_prompt=body.add_generation_prompt, **body.chat_template_kwargs
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), "messages") from error
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        raise invalid("messages", body.messages, "the rendered conversation has no tokens")
    return (Prompt(token_ids, text),)


def make_plan(
    body: CompletionBody | ChatBody,
    prompts: tuple[Prompt, ...],
    tokenizer: CheckpointTokenizer,
    *,
    request_id: str,
    seed: int,
    length_max: int,
    stream_interval: int = 1,
) -> Plan:
    """Check everything and cut the request into samples.

    ``seed`` serves when the client gave none; ``length_max`` is the longest prompt plus output that can be served;
    ``stream_interval`` is how many tokens of a streamed answer may come together.
    Raises ``ApiError`` 400 that names the parameter.
    """
    n, best_of = _check_counts(body, len(prompts))
    logprobs = _check_logprobs(body)
    prompt_logprobs = _count_in_range("prompt_logprobs", body.prompt_logprobs, 0, LOGPROBS_MAX, default=-1)
    echo = isinstance(body, CompletionBody) and body.echo
    longest = max(len(prompt.token_ids) for prompt in prompts)
    max_tokens = _check_length(body, longest, length_max)
    stops = _check_stops(body.stop)
    sampling = _sampling(
        body,
        tokenizer,
        max_tokens=max(max_tokens, 1),
        logprobs=max(logprobs, 0 if best_of > n else -1),
        prompt_logprobs=max(prompt_logprobs, logprobs if echo else -1),
        output_interval=stream_interval if body.stream else 1 if stops else WHOLE_INTERVAL,
    )
    samples: list[Sample] = []
    for prompt_index, prompt in enumerate(prompts):
        base = body.seed if body.seed is not None else mix(seed, prompt_index)
        for sample_seed in sample_seeds(base, best_of):
            several = len(prompts) * best_of > 1
            samples.append(
                Sample(
                    request_id=f"{request_id}-{len(samples)}" if several else request_id,
                    prompt_token_ids=prompt.token_ids,
                    sampling=msgspec.structs.replace(sampling, seed=sample_seed),
                )
            )
    return Plan(
        prompts=prompts,
        samples=tuple(samples),
        n=n,
        best_of=best_of,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stops=stops,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        echo=echo,
        echo_only=max_tokens == 0,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        return_token_ids=body.return_token_ids,
        priority=body.priority,
    )


def _check_counts(body: CompletionBody | ChatBody, prompt_count: int) -> tuple[int, int]:
    """(n, best_of)."""
    n = _count_in_range("n", body.n, 1, N_MAX, default=1)
    best_of = n
    if isinstance(body, CompletionBody) and body.best_of is not None:
        best_of = _count_in_range("best_of", body.best_of, 1, N_MAX, default=1)
        if best_of < n:
            raise invalid("best_of", best_of, f"at least n, which is {n}")
        if best_of > n and body.stream:
            raise invalid("best_of", best_of, "with stream it must equal n: the best are known at the end only")
    if prompt_count * best_of > SAMPLES_MAX:
        raise invalid("n", n, f"prompts times best_of may be at most {SAMPLES_MAX}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", body.stream_options, "only allowed when stream is true")
    return n, best_of


def _check_logprobs(body: CompletionBody | ChatBody) -> int:
    """Alternatives per token, -1 for no log-probabilities at all."""
    if isinstance(body, CompletionBody):
        return _count_in_range("logprobs", body.logprobs, 0, LOGPROBS_MAX, default=-1)
    top = _count_in_range("top_logprobs", body.top_logprobs, 0, LOGPROBS_MAX, default=0)
    if top and not body.logprobs:
        raise invalid("top_logprobs", top, "set logprobs to true to get them")
    return top if body.logprobs else -1


def _check_length(body: CompletionBody | ChatBody, prompt_length: int, length_max: int) -> int:
    """``max_tokens``, checked against what the longest prompt leaves."""
    name, given = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name, given = "max_completion_tokens", body.max_completion_tokens
    if given is None:
        given = max(1, length_max - prompt_length) if isinstance(body, ChatBody) else COMPLETION_TOKENS_DEFAULT
    elif given == 0 and isinstance(body, CompletionBody) and body.echo:
        pass
    elif given < 1:
        raise invalid(name, given, "at least 1 (0 with echo)")
    if length_max and prompt_length + given > length_max:
        raise ApiError(
            400,
            f"{name}: this model's context length is {length_max} tokens, but {prompt_length + given} were requested "
            f"({prompt_length} in the prompt, {given} for the output); shorten the prompt or lower {name}",
            name,
        )
    return given


def _sampling(
    body: GenerationBody,
    tokenizer: CheckpointTokenizer,
    *,
    max_tokens: int,
    logprobs: int,
    prompt_logprobs: int,
    output_interval: int,
) -> SamplingParams:
    recommended = tokenizer.sampling_defaults
    ranged = {
        name: float(_in_range(name, getattr(body, name), low, high, default=recommended.get(name, default)))
        for name, (low, high, default) in _RANGES.items()
    }
    top_p = body.top_p if body.top_p is not None else recommended.get("top_p", 1.0)
    if not 0.0 < top_p <= 1.0:
        raise invalid("top_p", top_p, "more than 0 and at most 1")
    top_k = body.top_k if body.top_k is not None else int(recommended.get("top_k", 0))
    if top_k < -1:
        raise invalid("top_k", top_k, "at least 1, or 0 or -1 for all tokens")
    min_tokens = body.min_tokens if body.min_tokens is not None else 0
    if not 0 <= min_tokens <= max_tokens:
        raise invalid("min_tokens", min_tokens, f"0 to max_tokens, which is {max_tokens}")
    return SamplingParams(
        temperature=ranged["temperature"],
        min_p=ranged["min_p"],
        frequency_penalty=ranged["frequency_penalty"],
        presence_penalty=ranged["presence_penalty"],
        top_p=float(top_p),
        top_k=min(max(top_k, 0), tokenizer.vocab_size),  # what is larger means all tokens, and may not fit a message
        repetition_penalty=ranged["repetition_penalty"],
        logit_bias=_check_logit_bias(body.logit_bias, tokenizer),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=_check_token_ids("stop_token_ids", body.stop_token_ids, tokenizer),
        eos_token_ids=tokenizer.eos_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        output_interval=output_interval,
    )


def _in_range(name: str, value: float | None, low: float, high: float, *, default: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise invalid(name, value, f"{low:g} to {high:g}")
    return value


def _count_in_range(name: str, value: int | None, low: int, high: int, *, default: int) -> int:
    return int(_in_range(name, value, low, high, default=default))


def _check_logit_bias(bias: dict[str, float], tokenizer: CheckpointTokenizer) -> tuple[tuple[int, float], ...]:
    checked = []
    for key, value in bias.items():
        if len(key) > TOKEN_ID_DIGITS_MAX or not key.isascii() or not key.isdigit() or int(key) >= tokenizer.vocab_size:
            raise invalid("logit_bias", key, f"keys are token ids from 0 to {tokenizer.vocab_size - 1}")
        if not -100.0 <= value <= 100.0:
            raise invalid("logit_bias", value, "values are -100 to 100")
        checked.append((int(key), float(value)))
    return tuple(sorted(checked))


def _check_stops(stop: str | list[str]) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > STOPS_MAX or not all(stops):
        raise invalid("stop", stop, f"up to {STOPS_MAX} strings, none of them empty")
    return tuple(dict.fromkeys(stops))


def _check_token_ids(param: str, ids: Sequence[int], tokenizer: CheckpointTokenizer) -> tuple[int, ...]:
    for token_id in ids:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise invalid(param, token_id, f"token ids are 0 to {tokenizer.vocab_size - 1}")
    return tuple(ids)


def _are_integers(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
