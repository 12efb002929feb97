"""The compiled kernels compute what the torch path computes, and everything runs without them."""

from __future__ import annotations

import ctypes
import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.worker.model import kernels
from actors.worker.model.projection import Projection, narrowed
from messages.requests import SamplingParams
from tests.worker.harness import TINY, LocalEngine, Reference, prompts_of, tiny_checkpoint

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LENGTHS = (1, 5, 17, 40, 70)
SHAPES = {
    "as the tests' model": TINY,
    "no size a multiple of the vector's": replace(
        TINY, hidden_size=52, intermediate_size=90, head_dim=24, linear_key_dim=12, linear_value_dim=20, vocab_size=317
    ),
    "one KV head, one key head": replace(TINY, kv_heads=1, linear_key_heads=1, linear_value_heads=2),
    "a long convolution": replace(TINY, conv_kernel=6),
}


builds_here = sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which("cc") is not None
built = pytest.mark.skipif(not builds_here, reason="no C compiler for x86-64 Linux: the kernels are optional")


@pytest.fixture
def library() -> ctypes.CDLL:
    """The kernels, which must be there."""
    found = kernels.library()
    assert found is not None, "the kernels are not built: pip install -e . (or python setup.py build_ext --inplace)"
    return found


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "library", lambda: None)


@built
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_product_equals_torch_for_any_number_of_rows_and_any_sizes(library: ctypes.CDLL, threads: int) -> None:
    torch.set_num_threads(threads)
    for tokens in (*range(1, 18), 32, kernels.TOKENS_MAX):
        for inputs, outputs in ((1, 1), (7, 5), (16, 4), (33, 130), (512, 66)):
            x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
            ours = kernels.linear(library, x, weight)
            torch.testing.assert_close(ours, x @ weight.t(), atol=1e-4, rtol=1e-5)


@built
@pytest.mark.parametrize("threads", [1, 2])
def test_a_bfloat16_weight_gives_what_the_same_numbers_in_float32_give(library: ctypes.CDLL, threads: int) -> None:
    torch.set_num_threads(threads)
    for tokens in (1, 2, 3, 8, kernels.TOKENS_MAX):
        for inputs, outputs in ((1, 1), (7, 5), (33, 130), (512, 66)):
            x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs).bfloat16()
            wide = kernels.linear(library, x, weight.float())
            torch.testing.assert_close(kernels.linear(library, x, weight), wide, atol=2e-5, rtol=2e-6)


def test_a_weight_is_kept_in_bfloat16_only_if_that_loses_nothing() -> None:
    weight = torch.randn(8, 16)
    assert narrowed(weight) is weight
    exact = weight.bfloat16().float()
    assert narrowed(exact).dtype == torch.bfloat16 and torch.equal(narrowed(exact).float(), exact)
    exact[3, 3] = float("inf")
    assert torch.equal(narrowed(exact).float(), exact)


@built
def test_more_rows_than_the_kernels_are_for_take_a_kept_bfloat16_weight_too() -> None:
    weight, x = torch.randn(24, 40).bfloat16().float(), torch.randn(kernels.TOKENS_MAX + 1, 40)
    for two_layouts in (True, False):
        projection = Projection(weight, two_layouts=two_layouts)
        assert projection.plain is not None and projection.plain.dtype == torch.bfloat16
        torch.testing.assert_close(projection(x), x @ weight.t(), atol=1e-4, rtol=1e-5)


@built
def test_a_value_that_is_not_finite_shows_in_its_own_row_only(library: ctypes.CDLL) -> None:
    x, weight = torch.randn(8, 40), torch.randn(24, 40)
    x[3, 7] = float("nan")
    product = kernels.linear(library, x, weight)
    assert torch.isnan(product[3]).all() and torch.isfinite(product[[0, 1, 2, 4, 5, 6, 7]]).all()


@pytest.mark.parametrize("shape", [(3, 5), (1024, 512), (1025, 1027)])
def test_a_weight_in_huge_pages_is_the_same_weight(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape[1], shape[0]).t()  # not contiguous
    copy = kernels.in_huge_pages(weight)
    assert torch.equal(copy, weight) and copy.is_contiguous()
    weight.zero_()
    assert copy.abs().sum() > 0, "the copy shares the original's memory"


def _run(model_dir: Path, tp_size: int, depth: int) -> tuple[list[list[int]], list[torch.Tensor], int]:
    """Tokens, every rank's caches, and how many drafts were accepted."""
    with LocalEngine(model_dir, tp_size, speculative_tokens=depth) as engine:
        results = engine.generate(prompts_of(LENGTHS, 300), GREEDY, arrivals=(0, 0, 0, 2, 3))
        regions = [torch.frombuffer(region, dtype=torch.float32).clone() for region in engine.regions]
        return [result.token_ids for result in results], regions, sum(result.accepted for result in results)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_tokens_and_caches_equal_the_torch_path(
    library: ctypes.CDLL,
    shape: str,
    tp_size: int,
    depth: int,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``dtype`` is the checkpoint's; both compute in float32."""
    if tp_size == 2 and SHAPES[shape].linear_key_heads == 1:
        tp_size = 1
    model_dir = tiny_checkpoint(tmp_path / "model", sizes=SHAPES[shape], dtype=dtype)
    tokens, caches, accepted = _run(model_dir, tp_size, depth)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "library", lambda: None)
        plain_tokens, plain_caches, plain_accepted = _run(model_dir, tp_size, depth)
    assert tokens == plain_tokens
    assert accepted == plain_accepted
    for ours, theirs in zip(caches, plain_caches, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("depth", [0, 3])
def test_without_the_kernels_tokens_equal_the_reference(
    model_dir: Path, reference: Reference, without_kernels: None, depth: int
) -> None:
    prompts = prompts_of(LENGTHS)
    with LocalEngine(model_dir, 2, speculative_tokens=depth) as engine:
        for prompt, result in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            reference.assert_greedy(prompt, result.token_ids)
