"""The bodies of the API's requests: OpenAI's fields, vLLM's extensions, and a few of our own.

Every field that is accepted works, except ``ACCEPTED_WITHOUT_EFFECT``, which by their nature have none here. A field
that OpenAI or vLLM know and kvferry does not is refused with the reason (``UNSUPPORTED``), unless it has the value that
asks for nothing; any other field is refused as unknown. ``null`` means "not given" everywhere.

Our own fields: ``priority`` ("online", "offline": served when nothing online waits); ``request_id`` (or the header
``X-Request-Id``; refused with 409 while in flight); ``return_token_ids``: each choice then carries ``token_ids`` and
``prompt_token_ids``, and the response (streamed: the chunk with a choice's ``finish_reason``) a ``kvferry`` object with
timings in ms, bytes moved, the instances involved and speculation counters. A response with several choices carries
``kvferry`` in each of them instead.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from actors.gateway.errors import ApiError, invalid

BODY_BYTES_MAX = 32 << 20

ACCEPTED_WITHOUT_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Labels for the operator of a service; they ask nothing of the model."""

_NO_TOOLS = "tool calls are not parsed from the model's text; put tool descriptions into the messages"
_NO_GRAMMAR = "output is not constrained to a format; ask for it in the prompt"

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), _NO_GRAMMAR),
    "structured_outputs": ((), _NO_GRAMMAR),
    "guided_json": ((), _NO_GRAMMAR),
    "guided_regex": ((), _NO_GRAMMAR),
    "guided_choice": ((), _NO_GRAMMAR),
    "guided_grammar": ((), _NO_GRAMMAR),
    "suffix": (("",), "text is only generated after a prompt"),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "prediction": ((), "drafts come from the model's own MTP head"),
    "web_search_options": ((), "the model has no access to the web"),
    "reasoning_effort": ((), "use chat_template_kwargs, for example {'enable_thinking': false}"),
    "verbosity": ((), "ask for it in the prompt"),
    "store": ((False,), "responses are not stored"),
    "service_tier": (("auto", "default"), "use priority: 'online' or 'offline'"),
    "use_beam_search": ((False,), "use best_of"),
    "length_penalty": ((1, 1.0), "beam search is not supported"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": ((), "use logit_bias"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "continue_final_message": ((False,), "use /v1/completions with the rendered prompt"),
    "documents": (([],), "put documents into the messages"),
    "spaces_between_special_tokens": ((True,), "text is what the tokenizer makes of the tokens"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
}
"""Field → (values that ask for nothing, why it is not supported)."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: one more chunk at the end, without choices, with the usage of the whole request."""

    include_usage: bool = False


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common. None: not given."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    min_tokens: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Literal["online", "offline"] = "online"
    request_id: str | None = None
    return_token_ids: bool = False


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``. ``prompt``: a string, token ids, or a list of either (a batch)."""

    prompt: Any = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``. ``chat_template_kwargs`` are variables of the checkpoint's template."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """The body in ``data``. Raises ``ApiError`` 400 that names the field at fault."""
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(fields).__name__}")
    kept = {}
    for name, value in fields.items():
        if value is None or name in ACCEPTED_WITHOUT_EFFECT:
            continue
        if name in UNSUPPORTED and name not in kind.__struct_fields__:
            neutral, reason = UNSUPPORTED[name]
            if value not in neutral:
                raise ApiError(400, f"{name} is not supported: {reason}", name)
            continue
        if name not in kind.__struct_fields__:
            raise ApiError(400, f"{name} is not a parameter of this endpoint", name)
        kept[name] = value
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise _named(error, kind) from error


def _named(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> ApiError:
    """msgspec says ``Expected `int`, got `str` - at `$.max_tokens```; the client should see the parameter first."""
    what, _, path = str(error).partition(" - at `$")
    param = path.strip("`.").partition("[")[0].partition(".")[0]
    if not param and "missing required field" in what:
        param = what.split("`")[1]
        return ApiError(400, f"{param} is missing", param)
    allowed = _choices(get_type_hints(kind).get(param)) if what.startswith("Invalid enum value") else ()
    choices = f"; allowed: {', '.join(map(str, allowed))}" if allowed else ""
    return ApiError(400, f"{param or 'body'}: {what[:1].lower()}{what[1:]}{choices}", param)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a ``Literal``, also of one among other types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for part in get_args(hint) for choice in _choices(part))


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a template expects them: ``content`` as text. Raises ``ApiError`` 400 for anything but text."""
    if not messages:
        raise invalid("messages", messages, "give at least one message")
    return [_check_message(index, message) for index, message in enumerate(messages)]


_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "reasoning_content", "tool_call_id"})


def _check_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    given = {name: value for name, value in message.items() if value is not None and value != []}
    for name in given:
        if name not in _MESSAGE_FIELDS:
            raise ApiError(400, f"{where}.{name} is not supported", "messages")
    if given.get("role") not in _ROLES:
        raise invalid(f"{where}.role", given.get("role"), f"one of {', '.join(_ROLES)}")
    for name in ("name", "reasoning_content", "tool_call_id"):
        if not isinstance(given.get(name, ""), str):
            raise invalid(f"{where}.{name}", given[name], "a string")
    return given | {"content": _text_of(where, given.get("content", ""))}


def _text_of(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}.content", content, "a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{where}.content", part, "only parts {'type': 'text', 'text': …} are supported")
        texts.append(part["text"])
    return "\n".join(texts)
