"""The checkpoint that comes with the package is what the rest of the tests and the demo take it for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer

from actors.runtime.config import ConfigError
from actors.worker.model.config import check_tp, load_config
from scripts.demo_corpus import TURN_END, conversation
from scripts.demo_prompts import DEMO_PROMPTS
from scripts.models import DEMO_MODEL_DIR, resolve_model


def test_demo_is_the_shipped_directory_and_small_enough_to_ship() -> None:
    folder = resolve_model("demo")
    assert folder == DEMO_MODEL_DIR.resolve()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12_000_000


def test_demo_model_shards_over_one_two_and_four_ranks_and_replicates_kv_heads() -> None:
    config = load_config(resolve_model("demo"))
    for tp_size in (1, 2, 4):
        check_tp(config, tp_size)
    with pytest.raises(ConfigError, match="do not divide by 3"):
        check_tp(config, 3)
    assert config.kv_heads == 2


def test_no_two_dimensions_of_the_delta_net_are_equal_so_that_nothing_can_mix_them_up() -> None:
    config = json.loads((resolve_model("demo") / "config.json").read_text())
    assert config["linear_key_head_dim"] != config["linear_value_head_dim"]
    assert config["linear_num_value_heads"] > config["linear_num_key_heads"]
    assert config["mtp_num_hidden_layers"] == 1


def test_chat_template_renders_exactly_what_the_model_was_trained_on() -> None:
    folder = resolve_model("demo")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": "Hello!"}]
    rendered = Environment().from_string(template).render(messages=messages, add_generation_prompt=True)
    assert rendered + f"Hi.{TURN_END}\n" == conversation("Hello!", "Hi.")


def test_generation_ends_at_the_end_of_a_turn_and_of_a_text() -> None:
    folder = resolve_model("demo")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert [tokenizer.id_to_token(token) for token in ends] == [TURN_END, "<|endoftext|>"]


def test_demo_prompts_are_sixty_different_texts_that_survive_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model("demo") / "tokenizer.json"))
    assert len(set(DEMO_PROMPTS)) == len(DEMO_PROMPTS) == 60
    for prompt in DEMO_PROMPTS:
        assert tokenizer.decode(tokenizer.encode(prompt).ids, skip_special_tokens=False) == prompt


def test_directory_that_is_no_checkpoint_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks \['tokenizer.json', '\*.safetensors'\]"):
        resolve_model(str(tmp_path))
