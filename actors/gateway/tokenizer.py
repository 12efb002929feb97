"""The checkpoint's own tokenizer, without transformers and torch: text to tokens and back, chats, end tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from actors.gateway.chat_template import ChatTemplate, ChatTemplateError
from actors.gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from actors.runtime.config import ConfigError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class CheckpointTokenizer:
    """Tokenizer and text conventions of one checkpoint directory. Thread-safe once built.

    ``eos_token_ids`` come from ``generation_config.json``, else ``config.json``, else the tokenizer's own end token.
    ``sampling_defaults`` are the generation parameters that ``generation_config.json`` recommends.
    ``max_model_len`` is the checkpoint's ``max_position_embeddings``, 0 when it has none.
    """

    def __init__(self, directory: Path) -> None:
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        settings = _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        model = _read_json(directory / "config.json")
        text_model = model.get("text_config") or model
        self._special_tokens = _special_tokens(settings, _read_json(directory / "special_tokens_map.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), text_model.get("vocab_size") or 0)
        self.max_model_len = int(text_model.get("max_position_embeddings") or 0)
        self.eos_token_ids = self._find_eos(generation, model, text_model)
        self.sampling_defaults = _sampling_defaults(generation)
        self._is_byte_level = _is_byte_level(self._tokenizer)
        template = _find_template(directory, settings)
        self.chat_template = ChatTemplate(template, self._special_tokens) if template else None

    def _find_eos(self, *sources: Mapping[str, Any]) -> tuple[int, ...]:
        for source in sources:
            value = source.get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        token_id = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        return () if token_id is None else (token_id,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``. Releases the GIL."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole token sequence; ids beyond the vocabulary are left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of a conversation. Raises ``ChatTemplateError``, also when the checkpoint has no template."""
        if self.chat_template is None:
            raise ChatTemplateError("this checkpoint has no chat template; use /v1/completions")
        return self.chat_template.render(messages, **variables)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental detokenizer. What it gives, joined, equals ``decode`` of all its tokens: of any tokens for
        byte-level tokenizers; for others of tokens that spell valid characters (their decoders take back earlier
        characters when an invalid byte follows).
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteDetokenizer(self._tokenizer.id_to_token, skipped)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=False), skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for, on its own (special tokens: their name)."""
        return self.detokenizer(skip_special_tokens=False).token_bytes(token_id)


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a usable tokenizer.json: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_TOKEN_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """What the checkpoint's authors recommend, for the parameters that we know."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: generation[name] for name in names if isinstance(generation.get(name), int | float)}


def _find_template(directory: Path, settings: Mapping[str, Any]) -> str:
    """The default chat template, "" when there is none. A file of its own wins over the tokenizer's settings."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = _read_json(directory / "chat_template.json").get("chat_template") or settings.get("chat_template") or ""
    if isinstance(value, list):
        named = {str(item.get("name")): str(item.get("template")) for item in value if isinstance(item, dict)}
        return named.get("default", "")
    return str(value)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its tokens are bytes spelled as printable characters (GPT-2's way, which Qwen uses)."""
    if tokenizer.decoder is None:
        return False
    return bool(json.loads(tokenizer.decoder.__getstate__()).get("type") == "ByteLevel")
