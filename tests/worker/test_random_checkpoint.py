"""The random checkpoint and the benchmark that uses it: real files, and ratios of what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.runtime.config import ConfigError
from actors.worker.model.config import load_config
from scripts.bench_generate import run
from scripts.make_random_checkpoint import main
from tests.worker.harness import tiny_checkpoint


def test_its_tokenizer_encodes_any_text_and_loses_nothing(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    text = 'naïve "日本語"\n\ttab \x00 🦀'
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_one_seed_is_one_checkpoint_in_any_dtype(tmp_path: Path) -> None:
    first = load_file(str(tiny_checkpoint(tmp_path / "a", seed=4) / "model.safetensors"))
    again = load_file(str(tiny_checkpoint(tmp_path / "b", seed=4, dtype=torch.bfloat16) / "model.safetensors"))
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor.bfloat16(), again[name]) for name, tensor in first.items())


def test_the_command_writes_a_checkpoint_of_the_sizes_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"make --out {tmp_path / 'm'} --hidden 32 --layers 4 --vocab 300 --heads 2 --kv-heads 1 --head-dim 16"
    monkeypatch.setattr("sys.argv", arguments.split())
    main()
    config = load_config(tmp_path / "m")
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 96, 300)
    assert "M parameters" in capsys.readouterr().out


@pytest.mark.parametrize("speculative_tokens", [0, 2])
def test_the_generation_benchmark_compares_both_sides_on_the_same_tokens(
    model_dir: Path, speculative_tokens: int
) -> None:
    report = run(
        str(model_dir),
        prompt_tokens=20,
        output_tokens=6,
        sequences=2,
        threads=1,
        repeats=1,
        speculative_tokens=speculative_tokens,
        in_process=True,
    )
    assert report["equal_sequences"] == 2
    for name in ("prefill_ratio", "decode_alone_ratio", "decode_batch_ratio", "their_decode_alone_tokens_per_s"):
        assert report[name] > 0.0


def test_what_cannot_be_measured_in_one_process_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="topology 'P2/D1'"):
        run(str(model_dir), "P2/D1", in_process=True)
    with pytest.raises(ConfigError, match="against 'vllm'"):
        run(str(model_dir), against="vllm")
