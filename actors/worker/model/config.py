"""A checkpoint's ``config.json`` as numbers this system computes with, and the reasons to refuse one.

No torch here: the gateway, the schedulers and ``kvferry plan`` read checkpoints through this module too.

Accepted are text checkpoints (``model_type`` ``qwen3_5_text``) and multimodal ones (``qwen3_5``), whose language model
is described by ``text_config``. Everything that would silently compute something else is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from actors.runtime.config import ConfigError
from messages.layout import ModelGeometry

LayerKind = Literal["attention", "delta"]
DTYPES = ("float32", "bfloat16")
HEADER_BYTES_MAX = 100_000_000
FINGERPRINT_SAMPLE_BYTES = 4096
_LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "attention", "linear_attention": "delta"}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The language model of one checkpoint directory. Sizes are of the whole (unsharded) model."""

    model_dir: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[LayerKind, ...]
    attention_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    norm_eps: float
    tied_embeddings: bool
    draft_layers: int
    checkpoint_dtype: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str

    def geometry(self, *, dtype: str, max_model_len: int = 0) -> ModelGeometry:
        """What decides the cache layout when computing in ``dtype``. ``max_model_len`` 0: the checkpoint's."""
        return ModelGeometry(
            model_fingerprint=self.fingerprint,
            layer_kinds=self.layer_kinds,
            attention_heads=self.attention_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            linear_key_heads=self.linear_key_heads,
            linear_value_heads=self.linear_value_heads,
            linear_key_dim=self.linear_key_dim,
            linear_value_dim=self.linear_value_dim,
            conv_kernel=self.conv_kernel,
            draft_layers=self.draft_layers,
            cache_dtype=dtype,
            max_model_len=max_model_len or self.max_model_len,
        )


def load_config(model_dir: str | Path) -> ModelConfig:
    """Read ``config.json`` (and the headers of the weight files) of a Hugging Face directory.

    Raises ``ConfigError`` for a directory that is no checkpoint, or one of a kind this system does not compute.
    """
    directory = Path(model_dir)
    raw = _read_json(directory / "config.json")
    text = _text_config(raw, directory)
    headers = read_headers(directory)
    _refuse_unsupported(text, directory)
    reader = _Fields(text, directory)
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    head_dim = reader.count("head_dim", hidden // heads)
    theta, rotary_dim = _rope(text, head_dim, directory)
    config = ModelConfig(
        model_dir=str(directory),
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size"),
        layer_kinds=_layer_kinds(text, reader.count("num_hidden_layers"), directory),
        attention_heads=heads,
        kv_heads=reader.count("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        linear_key_heads=reader.count("linear_num_key_heads"),
        linear_value_heads=reader.count("linear_num_value_heads"),
        linear_key_dim=reader.count("linear_key_head_dim"),
        linear_value_dim=reader.count("linear_value_head_dim"),
        conv_kernel=reader.count("linear_conv_kernel_dim"),
        norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        draft_layers=_draft_layers(text, headers, directory),
        checkpoint_dtype=_checkpoint_dtype(text, raw),
        max_model_len=reader.count("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(directory, text, raw),
        fingerprint=_fingerprint(text, headers, directory),
    )
    _check_groups(config)
    return config


def check_tp(config: ModelConfig, tp_size: int) -> None:
    """Raise ``ConfigError`` unless the model shards over ``tp_size`` ranks.

    Every kind of head must divide by the ranks; only attention KV heads may be fewer than ranks, and are then
    replicated, which needs the ranks to divide by them.
    """
    if tp_size < 1:
        raise ConfigError(f"tensor-parallel size {tp_size} is not a positive number of ranks (option: topology)")
    divisible = (
        ("attention heads", config.attention_heads),
        ("linear key heads", config.linear_key_heads),
        ("linear value heads", config.linear_value_heads),
        ("intermediate size", config.intermediate_size),
    )
    for what, count in divisible:
        if count % tp_size:
            raise ConfigError(
                f"TP{tp_size} cannot shard {config.model_dir}: its {count} {what} do not divide by {tp_size} "
                f"(option: topology)"
            )
    if config.kv_heads % tp_size and tp_size % config.kv_heads:
        raise ConfigError(
            f"TP{tp_size} cannot shard {config.model_dir}: {config.kv_heads} KV heads neither divide by {tp_size} "
            f"nor can be replicated evenly over {tp_size} ranks (option: topology)"
        )


def resolve_dtype(option: str, config: ModelConfig, device: str) -> str:
    """The compute and cache dtype for option ``dtype``: ``auto`` is the checkpoint's, but float32 on slow-bf16 CPUs.

    Without AMX, bf16 matrix products are slower than float32: about five times on a CPU with AVX2 alone, and with
    AVX512-BF16 (measured, 150M weights, 2 threads) prefill ran at 520 tokens/s against 890, and decoding at 39 against
    75, whose kernels read the same bf16 weights (see ``projection.py``).
    """
    if option != "auto":
        if option not in DTYPES:
            raise ConfigError(f"dtype {option!r} is not supported; allowed: auto, {', '.join(DTYPES)} (option: dtype)")
        return option
    if device == "cpu" and not cpu_has_fast_bf16():
        return "float32"
    return config.checkpoint_dtype if config.checkpoint_dtype in DTYPES else "bfloat16"


def cpu_has_fast_bf16() -> bool:
    """Whether this host's CPU multiplies bf16 matrices faster than float32 ones (AMX; Arm BF16)."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    flags = set(lines[0].split()) if lines else set()
    return bool(flags & {"amx_bf16", "bf16"})


def read_headers(directory: Path) -> dict[str, dict[str, Any]]:
    """Header of every ``*.safetensors`` file: file name → tensor name → {dtype, shape, data_offsets}."""
    files = sorted(directory.glob("*.safetensors"))
    return {file.name: _read_header(file) for file in files}


def _read_header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise ConfigError(f"{file} is not a safetensors file: it has only {len(prefix)} bytes")
            (size,) = struct.unpack("<Q", prefix)
            if size > HEADER_BYTES_MAX:
                raise ConfigError(f"{file} is not a safetensors file: its header claims {size} bytes")
            header = json.loads(stream.read(size))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} has a broken safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file} has a broken safetensors header: not an object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); option model must name a Hugging Face checkpoint directory"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return value


def _text_config(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    kind = raw.get("model_type", "")
    if kind == "qwen3_5_text":
        return raw
    if kind == "qwen3_5":
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError(f"{directory}/config.json: model_type qwen3_5 needs an object text_config")
        return text
    hint = "; mixture-of-experts models are not supported" if "moe" in str(kind) else ""
    raise ConfigError(
        f"{directory}/config.json: model_type {kind!r} is not supported; allowed: 'qwen3_5_text', 'qwen3_5'{hint}"
    )


def _refuse_unsupported(text: Mapping[str, Any], directory: Path) -> None:
    wanted: tuple[tuple[str, Any, Any], ...] = (
        ("hidden_act", "silu", "silu"),
        ("attention_bias", False, False),
        ("attn_output_gate", True, True),
        ("use_sliding_window", False, False),
        ("mtp_use_dedicated_embeddings", False, False),
    )
    for name, default, allowed in wanted:
        value = text.get(name, default)
        if value != allowed:
            raise ConfigError(f"{directory}/config.json: {name} {value!r} is not supported; allowed: {allowed!r}")
    if text.get("num_experts"):
        raise ConfigError(f"{directory}/config.json: num_experts {text['num_experts']}: MoE is not supported")
    if text.get("quantization_config"):
        raise ConfigError(f"{directory}/config.json: quantization_config: quantised checkpoints are not supported")
    ssm_dtype = text.get("mamba_ssm_dtype", "float32")
    if ssm_dtype != "float32":
        raise ConfigError(
            f"{directory}/config.json: mamba_ssm_dtype {ssm_dtype!r} is not supported; allowed: 'float32'"
        )


class _Fields:
    """Reads positive whole numbers and says which field of which file is missing or wrong."""

    def __init__(self, text: Mapping[str, Any], directory: Path) -> None:
        self._text = text
        self._directory = directory

    def count(self, name: str, default: int | None = None) -> int:
        value = self._text.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self._directory}/config.json: field {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self._directory}/config.json: {name} {value!r} is not a positive whole number")
        return value


def _layer_kinds(text: Mapping[str, Any], count: int, directory: Path) -> tuple[LayerKind, ...]:
    names = text.get("layer_types")
    if names is None:
        interval = text.get("full_attention_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"{directory}/config.json: full_attention_interval {interval!r} is not a positive number")
        names = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)]
    if not isinstance(names, list) or len(names) != count:
        raise ConfigError(f"{directory}/config.json: layer_types must list num_hidden_layers={count} layers")
    for name in names:
        if name not in _LAYER_KINDS:
            allowed = ", ".join(_LAYER_KINDS)
            raise ConfigError(f"{directory}/config.json: layer type {name!r} is not supported; allowed: {allowed}")
    return tuple(_LAYER_KINDS[name] for name in names)


def _rope(text: Mapping[str, Any], head_dim: int, directory: Path) -> tuple[float, int]:
    """(theta, rotated dims of a head). Text-only multi-axis rope equals plain rope, so its sections do not matter."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ConfigError(f"{directory}/config.json: rope_type {kind!r} is not supported; allowed: 'default'")
    theta = rope.get("rope_theta", text.get("rope_theta", 10_000.0))
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(
            f"{directory}/config.json: partial_rotary_factor {factor} of head_dim {head_dim} rotates {rotary_dim}; "
            f"an even number from 2 to {head_dim} is needed"
        )
    return float(theta), rotary_dim


def _draft_layers(text: Mapping[str, Any], headers: Mapping[str, Mapping[str, Any]], directory: Path) -> int:
    """How many MTP layers the weight files really hold: 0 or 1."""
    names = {name for header in headers.values() for name in header}
    if not any(name.startswith("mtp.") for name in names):
        return 0
    declared = text.get("mtp_num_hidden_layers", 1)
    if declared != 1 or any(name.startswith("mtp.layers.1.") for name in names):
        raise ConfigError(f"{directory}/config.json: mtp_num_hidden_layers {declared} is not supported; allowed: 1")
    return 1


def _checkpoint_dtype(text: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    for source in (text, raw):
        for name in ("dtype", "torch_dtype"):
            value = source.get(name)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return "float32"


def _eos_token_ids(directory: Path, text: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    sources = ([_read_json(generation)] if generation.exists() else []) + [dict(text), dict(raw)]
    for source in sources:
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(item) for item in value)
    return ()


def _check_groups(config: ModelConfig) -> None:
    for what, many, few in (
        ("attention heads and KV heads", config.attention_heads, config.kv_heads),
        ("linear value heads and linear key heads", config.linear_value_heads, config.linear_key_heads),
    ):
        if many % few:
            raise ConfigError(f"{config.model_dir}/config.json: {what} do not divide: {many} and {few}")


def _fingerprint(text: Mapping[str, Any], headers: Mapping[str, Mapping[str, Any]], directory: Path) -> str:
    """Names this checkpoint: configuration, tensor table and a sample of each file's bytes.

    The sample tells two trainings of the same architecture apart without reading the files whole.
    """
    ignored = ("transformers_version", "_name_or_path", "architectures")
    digest = hashlib.sha256()
    digest.update(json.dumps({k: v for k, v in text.items() if k not in ignored}, sort_keys=True).encode())
    for name in sorted(headers):
        digest.update(json.dumps([name, headers[name]], sort_keys=True).encode())
        file = directory / name
        size = file.stat().st_size
        with file.open("rb") as stream:
            for numerator in range(1, 8):
                stream.seek(size * numerator // 8)
                digest.update(stream.read(FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
