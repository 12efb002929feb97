"""Carries out a fault plan: one injector per node decides about every envelope, protocol point and write.

The same injector runs in real nodes (``make_injector``) and in simulated ones; only its ``Actions`` differ: what it
means to kill, stop or delay. A rule's chance comes from the plan's seed, the node's name and life and the rule's
number, so a plan does the same wherever threads happen to run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from random import Random
from typing import Protocol

from actors.runtime.config import ConfigError, NodeConfig
from actors.runtime.fault_plan import FaultPlan, FaultPlanError, Occurrence, Point, Rule, load_plan
from actors.runtime.hooks import Delivery, Injector, NoInjector
from messages.base import Message, node_of
from messages.envelope import Envelope
from messages.transfer import (
    GrantLease,
    LeaseRefused,
    LeasesRefused,
    OpenReceive,
    ReceiveRefused,
    ReserveLeases,
)
from transport.dataplane import DataPlaneError


class TornWrite(DataPlaneError):
    """A write that broke off in the middle: the first ``fraction`` of its bytes arrived."""

    def __init__(self, reason: str, fraction: float = 0.5) -> None:
        super().__init__(reason)
        self.fraction = fraction


class Actions(Protocol):
    """What a fault does to the node it strikes."""

    def kill(self) -> None:
        """End this node at once."""
        ...

    def hang(self, for_ms: float) -> None:
        """Stop this node's process; 0: for good."""
        ...

    def pause(self, ms: float) -> None:
        """Delay the calling actor or data-plane operation."""
        ...

    def later(self, delay_ms: float, function: Callable[[], None]) -> None:
        """Call ``function`` after ``delay_ms`` of this node's life."""
        ...


FaultRecorder = Callable[[int, Envelope | None, str], None]


def matcher(pattern: str) -> Callable[[str], bool] | None:
    """Whether a name matches ``pattern``; None when every one does."""
    if pattern == "*":
        return None
    if any(character in pattern for character in "*?["):
        return lambda name: fnmatchcase(name, pattern)
    return pattern.__eq__


class _Armed:
    """A rule with its counters."""

    def __init__(self, number: int, rule: Rule, seed: str) -> None:
        self.rule = rule
        self.text = f"rule {number}: {rule.do}"
        where: Occurrence | None = rule.match or rule.at or rule.write
        assert where is not None
        self._where = where
        self._chance = Random(seed).random if where.probability < 1.0 else lambda: 0.0
        self._seen = 0
        self._struck = 0
        names = {"sender": "*", "receiver": "*", "request": "*"}
        for name in names:
            names[name] = getattr(where, name, "*")
        self._sender = matcher(names["sender"])
        self._receiver = matcher(names["receiver"])
        self._request = matcher(names["request"])

    def matches(self, envelope: Envelope) -> bool:
        """Whether sender, receiver and request are the rule's (its type was looked up before)."""
        return (
            (self._sender is None or self._sender(envelope.sender))
            and (self._receiver is None or self._receiver(envelope.to))
            and (self._request is None or self._request(envelope.trace_id))
        )

    def strikes(self) -> bool:
        """Count one matching occurrence; whether the fault happens at this one."""
        where = self._where
        self._seen += 1
        if where.nth and self._seen != where.nth:
            return False
        if self._seen < where.from_nth or (where.times and self._struck >= where.times):
            return False
        if self._chance() >= where.probability:
            return False
        self._struck += 1
        return True


class NodeInjector:
    """The faults of one node's life. Any thread; decisions are made under one lock, pauses outside it."""

    def __init__(
        self, plan: FaultPlan, node: str, incarnation: int, actions: Actions, record: FaultRecorder | None = None
    ) -> None:
        self._node = node
        self._actions = actions
        self._record = record
        self._lock = threading.Lock()
        self._cut: list[Callable[[str], bool]] = []  # nodes that we do not reach
        self._slow_ms = 0.0
        self._messages: list[tuple[str, _Armed]] = []
        self._points: dict[str, list[tuple[str, _Armed]]] = {"sent": [], "handled": []}
        self._writes: list[_Armed] = []
        self._by_type: dict[tuple[str, str], tuple[_Armed, ...]] = {}
        for number, rule in enumerate(plan.rules, 1):
            armed = _Armed(number, rule, f"{plan.seed} {node} {incarnation} {number}")
            if rule.match is not None:
                if rule.match.incarnation in (0, incarnation):
                    self._messages.append((rule.match.type, armed))
            elif rule.write is not None and fnmatchcase(node, rule.write.node):
                self._writes.append(armed)
            elif rule.at is not None and self._concerns(rule, rule.at, incarnation):
                self._arm_point(rule.at, armed)

    def _concerns(self, rule: Rule, at: Point, incarnation: int) -> bool:
        if at.incarnation not in (0, incarnation) and rule.do != "partition":
            return False
        if rule.between is not None:
            return any(fnmatchcase(self._node, end) for end in rule.between)
        return fnmatchcase(self._node, at.node)

    def _arm_point(self, at: Point, armed: _Armed) -> None:
        if at.after_ms >= 0:
            self._actions.later(at.after_ms, lambda: self._strike_point(0, None, armed))
        elif armed.rule.do == "partition":
            # Both ends of a partition watch the message: its sender sees it sent, its receiver sees it handled.
            self._points["sent"].append((at.sent or at.handled, armed))
            self._points["handled"].append((at.sent or at.handled, armed))
        else:
            self._points["sent" if at.sent else "handled"].append((at.sent or at.handled, armed))

    def _rules(self, kind: str, type_name: str) -> tuple[_Armed, ...]:
        """Rules for a message type at a kind of point; looked up once per type."""
        key = (kind, type_name)
        rules = self._by_type.get(key)
        if rules is None:
            source = self._messages if kind == "message" else self._points[kind]
            rules = tuple(armed for pattern, armed in source if fnmatchcase(type_name, pattern))
            self._by_type[key] = rules
        return rules

    # -- Injector ---------------------------------------------------------------------------------------------------

    def on_send(self, now_ns: int, envelope: Envelope) -> tuple[Delivery, ...]:
        """What becomes of ``envelope``."""
        type_name = type(envelope.message).__name__
        with self._lock:
            struck = [r for r in self._rules("sent", type_name) if r.matches(envelope) and r.strikes()]
        for armed in struck:
            self._strike_point(now_ns, envelope, armed)
        with self._lock:
            if self._cut and self._is_cut(envelope.to):
                self._note(now_ns, envelope, "partition: not sent")
                return ()
            local = node_of(envelope.to) == self._node
            for armed in self._rules("message", type_name):
                if local and armed.rule.do != "refuse":
                    continue  # inside a node no message is lost, late or damaged
                if armed.matches(envelope) and armed.strikes():
                    self._note(now_ns, envelope, armed.text)
                    return self._deliveries(armed.rule, envelope)
        return (Delivery(0.0, envelope),)

    def on_handled(self, now_ns: int, envelope: Envelope) -> None:
        """An actor of this node begins to handle ``envelope``."""
        rules = self._rules("handled", type(envelope.message).__name__)
        if rules:
            with self._lock:
                struck = [r for r in rules if r.matches(envelope) and r.strikes()]
            for armed in struck:
                self._strike_point(now_ns, envelope, armed)
        if self._slow_ms:
            self._actions.pause(self._slow_ms)

    def on_write(self, operation: str, region_id: str, size_bytes: int) -> None:
        """A data-plane operation begins; raises ``DataPlaneError`` (``TornWrite`` when part of it should arrive)."""
        for armed in self._writes:
            where = armed.rule.write
            assert where is not None
            if where.operation not in ("*", operation) or not fnmatchcase(region_id, where.region):
                continue
            with self._lock:
                if not armed.strikes():
                    continue
                self._note(0, None, f"{armed.text} {operation} of {size_bytes} bytes to {region_id}")
            if armed.rule.do == "slow":
                self._actions.pause(armed.rule.delay_ms)
            elif armed.rule.do == "tear":
                raise TornWrite(f"injected: {operation} to {region_id} broke off in the middle")
            else:
                raise DataPlaneError(f"injected: {operation} to {region_id} failed")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _deliveries(self, rule: Rule, envelope: Envelope) -> tuple[Delivery, ...]:
        match rule.do:
            case "drop":
                return ()
            case "delay":
                return (Delivery(rule.delay_ms, envelope),)
            case "duplicate":
                return (Delivery(0.0, envelope), Delivery(rule.delay_ms, envelope))
            case "reorder":
                return (Delivery(rule.delay_ms, envelope, swap=True),)
            case "corrupt":
                return (Delivery(0.0, envelope, corrupt=True),)
            case _:
                return (Delivery(0.0, _refusal(envelope)),)

    def _strike_point(self, now_ns: int, envelope: Envelope | None, armed: _Armed) -> None:
        rule = armed.rule
        self._note(now_ns, envelope, f"{armed.text} {self._node}")
        match rule.do:
            case "kill":
                if rule.ms:
                    self._actions.later(rule.ms, self._actions.kill)
                else:
                    self._actions.kill()
            case "hang":
                self._actions.hang(rule.for_ms)
            case "stall":
                self._actions.pause(rule.for_ms)
            case "slow":
                self._slow_ms = rule.delay_ms
                if rule.for_ms:
                    self._actions.later(rule.for_ms, self._run_freely)
            case _:
                self._partition(rule)

    def _run_freely(self) -> None:
        self._slow_ms = 0.0

    def _partition(self, rule: Rule) -> None:
        assert rule.between is not None
        first, second = rule.between
        peers = [second] if fnmatchcase(self._node, first) else []
        if rule.ways == "both" and fnmatchcase(self._node, second):
            peers.append(first)
        for pattern in peers:
            cut = matcher(pattern) or (lambda name: True)
            self._cut.append(cut)
            if rule.for_ms:
                self._actions.later(rule.for_ms, lambda cut=cut: self._cut.remove(cut))  # type: ignore[misc]

    def _is_cut(self, to: str) -> bool:
        node = node_of(to)
        return node != self._node and any(matches(node) for matches in self._cut)

    def _note(self, now_ns: int, envelope: Envelope | None, text: str) -> None:
        if self._record is not None:
            self._record(now_ns, envelope, text)


def _refusal(envelope: Envelope) -> Envelope:
    """The answer that says there is no room, as if the receiver of ``envelope`` had sent it."""
    message = envelope.message
    answer: Message
    match message:
        case GrantLease():
            answer = LeaseRefused(
                request_id=message.request_id, epoch=message.epoch, reason="injected: staging is full"
            )
        case OpenReceive():
            answer = ReceiveRefused(
                request_id=message.request_id,
                epoch=message.epoch,
                rank=int(node_of(envelope.to).rpartition(".r")[2] or 0),
                reason="injected: no room",
            )
        case ReserveLeases():
            answer = LeasesRefused(request_id=message.request_id, epoch=message.epoch, reason="injected: no room")
        case _:
            return envelope
    return Envelope(
        message_id=envelope.message_id + "!",
        sender=envelope.to,
        to=envelope.sender,
        sent_ns=envelope.sent_ns,
        message=answer,
        parent_id=envelope.message_id,
        trace_id=envelope.trace_id,
        epoch=envelope.epoch,
        incarnation=envelope.incarnation,
    )


class ProcessActions:
    """Faults of a real process, on itself."""

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, for_ms: float) -> None:
        """SIGSTOP; a small child wakes this process again, if it should wake."""
        pid = os.getpid()
        if for_ms:
            command = f"sleep {for_ms / 1000}; kill -CONT {pid}"
            subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
        os.kill(pid, signal.SIGSTOP)

    def pause(self, ms: float) -> None:
        """Sleep on the calling thread."""
        time.sleep(ms / 1000)

    def later(self, delay_ms: float, function: Callable[[], None]) -> None:
        """A daemon timer thread."""
        timer = threading.Timer(delay_ms / 1000, function)
        timer.daemon = True
        timer.start()


def make_injector(config: NodeConfig, record: FaultRecorder | None = None) -> Injector:
    """The injector of a real node: of the plan in ``config.options.faults``, or one that does nothing.

    ``record`` is told of every fault (``RingRecorder.fault``). Raises ``ConfigError`` for a plan that cannot be meant.
    """
    if not config.options.faults:
        return NoInjector()
    try:
        plan = load_plan(config.options.faults)
    except FaultPlanError as error:
        raise ConfigError(f"{error} (option --faults)") from error
    return NodeInjector(plan, config.node, config.incarnation, ProcessActions(), record)
