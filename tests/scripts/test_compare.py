"""The tie rule: what counts as equal depends on how finely the outputs' type tells two logits apart."""

from __future__ import annotations

import pytest

from actors.runtime.config import Options
from scripts.compare import TIE_TOLERANCES, equal_by_tie_rule, tie_tolerance


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_tolerance_is_that_of_the_type_that_this_host_computes_the_model_in(
    monkeypatch: pytest.MonkeyPatch, fast: bool, dtype: str
) -> None:
    monkeypatch.setattr("actors.worker.model.config.cpu_has_fast_bf16", lambda: fast)
    assert tie_tolerance(Options(model="demo")) == TIE_TOLERANCES[dtype]
    assert tie_tolerance(Options(model="demo", dtype="float32")) == TIE_TOLERANCES["float32"]


def test_a_first_difference_is_a_tie_only_within_the_tolerance() -> None:
    reference, other, gaps = [1, 2, 3], [1, 4, 3], [0.5, 0.03125, 0.5]
    assert not equal_by_tie_rule(reference, other, gaps)
    assert equal_by_tie_rule(reference, other, gaps, TIE_TOLERANCES["bfloat16"])
    assert not equal_by_tie_rule(reference, other[:1], gaps, 0.01)
