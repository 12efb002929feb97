"""A fault plan: what goes wrong in a run, as data. Read from YAML, TOML, one line of text, or built in a test.

A plan is a seed and rules. A rule says where it applies and what it does there:

``match`` — messages between nodes::

    - match: {type: ChunkArrived, sender: "p0.*", nth: 2}   # also: receiver, request, from_nth, times, probability …
      do: drop                                              # drop, delay, duplicate, reorder, corrupt, refuse
      ms: 50                                                # delay, duplicate: so late (else 20); reorder: the next
                                                            # message of the link passes it, or so late if none comes

``at`` — a point of the protocol, or a time after a node's start::

    - at: {handled: FirstGeneration, node: d0.ctl}          # or sent: …, or after_ms: …; also receiver, sender, nth …
      do: kill                                              # kill, hang, stall, slow, partition
      ms: 20                                                # kill: so much later; slow: per message
      for_ms: 3000                                          # hang, stall, slow, partition: how long (0: for good)
      between: ["p0.*", d0.ctl]                             # partition
      ways: both                                            # partition: both, or forward (first to second only)

``write`` — operations of the data plane::

    - write: {operation: write, region: "d0.*", nth: 3}     # write, read, copy or "*"
      do: fail                                              # fail, slow (by ms), tear (half of it arrives)

Names are patterns (``*`` and ``?``). Occurrences are counted per rule and process. As text, one rule per ``;``:
``drop type=ChunkArrived nth=2; kill handled=FirstGeneration node=d0.ctl; fail write nth=3``.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from messages.envelope import MESSAGE_TYPES

MESSAGE_ACTIONS = ("drop", "delay", "duplicate", "reorder", "corrupt", "refuse")
POINT_ACTIONS = ("kill", "hang", "stall", "slow", "partition")
WRITE_ACTIONS = ("fail", "slow", "tear")
DELAY_MS = 20.0
REFUSABLE = ("GrantLease", "ReserveLeases", "OpenReceive")
"""Requests for room that ``refuse`` answers with a refusal: staging is full, blocks are gone."""

_TYPE_NAMES = tuple(kind.__name__ for kind in MESSAGE_TYPES)


class FaultPlanError(ValueError):
    """A plan that cannot be meant; says which rule, the value seen and the values allowed."""


class Occurrence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the matching occurrences: the ``nth`` only (0: any), from ``from_nth`` on, at most ``times`` (0: no
    limit), each with ``probability``."""

    nth: int = 0
    from_nth: int = 1
    times: int = 0
    probability: float = 1.0


class MessageMatch(Occurrence, frozen=True, kw_only=True):
    """Messages between nodes. ``incarnation`` is that of the sender's life, 0 for all of them (each counts anew)."""

    type: str = "*"
    sender: str = "*"
    receiver: str = "*"
    request: str = "*"
    incarnation: int = 0


class Point(Occurrence, frozen=True, kw_only=True):
    """A message sent or handled at ``node``, or ``after_ms`` of its life. ``incarnation`` 0 means every life: the
    default is the first one only, so that a restarted node is not killed again."""

    sent: str = ""
    handled: str = ""
    after_ms: float = -1.0
    node: str = "*"
    sender: str = "*"
    receiver: str = "*"
    request: str = "*"
    incarnation: int = 1


class WriteMatch(Occurrence, frozen=True, kw_only=True):
    """Operations of the data plane, on the node where they run; ``region`` is what is written to."""

    operation: Literal["write", "read", "copy", "*"] = "*"
    region: str = "*"
    node: str = "*"


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault. Exactly one of ``match``, ``at`` and ``write`` is set."""

    do: str
    match: MessageMatch | None = None
    at: Point | None = None
    write: WriteMatch | None = None
    ms: float | None = None
    for_ms: float = 0.0
    between: tuple[str, str] | None = None
    ways: Literal["both", "forward"] = "both"

    @property
    def delay_ms(self) -> float:
        """``ms``, or what it is when it was left out."""
        return DELAY_MS if self.ms is None else self.ms


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked rules and the seed from which their probabilities are drawn."""

    rules: tuple[Rule, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for number, rule in enumerate(self.rules, 1):
            _check(number, rule)


def _refuse(number: int, why: str) -> FaultPlanError:
    return FaultPlanError(f"fault plan, rule {number}: {why}")


def _check(number: int, rule: Rule) -> None:
    given = [name for name in ("match", "at", "write") if getattr(rule, name) is not None]
    if len(given) != 1:
        raise _refuse(number, f"exactly one of match, at, write must be given; found {', '.join(given) or 'none'}")
    allowed = {"match": MESSAGE_ACTIONS, "at": POINT_ACTIONS, "write": WRITE_ACTIONS}[given[0]]
    if rule.do not in allowed:
        raise _refuse(number, f"do: {rule.do!r} does not go with {given[0]!r}; allowed: {', '.join(allowed)}")
    if rule.delay_ms < 0 or rule.for_ms < 0:
        raise _refuse(number, f"ms and for_ms cannot be negative (ms: {rule.ms}, for_ms: {rule.for_ms})")
    occurrence = rule.match or rule.at or rule.write
    assert occurrence is not None
    if not 0.0 <= occurrence.probability <= 1.0:
        raise _refuse(number, f"probability: {occurrence.probability} is not between 0 and 1")
    if occurrence.nth < 0 or occurrence.times < 0 or occurrence.from_nth < 1:
        raise _refuse(number, "nth and times count from 1 (0: any), from_nth from 1")
    if rule.match is not None:
        _check_type(number, rule.match.type)
        if rule.do == "reorder" and not rule.delay_ms:
            raise _refuse(number, "reorder with ms: 0 would wait for no other message to pass; the least is above 0")
        if rule.do == "refuse" and rule.match.type not in REFUSABLE:
            raise _refuse(
                number, f"refuse answers requests for room; type: {rule.match.type} is none of {', '.join(REFUSABLE)}"
            )
    if rule.at is not None:
        _check_point(number, rule, rule.at)
    elif rule.between is not None:
        raise _refuse(number, "between goes with do: partition only")


def _check_point(number: int, rule: Rule, at: Point) -> None:
    points = [name for name in ("sent", "handled") if getattr(at, name)] + (["after_ms"] if at.after_ms >= 0 else [])
    if len(points) != 1:
        raise _refuse(number, f"at needs exactly one of sent, handled, after_ms; found {', '.join(points) or 'none'}")
    if at.sent or at.handled:
        _check_type(number, at.sent or at.handled)
    if (rule.do == "partition") != (rule.between is not None):
        raise _refuse(number, "do: partition and between: [one, other] go together")
    if rule.do == "stall" and not rule.for_ms:
        raise _refuse(number, "do: stall needs for_ms (an actor stalled for good is do: hang)")


def _check_type(number: int, name: str) -> None:
    if any(character in name for character in "*?["):
        return
    if name not in _TYPE_NAMES:
        close = difflib.get_close_matches(name, _TYPE_NAMES, 3)
        raise _refuse(
            number, f"unknown message type {name!r}" + (f"; did you mean {' or '.join(close)}?" if close else "")
        )


def parse_plan(data: object) -> FaultPlan:
    """A plan from the plain data of a YAML or TOML document; raises ``FaultPlanError``."""
    if data is None:
        return FaultPlan()
    try:
        return msgspec.convert(data, FaultPlan)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, FaultPlanError):
            raise error.__cause__ from None
        raise FaultPlanError(f"fault plan: {error}") from error


def parse_line(text: str) -> FaultPlan:
    """A plan from one line: ``drop type=ChunkArrived nth=2; kill handled=FirstGeneration node=d0.ctl``."""
    rules: list[dict[str, Any]] = []
    seed = 0
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        verb, *words = part.split()
        if verb.startswith("seed="):
            seed = _number("seed", verb[5:])
            continue
        actions = (*MESSAGE_ACTIONS, *POINT_ACTIONS, *WRITE_ACTIONS)
        if verb not in actions:
            raise FaultPlanError(f"fault plan: {verb!r} is no fault; allowed: {', '.join(dict.fromkeys(actions))}")
        fields: dict[str, Any] = {}
        rule: dict[str, Any] = {"do": verb}
        where = "write" if "write" in words or verb in ("fail", "tear") else ""
        for word in words:
            if word == "write":
                continue
            key, equals, value = word.partition("=")
            if not equals:
                raise FaultPlanError(f"fault plan: {word!r} in {part!r} is not key=value")
            target = rule if key in ("ms", "for_ms", "between", "ways") else fields
            target[key] = _value(key, value)
        if not where:
            where = "at" if verb in POINT_ACTIONS else "match"
        rule[where] = fields
        rules.append(rule)
    return parse_plan({"seed": seed, "rules": rules})


def _value(key: str, value: str) -> Any:
    if key in ("nth", "from_nth", "times", "incarnation"):
        return _number(key, value)
    if key in ("ms", "for_ms", "probability", "after_ms"):
        try:
            return float(value)
        except ValueError:
            raise FaultPlanError(f"fault plan: {key}={value} is not a number") from None
    return value.split(",") if key == "between" else value


def _number(key: str, value: str) -> int:
    if not value.isdecimal():
        raise FaultPlanError(f"fault plan: {key}={value} is not a whole number")
    return int(value)


def load_plan(source: str) -> FaultPlan:
    """The plan that an option names: a ``.yaml``, ``.yml`` or ``.toml`` file, or a plan as one line of text."""
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".toml"):
        return parse_line(source)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FaultPlanError(f"fault plan {path}: {error}") from error
    try:
        return parse_plan(tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text))
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise FaultPlanError(f"fault plan {path}: {error}") from error
