"""A checkpoint's configuration: what is read, and what is refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from actors.runtime.config import ConfigError
from actors.worker.model.config import check_tp, load_config, resolve_dtype
from actors.worker.settings import WorkerSettings, plan_rank
from tests.worker.harness import TINY, tiny_checkpoint


def edited(model_dir: Path, target: Path, changes: dict[str, Any], drop: tuple[str, ...] = ()) -> Path:
    """A copy of the checkpoint (weights linked) with its config.json changed."""
    target.mkdir()
    raw = json.loads((model_dir / "config.json").read_text())
    raw.update(changes)
    for name in drop:
        raw.pop(name, None)
    (target / "config.json").write_text(json.dumps(raw))
    (target / "model.safetensors").symlink_to(model_dir / "model.safetensors")
    return target


def test_a_text_checkpoint_is_read_with_every_size(model_dir: Path) -> None:
    config = load_config(model_dir)
    assert config.layer_kinds == ("delta", "delta", "delta", "attention")
    assert (config.attention_heads, config.kv_heads, config.head_dim, config.rotary_dim) == (4, 2, 32, 8)
    assert (config.linear_key_dim, config.linear_value_dim, config.conv_kernel) == (16, 24, 4)
    assert config.draft_layers == 1 and config.tied_embeddings
    assert config.eos_token_ids == (258, 256)
    geometry = config.geometry(dtype="float32")
    assert geometry.cache_dtype == "float32" and geometry.max_model_len == TINY.max_model_len


def test_a_multimodal_checkpoint_is_read_through_its_text_config(model_dir: Path, tmp_path: Path) -> None:
    wrapped = tiny_checkpoint(tmp_path / "wrapped", prefix="model.language_model.")
    plain = load_config(model_dir)
    assert load_config(wrapped).geometry(dtype="float32").layer_kinds == plain.layer_kinds
    assert load_config(wrapped).draft_layers == 1


def test_layer_kinds_follow_the_interval_when_they_are_not_listed(model_dir: Path, tmp_path: Path) -> None:
    folder = edited(model_dir, tmp_path / "c", {"full_attention_interval": 2}, drop=("layer_types",))
    assert load_config(folder).layer_kinds == ("delta", "attention", "delta", "attention")


@pytest.mark.parametrize(
    ("changes", "drop", "text"),
    [
        ({"model_type": "qwen3_5_moe"}, (), "mixture-of-experts"),
        ({"model_type": "llama"}, (), "llama"),
        ({"num_experts": 8}, (), "MoE"),
        ({}, ("hidden_size",), "hidden_size is missing"),
        ({"hidden_size": -1}, (), "not a positive whole number"),
        ({"hidden_act": "gelu"}, (), "hidden_act"),
        ({"attention_bias": True}, (), "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, (), "rope_type 'yarn'"),
        ({"layer_types": ["full_attention"]}, (), "layer_types must list"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, (), "'mamba'"),
        ({"quantization_config": {"bits": 4}}, (), "quantised"),
        ({"num_key_value_heads": 3}, (), "do not divide"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any], drop: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(edited(model_dir, tmp_path / "c", changes, drop))


def test_a_directory_that_is_no_checkpoint_is_refused_with_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="option model"):
        load_config(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"abc", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 4) + b"nope"])
def test_a_broken_weight_file_is_named(model_dir: Path, tmp_path: Path, content: bytes) -> None:
    folder = edited(model_dir, tmp_path / "c", {})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_config(folder)


def test_tp_sizes_are_checked_with_the_heads_that_do_not_divide(model_dir: Path) -> None:
    config = load_config(model_dir)
    for tp_size in (1, 2, 4):
        check_tp(config, tp_size)
    with pytest.raises(ConfigError, match="4 attention heads do not divide by 3"):
        check_tp(config, 3)
    with pytest.raises(ConfigError, match="attention heads"):
        check_tp(config, 8)


def test_two_trainings_of_one_architecture_have_different_fingerprints(model_dir: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    same = tiny_checkpoint(tmp_path / "same")
    assert load_config(other).fingerprint != load_config(model_dir).fingerprint
    assert load_config(same).fingerprint == load_config(model_dir).fingerprint


def test_auto_dtype_is_float32_where_bf16_is_slow(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(model_dir)
    monkeypatch.setattr("actors.worker.model.config.cpu_has_fast_bf16", lambda: False)
    assert resolve_dtype("auto", config, "cpu") == "float32"
    assert resolve_dtype("bfloat16", config, "cpu") == "bfloat16"
    with pytest.raises(ConfigError, match="dtype 'int8'"):
        resolve_dtype("int8", config, "cpu")


def test_speculation_without_a_draft_head_and_too_much_of_it_are_refused(model_dir: Path, tmp_path: Path) -> None:
    bare = tiny_checkpoint(tmp_path / "bare", with_draft=False)
    with pytest.raises(ConfigError, match="MTP weights"):
        plan_rank(WorkerSettings(model_dir=str(bare), speculative_tokens=1))
    with pytest.raises(ConfigError, match="allowed: 0 to 8"):
        plan_rank(WorkerSettings(model_dir=str(model_dir), speculative_tokens=9))


def test_a_model_length_beyond_the_checkpoint_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 9999"):
        plan_rank(WorkerSettings(model_dir=str(model_dir), max_model_len=9999))
