"""Fault plans: what can be written, and that what cannot be meant is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.runtime.fault_plan import (
    FaultPlan,
    FaultPlanError,
    MessageMatch,
    Point,
    Rule,
    load_plan,
    parse_line,
    parse_plan,
)

YAML = """
seed: 4
rules:
  - match: {type: ChunkArrived, sender: "p0.*", nth: 2}
    do: drop
  - at: {handled: FirstGeneration, node: d0.ctl}
    do: kill
  - at: {after_ms: 100, node: p0.ctl}
    do: partition
    between: [p0.ctl, "d*.ctl"]
    for_ms: 500
  - write: {operation: write, region: "d0.*"}
    do: slow
    ms: 5
"""

TOML = """
seed = 4
[[rules]]
do = "drop"
match = {type = "ChunkArrived", sender = "p0.*", nth = 2}
"""


def test_yaml_toml_and_one_line_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(YAML)
    (tmp_path / "plan.toml").write_text(TOML)
    from_yaml = load_plan(str(tmp_path / "plan.yaml"))
    expected = Rule(do="drop", match=MessageMatch(type="ChunkArrived", sender="p0.*", nth=2))
    assert from_yaml.seed == 4
    assert from_yaml.rules[0] == expected
    assert from_yaml.rules[1] == Rule(do="kill", at=Point(handled="FirstGeneration", node="d0.ctl"))
    assert from_yaml.rules[2].between == ("p0.ctl", "d*.ctl")
    assert load_plan(str(tmp_path / "plan.toml")).rules == (expected,)
    line = "seed=4; drop type=ChunkArrived sender=p0.* nth=2; kill handled=FirstGeneration node=d0.ctl"
    assert load_plan(line) == FaultPlan(seed=4, rules=from_yaml.rules[:2])


def test_write_rules_can_be_said_in_one_line() -> None:
    plan = parse_line("fail write nth=3; slow write region=d0.* ms=5; tear operation=read")
    assert [(rule.do, rule.write is not None) for rule in plan.rules] == [
        ("fail", True),
        ("slow", True),
        ("tear", True),
    ]


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"do": "drop"}, "exactly one of match, at, write"),
        ({"do": "kill", "match": {"type": "Stop"}}, "'kill' does not go with 'match'; allowed: drop"),
        ({"do": "drop", "match": {"type": "ChunkArived"}}, "did you mean ChunkArrived"),
        ({"do": "drop", "match": {"typ": "Stop"}}, "unknown field `typ`"),
        ({"do": "drop", "match": {"probability": 2}}, "not between 0 and 1"),
        ({"do": "drop", "match": {"nth": "two"}}, "Expected `int`"),
        ({"do": "delay", "match": {}, "ms": -1}, "cannot be negative"),
        ({"do": "kill", "at": {"node": "d0.ctl"}}, "exactly one of sent, handled, after_ms; found none"),
        ({"do": "partition", "at": {"after_ms": 1}}, "go together"),
        ({"do": "refuse", "match": {"type": "Stop"}}, "none of GrantLease"),
        ({"do": "reorder", "match": {"type": "Stop"}, "ms": 0}, "the least is above 0"),
        ({"do": "explode", "write": {}}, "allowed: fail, slow, tear"),
        ({"do": "stall", "at": {"handled": "Stop"}}, "needs for_ms"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_with_the_reason(rule: dict[str, object], reason: str) -> None:
    with pytest.raises(FaultPlanError) as refused:
        parse_plan({"rules": [rule]})
    assert reason in str(refused.value)


def test_an_unknown_fault_in_a_line_is_refused_with_those_there_are() -> None:
    with pytest.raises(FaultPlanError, match=r"'explode' is no fault; allowed: drop, .*, kill, .*, fail"):
        parse_line("explode handled=PullKVCache")


@pytest.mark.parametrize("text", ["drop nth", "drop type=Stop nth=x", "drop type=Stop probability=x", "seed=x"])
def test_a_line_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(FaultPlanError):
        parse_line(text)


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("rules: [")
    (tmp_path / "broken.toml").write_text("rules = ")
    for name in ("none.yaml", "broken.yaml", "broken.toml"):
        with pytest.raises(FaultPlanError, match=name):
            load_plan(str(tmp_path / name))
