"""Every logit against ``transformers``: TP 1, 2 and 4, chunked and whole, float32 within 1e-4 and bf16 roughly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from messages.requests import SamplingParams
from scripts.make_random_checkpoint import CheckpointSizes
from tests.worker.harness import TINY, LocalEngine, Reference, prompts_of, tiny_checkpoint

SHAPES = {
    "every layer attends": replace(TINY, full_attention_interval=1),
    "one key head serves four value heads": replace(
        TINY, linear_key_heads=2, linear_value_heads=8, linear_key_dim=24, linear_value_dim=16
    ),
    "one KV head, wide heads": replace(TINY, kv_heads=1, head_dim=48, linear_key_dim=32, linear_value_dim=32),
    "as many KV heads as heads, kernel 3": replace(TINY, kv_heads=4, conv_kernel=3, linear_value_heads=4),
}


def all_logprobs(engine: LocalEngine, prompt: list[int], chunk_tokens: int = 0) -> torch.Tensor:
    """Log-probabilities [T-1, V] of the whole vocabulary after each prompt token but the last."""
    vocab_size = engine.plan.config.vocab_size
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=vocab_size, ignore_eos=True)
    (result,) = engine.generate([prompt], sampling, chunk_tokens=chunk_tokens)
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(prompt)
    rows = torch.empty(len(prompt) - 1, vocab_size)
    for index, entry in enumerate(result.prompt_logprobs[1:]):
        assert entry is not None
        tokens, values = zip(*entry.top, strict=True)
        rows[index, list(tokens)] = torch.tensor(values)
    return rows


def assert_same(engine: LocalEngine, reference: Reference, prompt: list[int], chunk_tokens: int = 0) -> None:
    expected = torch.log_softmax(reference.logits(prompt)[:-1], -1)
    torch.testing.assert_close(all_logprobs(engine, prompt, chunk_tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_logits_equal_the_reference_whole_and_in_chunks(model_dir: Path, reference: Reference, tp_size: int) -> None:
    (prompt,) = prompts_of([150])
    with LocalEngine(model_dir, tp_size) as engine:
        for chunk_tokens in (0, 64, 13):
            assert_same(engine, reference, prompt, chunk_tokens)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_logits_equal_the_reference_for_other_shapes(tmp_path: Path, name: str) -> None:
    sizes: CheckpointSizes = SHAPES[name]
    folder = tiny_checkpoint(tmp_path / "c", sizes=sizes)
    reference = Reference(folder)
    (prompt,) = prompts_of([90])
    for tp_size in (1, 2):
        with LocalEngine(folder, tp_size) as engine:
            assert_same(engine, reference, prompt)
            assert_same(engine, reference, prompt, chunk_tokens=31)


def test_a_vocabulary_that_does_not_divide_by_the_ranks(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "c", sizes=replace(TINY, vocab_size=323))
    reference = Reference(folder)
    with LocalEngine(folder, 4) as engine:
        assert_same(engine, reference, prompts_of([40])[0])


def test_bf16_follows_the_bf16_reference_as_closely_as_its_precision_allows(model_dir: Path) -> None:
    from transformers import Qwen3_5ForCausalLM

    (prompt,) = prompts_of([60])
    exact = Reference(model_dir).logits(prompt)
    model = Qwen3_5ForCausalLM.from_pretrained(str(model_dir), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    wanted = torch.log_softmax(exact[:-1], -1)
    their_error = (torch.log_softmax(theirs[:-1], -1) - wanted).abs().mean()
    with LocalEngine(model_dir, 2, dtype="bfloat16") as engine:
        our_error = (all_logprobs(engine, prompt) - wanted).abs().mean()
    assert our_error < 1.5 * their_error
