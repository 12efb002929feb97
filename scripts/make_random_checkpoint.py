"""Writes a random checkpoint of a Qwen3.5-class model of any size, MTP weights and a byte-level tokenizer included.

For benchmarks and tests: the weights mean nothing, but every shape, name and file is as in a real checkpoint.

    python -m scripts.make_random_checkpoint --out DIR --hidden 512 --layers 8
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_TOKENS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """Sizes of the model; the defaults are the 33 M-parameter benchmark model. Every fourth layer is full attention."""

    hidden_size: int = 512
    layers: int = 8
    intermediate_size: int = 1536
    vocab_size: int = 8192
    attention_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    linear_key_heads: int = 4
    linear_value_heads: int = 8
    linear_key_dim: int = 64
    linear_value_dim: int = 64
    conv_kernel: int = 4
    max_model_len: int = 4096
    rope_theta: float = 1_000_000.0
    full_attention_interval: int = 4
    tied_embeddings: bool = True


def make_random_checkpoint(
    out: Path,
    sizes: CheckpointSizes | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    gain: float = 1.0,
    with_draft: bool = True,
    prefix: str = "model.",
) -> Path:
    """Write the checkpoint into directory ``out`` (created) and return it.

    ``gain`` scales the projections; ``prefix`` is ``model.`` or ``model.language_model.`` as in multimodal checkpoints.
    """
    sizes = sizes or CheckpointSizes()
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = _Weights(sizes, generator, gain)
    tensors = {f"{prefix}{name}": tensor for name, tensor in weights.language_model().items()}
    if not sizes.tied_embeddings:
        tensors["lm_head.weight"] = weights.matrix(sizes.vocab_size, sizes.hidden_size)
    if with_draft:
        tensors.update(weights.draft())
    full = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(full, str(out / "model.safetensors"), metadata={"format": "pt"})
    config = config_json(sizes, dtype, with_draft)
    if prefix != "model.":
        config = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": sizes.tied_embeddings}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    if sizes.vocab_size >= BYTE_TOKENS + len(SPECIAL_TOKENS):
        end = BYTE_TOKENS + SPECIAL_TOKENS.index("<|im_end|>")
        (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, BYTE_TOKENS]}))
        write_byte_tokenizer(out)
    return out


def config_json(sizes: CheckpointSizes, dtype: torch.dtype, with_draft: bool) -> dict[str, Any]:
    """The ``config.json`` of a text checkpoint of these sizes."""
    interval = sizes.full_attention_interval
    kinds = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(sizes.layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.attention_heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "layer_types": kinds,
        "linear_num_key_heads": sizes.linear_key_heads,
        "linear_num_value_heads": sizes.linear_value_heads,
        "linear_key_head_dim": sizes.linear_key_dim,
        "linear_value_head_dim": sizes.linear_value_dim,
        "linear_conv_kernel_dim": sizes.conv_kernel,
        "max_position_embeddings": sizes.max_model_len,
        "tie_word_embeddings": sizes.tied_embeddings,
        "mtp_num_hidden_layers": int(with_draft),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": sizes.rope_theta,
            "partial_rotary_factor": 0.25,
        },
    }


class _Weights:
    """Draws tensors under checkpoint names; norms are near their neutral value so that activations stay in range."""

    def __init__(self, sizes: CheckpointSizes, generator: torch.Generator, gain: float) -> None:
        self._sizes, self._generator, self._gain = sizes, generator, gain

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return self._normal(rows, columns) * (self._gain / columns**0.5)

    def language_model(self) -> dict[str, torch.Tensor]:
        sizes = self._sizes
        tensors = {"embed_tokens.weight": self.matrix(sizes.vocab_size, sizes.hidden_size)}
        for index in range(sizes.layers):
            attention = (index + 1) % sizes.full_attention_interval == 0
            tensors.update(self._layer(f"layers.{index}.", attention))
        tensors["norm.weight"] = self._offset(sizes.hidden_size)
        return tensors

    def draft(self) -> dict[str, torch.Tensor]:
        hidden = self._sizes.hidden_size
        return {
            "mtp.pre_fc_norm_embedding.weight": self._offset(hidden),
            "mtp.pre_fc_norm_hidden.weight": self._offset(hidden),
            "mtp.fc.weight": self.matrix(hidden, 2 * hidden),
            **self._layer("mtp.layers.0.", attention=True),
            "mtp.norm.weight": self._offset(hidden),
        }

    def _layer(self, prefix: str, attention: bool) -> dict[str, torch.Tensor]:
        sizes = self._sizes
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        mixer = self._attention(f"{prefix}self_attn.") if attention else self._delta(f"{prefix}linear_attn.")
        return {
            f"{prefix}input_layernorm.weight": self._offset(hidden),
            f"{prefix}post_attention_layernorm.weight": self._offset(hidden),
            f"{prefix}mlp.gate_proj.weight": self.matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": self.matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": self.matrix(hidden, inner),
            **mixer,
        }

    def _attention(self, prefix: str) -> dict[str, torch.Tensor]:
        sizes = self._sizes
        width, hidden = sizes.attention_heads * sizes.head_dim, sizes.hidden_size
        return {
            f"{prefix}q_proj.weight": self.matrix(2 * width, hidden),
            f"{prefix}k_proj.weight": self.matrix(sizes.kv_heads * sizes.head_dim, hidden),
            f"{prefix}v_proj.weight": self.matrix(sizes.kv_heads * sizes.head_dim, hidden),
            f"{prefix}o_proj.weight": self.matrix(hidden, width),
            f"{prefix}q_norm.weight": self._offset(sizes.head_dim),
            f"{prefix}k_norm.weight": self._offset(sizes.head_dim),
        }

    def _delta(self, prefix: str) -> dict[str, torch.Tensor]:
        sizes = self._sizes
        keys = sizes.linear_key_heads * sizes.linear_key_dim
        values = sizes.linear_value_heads * sizes.linear_value_dim
        channels, heads = 2 * keys + values, sizes.linear_value_heads
        return {
            f"{prefix}in_proj_qkv.weight": self.matrix(channels, sizes.hidden_size),
            f"{prefix}in_proj_z.weight": self.matrix(values, sizes.hidden_size),
            f"{prefix}in_proj_b.weight": self.matrix(heads, sizes.hidden_size),
            f"{prefix}in_proj_a.weight": self.matrix(heads, sizes.hidden_size),
            f"{prefix}conv1d.weight": self._normal(channels, 1, sizes.conv_kernel) / sizes.conv_kernel**0.5,
            f"{prefix}A_log": torch.rand(heads, generator=self._generator).mul_(4.0).add_(0.1).log_(),
            f"{prefix}dt_bias": self._normal(heads) * 0.5 - 2.0,
            f"{prefix}norm.weight": 1.0 + self._offset(sizes.linear_value_dim),
            f"{prefix}out_proj.weight": self.matrix(sizes.hidden_size, values),
        }

    def _offset(self, width: int) -> torch.Tensor:
        return self._normal(width) * 0.1

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)


def write_byte_tokenizer(out: Path) -> None:
    """A tokenizer whose tokens are the 256 bytes and the chat markers: it encodes any text and loses nothing."""
    alphabet = _byte_alphabet()
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    added = [
        {
            "id": BYTE_TOKENS + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols, extra = [], 0
    for byte in range(BYTE_TOKENS):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(BYTE_TOKENS + extra))
            extra += 1
    return symbols


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = CheckpointSizes()
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--hidden", type=int, default=defaults.hidden_size)
    parser.add_argument("--layers", type=int, default=defaults.layers)
    parser.add_argument("--intermediate", type=int, default=0, help="0: three times the hidden size")
    parser.add_argument("--vocab", type=int, default=defaults.vocab_size)
    parser.add_argument("--heads", type=int, default=defaults.attention_heads)
    parser.add_argument("--kv-heads", type=int, default=defaults.kv_heads)
    parser.add_argument("--head-dim", type=int, default=defaults.head_dim)
    parser.add_argument("--linear-key-heads", type=int, default=defaults.linear_key_heads)
    parser.add_argument("--linear-value-heads", type=int, default=defaults.linear_value_heads)
    parser.add_argument("--linear-key-dim", type=int, default=defaults.linear_key_dim)
    parser.add_argument("--linear-value-dim", type=int, default=defaults.linear_value_dim)
    parser.add_argument("--max-model-len", type=int, default=defaults.max_model_len)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizes = CheckpointSizes(
        hidden_size=arguments.hidden,
        layers=arguments.layers,
        intermediate_size=arguments.intermediate or 3 * arguments.hidden,
        vocab_size=arguments.vocab,
        attention_heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        linear_key_heads=arguments.linear_key_heads,
        linear_value_heads=arguments.linear_value_heads,
        linear_key_dim=arguments.linear_key_dim,
        linear_value_dim=arguments.linear_value_dim,
        max_model_len=arguments.max_model_len,
    )
    make_random_checkpoint(arguments.out, sizes, seed=arguments.seed, dtype=getattr(torch, arguments.dtype))
    parameters = sum(tensor.numel() for tensor in _saved(arguments.out).values())
    print(f"{arguments.out}: {parameters / 1e6:.1f} M parameters")


def _saved(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(str(out / "model.safetensors")))


if __name__ == "__main__":
    main()
