"""The checkpoint's tokenizer does what transformers does, without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.gateway.chat_template import ChatTemplate, ChatTemplateError
from actors.gateway.tokenizer import CheckpointTokenizer
from actors.runtime.config import ConfigError
from tests.gateway.checkpoint import TEMPLATE, write_checkpoint

TEXTS = ["", "def hello(name):", "héllo 你好 👋🏽!", "<|im_start|>user\nhi<|im_end|>\n", " two  spaces\t\n", "a b é"]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "héllo <b>'q'</b>"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> CheckpointTokenizer:
    return CheckpointTokenizer(directory)


def test_tokens_and_text_equal_those_of_transformers(directory: Path, tokenizer: CheckpointTokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(str(directory))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert list(ids) == reference(text)["input_ids"]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"add_generation_prompt": False},
        {"enable_thinking": False},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "<é>"}}]},
    ],
)
def test_chats_are_rendered_as_transformers_renders_them(
    directory: Path, tokenizer: CheckpointTokenizer, variables: dict[str, object]
) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(str(directory))
    wanted = reference.apply_chat_template(MESSAGES, tokenize=False, **({"add_generation_prompt": True} | variables))
    assert tokenizer.render_chat(MESSAGES, **variables) == wanted


def test_end_tokens_come_from_the_generation_config_then_the_model_then_the_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert CheckpointTokenizer(tmp_path).eos_token_ids == (2, 0)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 0}}))
    assert CheckpointTokenizer(tmp_path).eos_token_ids == (0,)
    (tmp_path / "config.json").unlink()
    assert CheckpointTokenizer(tmp_path).eos_token_ids == (2,)


def test_the_model_s_limit_and_recommended_sampling_are_read(tokenizer: CheckpointTokenizer) -> None:
    assert tokenizer.max_model_len == 64
    assert tokenizer.sampling_defaults == {"top_k": 20}


def test_a_template_in_a_file_of_its_own_wins_and_named_templates_mean_the_default_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    settings = {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert CheckpointTokenizer(tmp_path).render_chat(MESSAGES) == "named"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[1].role }}")
    assert CheckpointTokenizer(tmp_path).render_chat(MESSAGES) == "file user"


def test_a_checkpoint_without_a_template_refuses_chats_and_says_what_to_use(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        CheckpointTokenizer(tmp_path).render_chat(MESSAGES)


def test_a_template_s_own_refusal_reaches_the_client(tokenizer: CheckpointTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="unknown role robot"):
        tokenizer.render_chat([{"role": "robot", "content": "x"}])


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(ChatTemplateError):
        template.render([])


def test_a_template_may_mark_generated_text_and_know_the_date() -> None:
    from datetime import datetime

    source = (
        "{{ strftime_now('%Y') }} {% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    template = ChatTemplate(source, {}, clock=lambda: datetime(2031, 1, 1))
    assert template.render([{"role": "assistant", "content": "x"}]) == "2031 x"


def test_a_template_that_does_not_compile_is_refused_with_the_reason() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(TEMPLATE + "{% if %}", {})


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        CheckpointTokenizer(tmp_path)
