"""What a person writes as a topology, read into instances: pure text, no processes.

One group of instances per ``/``: ``P2x2/D2`` is two prefill instances of two ranks each and one decode instance of two
ranks. ``TP2`` is a mixed instance, which prefills and decodes.

    topology  = group *( "/" group )
    group     = ( "TP" | "P" | "D" ) tp_size [ "x" instances ]
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from actors.runtime.config import ConfigError

Role = Literal["MIX", "PREFILL", "DECODE"]
CheckTp = Callable[[int], None]
"""Raises ``ConfigError`` with the reason when the model cannot be sharded over that many ranks."""

RANKS_MAX = 256
"""Of one topology, on one host. Far above what makes sense; it catches a slip of the finger before it forks."""

_GROUP = re.compile(r"(TP|P|D)(\d+)(?:x(\d+))?", re.IGNORECASE)
_ROLES: dict[str, tuple[Role, str]] = {"TP": ("MIX", "m"), "P": ("PREFILL", "p"), "D": ("DECODE", "d")}


@dataclass(frozen=True)
class InstancePlan:
    """One instance to start: ``p0``, PREFILL, over two ranks."""

    name: str
    role: Role
    tp_size: int


@dataclass(frozen=True)
class Topology:
    """What was written, and the instances it means, in the order written."""

    text: str
    instances: tuple[InstancePlan, ...]

    @property
    def rank_count(self) -> int:
        """Rank processes of all instances."""
        return sum(instance.tp_size for instance in self.instances)

    def describe(self) -> str:
        """For people: ``P2/D1 (p0 PREFILL TP2, d0 DECODE TP1)``."""
        parts = ", ".join(f"{plan.name} {plan.role} TP{plan.tp_size}" for plan in self.instances)
        return f"{self.text} ({parts})"


def parse_topology(text: str, check_tp: CheckTp) -> Topology:
    """Read ``text`` and check it against the model. Raises ``ConfigError`` that says what to write instead."""
    counts: dict[Role, int] = {}
    instances: list[InstancePlan] = []
    for group in text.strip().split("/"):
        role, letter, tp_size, copies = _parse_group(text, group)
        for _ in range(copies):
            index = counts.get(role, 0)
            counts[role] = index + 1
            instances.append(InstancePlan(name=f"{letter}{index}", role=role, tp_size=tp_size))
    _check_roles(text, counts)
    topology = Topology(text=text.strip(), instances=tuple(instances))
    if topology.rank_count > RANKS_MAX:
        raise ConfigError(f"topology {text!r} has {topology.rank_count} ranks; at most {RANKS_MAX} (option: topology)")
    for tp_size in sorted({plan.tp_size for plan in instances}):
        check_tp(tp_size)
    return topology


def _parse_group(text: str, group: str) -> tuple[Role, str, int, int]:
    match = _GROUP.fullmatch(group.strip())
    if match is None:
        raise ConfigError(
            f"topology {text!r}: {group!r} is not a group of instances. Write TP2 for one that does both, or P2/D1 for "
            "prefill on two ranks and decode on one; P2x3 for three such instances (option: topology)"
        )
    tp_size, copies = int(match[2]), int(match[3] or 1)
    if not 1 <= tp_size <= RANKS_MAX or not 1 <= copies <= RANKS_MAX:
        raise ConfigError(
            f"topology {text!r}: {group!r} asks for {copies} instances of {tp_size} ranks; each number must be "
            f"from 1 to {RANKS_MAX} (option: topology)"
        )
    role, letter = _ROLES[match[1].upper()]
    return role, letter, tp_size, copies


def _check_roles(text: str, counts: dict[Role, int]) -> None:
    if "MIX" in counts and len(counts) > 1:
        raise ConfigError(
            f"topology {text!r} mixes TP instances, which do both phases, with P or D ones; write either "
            "TP… groups or P… and D… groups (option: topology)"
        )
    for present, absent, letter in (("PREFILL", "DECODE", "D"), ("DECODE", "PREFILL", "P")):
        if present in counts and absent not in counts:
            raise ConfigError(
                f"topology {text!r} has {present} instances but no {absent} one, so no request could finish; add a "
                f"group such as {letter}1 (option: topology)"
            )
