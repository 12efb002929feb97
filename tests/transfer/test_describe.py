"""``kvferry plan``: what people and scripts read."""

from __future__ import annotations

import json

import pytest

from actors.runtime.config import ConfigError
from scripts.plan import describe, render, size_text


def test_the_reference_geometry_moves_the_documented_bytes() -> None:
    plan = describe(
        model="qwen3.5-2b", source="TP2", target="TP1", prompt_tokens=18592, block_size=128, num_speculative_tokens=3
    )
    by_role: dict[str, int] = {}
    for row in plan["routes"]:
        name = f"{row['namespace']}.{row['role']}"
        by_role[name] = by_role.get(name, 0) + row["bytes_per_request"]
    assert by_role["target.KEY"] + by_role["target.VALUE"] == 228_458_496
    assert by_role["target.SSM"] == 18_874_368
    assert by_role["target.CONV"] == 663_552
    assert by_role["draft.KEY"] + by_role["draft.VALUE"] == 38_076_416
    assert plan["bytes_per_request"] == sum(by_role.values())
    assert plan["bytes_per_token"] == 14_336
    assert json.loads(json.dumps(plan)) == plan


def test_the_table_names_ranks_roles_slices_and_how() -> None:
    text = render(describe(model="tiny", source="TP4", target="TP1", num_speculative_tokens=1))
    lines = text.splitlines()
    key = next(line for line in lines if "← P2" in line and "target KEY" in line)
    assert "kv_heads[1:2]→1" in key and "staged" in key
    assert not any("← P1" in line and "KEY" in line for line in lines), "one replica of each head is enough"
    assert any("← P1" in line and "SSM" in line and "in place" in line for line in lines)
    assert "windows of" in lines[-1]


def test_equal_sizes_are_in_place_throughout() -> None:
    plan = describe(model="tiny", source="TP2", target="2")
    assert all(row["in_place"] for row in plan["routes"]) and plan["staging_windows"] == []
    assert "no staging" in render(plan)


def test_the_demo_model_can_be_planned_without_loading_it() -> None:
    plan = describe(model="demo", source="TP4", target="TP2")
    assert {row["target_rank"] for row in plan["routes"]} == {0, 1}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"source": "TP3"}, "do not divide by 3"),
        ({"source": "zwei"}, "not a tensor-parallel size"),
        ({"source": "TP2", "prompt_tokens": 0}, "at least 1 token"),
        ({"source": "TP2", "model": "/no/such/model"}, "no such directory"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        describe(**{"model": "tiny", "target": "TP1", **values})  # type: ignore[arg-type]


def test_sizes_are_written_for_people() -> None:
    assert [size_text(n) for n in (12, 1500, 2_500_000, 3_000_000_000)] == ["12 B", "1.5 kB", "2.5 MB", "3.00 GB"]
