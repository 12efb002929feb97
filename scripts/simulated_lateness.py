"""I5, looked at directly: a message that is older than what its receiver knows changes nothing of what it knows.

The rules below say, from a machine's own books but not with its code, which messages are late and what they must leave
alone: whatever the receiver has of a newer epoch, generation or incarnation than the message names. What that is gets
written down before the message is handled and compared afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from typing import Any, Final

import msgspec

from actors.gateway.machine import GatewayMachine
from actors.runtime.machine import Effect
from actors.runtime.simulated_nodes import SimulatedActor
from actors.scheduler.decode_side import DecodeSide
from actors.scheduler.machine import SchedulerMachine
from actors.scheduler.prefill_side import PrefillSide
from actors.scheduler.transitions import DecodeState
from actors.transfer.links import PeerLink
from actors.transfer.machine import TransferMachine
from actors.transfer.routes import TransferPlan
from actors.transfer.staging_machine import StagingMachine
from messages.base import Message
from messages.cluster import ClusterView
from messages.envelope import MESSAGE_TYPES
from messages.handoff import HandoffComplete, HandoffFailed, RequestAccepted, RequestRefused, RequestReleased
from messages.requests import CancelRequest, Failed, Finished, Generation, SubmitRequest
from messages.transfer import MergeDone
from scripts.simulated_memory import Violation

Handle = Callable[[int, str, Message], list[Effect]]

_ABOUT_TOKENS: Final = frozenset({Generation, Finished, Failed})
_OF_THE_GATEWAY: Final = frozenset({SubmitRequest, CancelRequest})
_ANSWERS: Final = frozenset({RequestAccepted, RequestRefused, HandoffComplete, HandoffFailed, RequestReleased})
_NOT_ABOUT_THE_REQUEST: Final = (PeerLink, TransferPlan)
_MAY_BE_LATE: Final = frozenset(
    kind for kind in MESSAGE_TYPES if kind is ClusterView or {"request_id", "epoch"} <= set(kind.__struct_fields__)
)
"""Messages that are about one view, or one attempt of one request."""


def guarded(actor: SimulatedActor) -> Handle:
    """The actor's ``handle``, which raises ``Violation`` when a late message changed what it had to leave alone."""
    address, machine, handle = actor.address, actor.machine, actor.handle
    newer_than = _RULES.get(type(machine))
    if newer_than is None:
        return handle

    def checked(now_ns: int, sender: str, message: Message) -> list[Effect]:
        newer = newer_than(machine, message) if type(message) in _MAY_BE_LATE else ()
        if not newer:
            return handle(now_ns, sender, message)
        before = [written_down(thing) for thing in newer]
        effects = handle(now_ns, sender, message)
        for thing, old in zip(newer, before, strict=True):
            new = written_down(thing)
            if new != old:
                change = _difference(old, new)
                raise Violation(f"I5: {address}: late {repr(message)[:300]} from {sender} changed {change}")
        return effects

    return checked


def _difference(old: str, new: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return f"…{old[max(0, at - 60) : at + 40]}… to …{new[max(0, at - 60) : at + 40]}…"


# -- who is late -------------------------------------------------------------------------------------------------------


def _newer_in_gateway(machine: GatewayMachine, message: Message) -> list[Any]:
    kind: Any = type(message)
    if kind in _ABOUT_TOKENS:
        request_id, epoch = _attempt_of(message)
        record = machine._book.get(request_id)
        return [record] if record is not None and epoch < record.epoch else []
    return [machine._router] if kind is ClusterView and _view_of(message) < machine._view else []


def _newer_in_scheduler(machine: SchedulerMachine, message: Message) -> list[Any]:
    if type(message) is ClusterView:
        return [machine.peers] if _view_of(message) < machine.membership._view else []
    request_id, epoch = _attempt_of(message)
    side = machine.side
    if isinstance(side, PrefillSide):
        return _newer_in_prefill(machine, side, message, request_id, epoch)
    if isinstance(side, DecodeSide):
        # One that waits for memory may get some now.
        newer = [a for a in side._attempts.of_request(request_id) if a.offer.epoch > epoch]
        return [attempt for attempt in newer if attempt.state is not DecodeState.WAITING]
    return []


def _newer_in_prefill(
    machine: SchedulerMachine, side: PrefillSide, message: Message, request_id: str, epoch: int
) -> list[Any]:
    request = side._book.requests.get(request_id)
    if request is None:
        return []
    kind: Any = type(message)
    if kind in _OF_THE_GATEWAY:
        return [request] if epoch < request.submit.epoch else []
    if kind not in _ANSWERS or any(peer.silent for peer in machine.peers):
        return []  # a silent peer that speaks gets offers again
    offer = side.offers.open.get((request_id, epoch))
    return [request] if offer is None or (offer.instance, offer.incarnation) != _life_of(message) else []


def _newer_in_transfer(machine: TransferMachine, message: Message) -> list[Any]:
    request_id, epoch = _attempt_of(message)
    newer: list[Any] = [
        push for (name, of_epoch), push in machine.source.pushes.items() if name == request_id and of_epoch > epoch
    ]
    for (name, of_epoch), receive in machine.target.receives.items():
        if name != request_id:
            continue
        life = (getattr(message, "source_instance", ""), getattr(message, "source_incarnation", 0))
        other_life = bool(life[0]) and life != receive.link.key
        other_lease = (
            receive.lease is not None and getattr(message, "generation", receive.generation) != receive.generation
        )
        if of_epoch > epoch or (of_epoch == epoch and (other_life or other_lease)):
            newer.append(receive)
    return newer


def _newer_in_staging(machine: StagingMachine, message: Message) -> list[Any]:
    request_id, epoch = _attempt_of(message)
    if type(message) is MergeDone:  # the end of one merge begins the next
        return []
    return [
        lease
        for (name, of_epoch), lease in machine._leases.items()
        if name == request_id
        and (of_epoch, lease.generation) > (epoch, getattr(message, "generation", lease.generation))
    ]


def _attempt_of(message: Any) -> tuple[str, int]:
    return message.request_id, message.epoch


def _view_of(message: Any) -> tuple[int, int]:
    return message.registry_incarnation, message.version


def _life_of(message: Any) -> tuple[str, int]:
    return message.instance, message.incarnation


_RULES: Final[dict[type, Callable[[Any, Message], list[Any]]]] = {
    GatewayMachine: _newer_in_gateway,
    SchedulerMachine: _newer_in_scheduler,
    TransferMachine: _newer_in_transfer,
    StagingMachine: _newer_in_staging,
}


# -- what is known -----------------------------------------------------------------------------------------------------


def written_down(thing: Any) -> str:
    """Everything that hangs on ``thing`` as text; equal texts, equal knowledge."""
    parts: list[str] = []
    _write_down(thing, parts, set())
    return "".join(parts)


def _write_down(thing: Any, parts: list[str], seen: set[int]) -> None:
    kind: type = type(thing)
    if _is_plain(kind):
        parts.append(repr(thing))
    elif isinstance(thing, dict):
        _write_items((part for pair in thing.items() for part in pair), parts, seen)
    elif isinstance(thing, list | tuple | deque):
        _write_items(thing, parts, seen)
    elif isinstance(thing, set | frozenset):
        parts.append(repr(sorted(map(repr, thing))))
    elif id(thing) not in seen and not isinstance(thing, _NOT_ABOUT_THE_REQUEST) and not callable(thing):
        seen.add(id(thing))
        names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in (*names, *getattr(thing, "__dict__", ())):
            parts.append(f" {name}=")
            _write_down(getattr(thing, name, None), parts, seen)


@cache
def _is_plain(kind: type) -> bool:
    """Whether the text of things of this type says all of them."""
    return issubclass(kind, type(None) | int | float | str | bytes | Enum | msgspec.Struct)


def _write_items(things: Iterable[Any], parts: list[str], seen: set[int]) -> None:
    parts.append("[")
    for thing in things:
        _write_down(thing, parts, seen)
        parts.append(",")
    parts.append("]")
