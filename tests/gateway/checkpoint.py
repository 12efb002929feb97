"""A tiny checkpoint directory without weights, for tests of text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "def hello(name: str) -> None:\n    print(f'héllo {name}, 你好, 👋🏽!')\n",
    "the quick brown fox jumps over the lazy dog. STOP. the end? END",
]

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE with special tokens, as Qwen has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("a b é", normalized=False)])
    return tokenizer


def sentence_piece_like_tokenizer() -> Tokenizer:
    """Metaspace with byte fallback, as Llama has: decoding depends on neighbours."""
    letters = sorted({character for text in CORPUS for character in text.replace(" ", "▁")} - set("你👋"))
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁the", "he", "llo", "▁▁"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def write_checkpoint(directory: Path, tokenizer: Tokenizer | None = None) -> Path:
    """tokenizer, template and configurations; end tokens are ``<|endoftext|>`` (0) and ``<|im_end|>`` (2)."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(directory / "tokenizer.json"))
    settings = {
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 64}}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "top_k": 20}))
    return directory
