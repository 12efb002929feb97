"""``kvferry bench accuracy`` in small: P2/D1 next to TP1 on twenty prompts and a page of text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scripts.bench_accuracy import run
from scripts.demo_prompts import accuracy_prompts, perplexity_text
from tests.e2e.conftest import OPTIONS


@pytest.mark.parametrize(("dtype", "close"), [("float32", 5e-5), ("bfloat16", 2e-3)])
def test_twenty_prompts_and_the_perplexity_of_a_text_are_equal_on_both_topologies(dtype: Any, close: float) -> None:
    options = msgspec.structs.replace(
        OPTIONS, topology="P2/D1", num_speculative_tokens=2, max_model_len=1024, dtype=dtype
    )
    result = run(options, "TP1", accuracy_prompts(20), 10, perplexity_text(1500))
    assert (result["topology"], result["against"], result["prompts"]) == ("P2/D1", "TP1", 20)
    assert result["equal_by_tie_rule"] == 20, result["differences"]
    assert result["equal"] + len(result["differences"]) == 20
    assert result["perplexity_tokens"] > 300
    assert result["perplexity"] == pytest.approx(result["perplexity_against"], rel=close)
    assert 1.0 < result["perplexity"] < 2048.0, "better than knowing nothing of 2,048 tokens"
