"""What people write as a topology, and what they are told when it cannot be."""

from __future__ import annotations

import pytest

from actors.runtime.config import ConfigError
from actors.supervisor.topology import parse_topology


def anything_goes(tp_size: int) -> None:
    """A model of which every head count divides by everything."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TP2", [("m0", "MIX", 2)]),
        ("TP1x2", [("m0", "MIX", 1), ("m1", "MIX", 1)]),
        ("P2/D1", [("p0", "PREFILL", 2), ("d0", "DECODE", 1)]),
        ("P2x2/D2", [("p0", "PREFILL", 2), ("p1", "PREFILL", 2), ("d0", "DECODE", 2)]),
        ("P1/D2", [("p0", "PREFILL", 1), ("d0", "DECODE", 2)]),
        ("P4/D1x2", [("p0", "PREFILL", 4), ("d0", "DECODE", 1), ("d1", "DECODE", 1)]),
        ("D1/P2/D2", [("d0", "DECODE", 1), ("p0", "PREFILL", 2), ("d1", "DECODE", 2)]),
        (" p2 / d1 ", [("p0", "PREFILL", 2), ("d0", "DECODE", 1)]),
    ],
)
def test_topology_text_names_instances_in_order(text: str, expected: list[tuple[str, str, int]]) -> None:
    topology = parse_topology(text, anything_goes)
    assert [(plan.name, plan.role, plan.tp_size) for plan in topology.instances] == expected
    assert topology.rank_count == sum(tp_size for _, _, tp_size in expected)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not a group"),
        ("P2/", "is not a group"),
        ("P/D1", "is not a group"),
        ("P2,D1", "is not a group"),
        ("X2", "is not a group"),
        ("P-1/D1", "is not a group"),
        ("P2", "no DECODE one"),
        ("D1", "no PREFILL one"),
        ("TP2/D1", "mixes TP instances"),
        ("P0/D1", "from 1 to 256"),
        ("P2x0/D1", "from 1 to 256"),
        ("P2/D1x300", "from 1 to 256"),
        ("P128x2/D1", "257 ranks; at most 256"),
    ],
)
def test_impossible_topology_is_refused_with_the_reason_and_the_option(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refusal:
        parse_topology(text, anything_goes)
    assert "option: topology" in str(refusal.value)


def test_topology_that_the_heads_do_not_allow_is_refused_with_the_models_reason() -> None:
    def only_powers_of_two(tp_size: int) -> None:
        if tp_size & (tp_size - 1):
            raise ConfigError(f"TP{tp_size} cannot shard it: 4 heads do not divide by {tp_size}")

    parse_topology("P4/D2", only_powers_of_two)
    with pytest.raises(ConfigError, match="4 heads do not divide by 3"):
        parse_topology("P2/D3", only_powers_of_two)
