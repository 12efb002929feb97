"""Who is alive, in which role, with which layout.

Theory of operation
===================

The registry knows one *entry* per instance. An entry has a life:

    (unknown) --RegisterInstance--> VISIBLE --no heartbeat in time--> SILENT --heartbeat or registration--> VISIBLE
    VISIBLE, SILENT --InstanceLost, or a newer incarnation registers--> gone, its incarnation remembered as dead

Only VISIBLE entries are in the view, and of their links those that both sides report (``links.py``). Whatever changes
the view raises its version and sends it to the gateway and to the scheduler of every entry, VISIBLE or SILENT, the
newly registered one included.

SILENT is not dead. A silent instance leaves the view, so nobody gives it work, but its processes may still read and
write caches; whoever frees memory because a peer died waits for ``InstanceLost``, which only the supervisor can say: it
saw the processes end. The registry tells the supervisor which instance went silent.

A newer incarnation of an instance proves the end of the older one (the supervisor starts it only then), so its
registration announces the older one's loss, should the supervisor's word have been lost on the way.

The registry keeps nothing on disk. A restarted one has a larger incarnation and an empty view; it answers every
heartbeat of an instance it does not know with its view, the scheduler sees that the view does not name it, and
registers again. In the same way a heartbeat that says it holds an old view is answered with the current one.

Invariants
* The view names at most one incarnation of an instance, never one that is remembered as dead.
* (registry incarnation, version) grows with every view that differs from the one before.
* A message about an incarnation older than the entry's, or dead, changes nothing.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import msgspec

from actors.registry.links import Linked, Refused, join_reports, link_states
from actors.runtime.machine import Effect, Handlers, Note, Send, StartTimer, StopTimer
from messages.base import GATEWAY, SUPERVISOR, Message
from messages.cluster import (
    OPPOSITE_ROLE,
    ClusterView,
    Heartbeat,
    InstanceInfo,
    InstanceLost,
    InstanceRole,
    InstanceSilent,
    LinkReport,
    RegisterInstance,
    ViewRequest,
)
from messages.lifecycle import Drain, Drained
from messages.timers import InstanceTimer

HEARTBEATS_MISSED_MAX = 20
"""An instance that missed this many heartbeats in a row leaves the view. Exits are seen at once by the supervisor; this
only catches hangs and partitions, so it is generous with machines that have more processes than cores."""


@dataclass
class _Entry:
    """One live instance as the registry knows it."""

    info: InstanceInfo
    address: str  # its scheduler
    since_ns: int
    visible: bool = True
    links: tuple[LinkReport, ...] = ()  # as its heartbeats said
    brief: InstanceInfo = field(init=False)  # without manifests

    def __post_init__(self) -> None:
        self.brief = msgspec.structs.replace(self.info, manifests=())


class RegistryMachine:
    """See the module's theory. One per cluster, on the front node."""

    def __init__(self, *, node: str, incarnation: int, heartbeat_ms: int) -> None:
        self._node = node
        self._incarnation = incarnation
        self._silent_ms = heartbeat_ms * HEARTBEATS_MISSED_MAX
        self._entries: dict[str, _Entry] = {}
        self._lost: dict[str, int] = {}  # instance → its newest incarnation known to be dead
        self._version = 0
        self._handlers: Handlers[list[Effect]] = Handlers()
        on = self._handlers.on
        on(RegisterInstance, self._on_register_instance)
        on(Heartbeat, self._on_heartbeat)
        on(InstanceLost, self._on_instance_lost)
        on(ViewRequest, self._on_view_request)
        on(InstanceTimer, self._on_instance_timer)
        on(Drain, self._on_drain)

    def start(self, now_ns: int) -> list[Effect]:
        """Nothing: the registry waits to be told."""
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """React to one message; unknown and late ones change nothing."""
        handler = self._handlers.get(type(message))
        return handler(now_ns, sender, message) if handler is not None else []

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        """Counts, and per instance what the view says of it."""
        values: list[tuple[str, float | int | str]] = [
            ("view_version", self._version),
            ("instances", sum(entry.visible for entry in self._entries.values())),
            ("silent", sum(not entry.visible for entry in self._entries.values())),
        ]
        for name, entry in sorted(self._entries.items()):
            state = "live" if entry.visible else "silent"
            values.append((f"instance.{name}", f"{entry.info.role} incarnation {entry.info.incarnation} {state}"))
        return tuple(values), ()

    # -- one per message type ----------------------------------------------------------------------------------------

    def _on_register_instance(self, now_ns: int, sender: str, message: RegisterInstance) -> list[Effect]:
        info = message.info
        entry = self._entries.get(info.instance)
        if info.incarnation <= self._lost.get(info.instance, -1):
            return [self._note("warning", "dead incarnation's registration ignored", info.instance, info.incarnation)]
        if entry is not None and info.incarnation < entry.info.incarnation:
            return [self._note("warning", "stale registration ignored", info.instance, info.incarnation)]
        effects: list[Effect] = []
        if entry is not None and info.incarnation > entry.info.incarnation:
            effects += self._bury(info.instance, entry.info.incarnation, "a newer incarnation registered")
        elif entry is not None and entry.visible and entry.info == info:
            return [Send(sender, self._view(_partner(info.role))), self._silence_timer(info.instance, info.incarnation)]
        links = entry.links if entry is not None and entry.info.incarnation == info.incarnation else ()
        self._entries[info.instance] = _Entry(info=info, address=sender, since_ns=now_ns, links=links)
        effects.append(self._silence_timer(info.instance, info.incarnation))
        effects.append(self._note("info", f"{info.role} instance registered", info.instance, info.incarnation))
        return effects + self._announce()

    def _on_heartbeat(self, now_ns: int, sender: str, message: Heartbeat) -> list[Effect]:
        entry = self._entries.get(message.instance)
        if message.incarnation <= self._lost.get(message.instance, -1):
            return []
        if entry is None or message.incarnation > entry.info.incarnation:
            # It sees that it is not named and registers again. Its role is not known: it may need any manifest.
            return [Send(sender, self._view(tuple(OPPOSITE_ROLE)))]
        if message.incarnation < entry.info.incarnation:
            return []
        effects: list[Effect] = [self._silence_timer(message.instance, message.incarnation)]
        links = join_reports(entry.links, message.links)
        before = self._link_states() if links != entry.links else None
        entry.links = links
        if not entry.visible:
            entry.visible = True
            effects.append(self._note("info", "silent instance is back", message.instance, message.incarnation))
            effects += self._announce()
        elif before is not None and self._link_states() != before:
            effects += self._announce()
        elif message.view_version not in (-1, self._version):
            effects.append(Send(sender, self._view(_partner(entry.info.role))))
        effects.append(Send(GATEWAY, msgspec.structs.replace(message, view_version=self._version)))
        return effects

    def _on_instance_lost(self, now_ns: int, sender: str, message: InstanceLost) -> list[Effect]:
        if message.incarnation <= self._lost.get(message.instance, -1):
            return []
        effects = self._bury(message.instance, message.incarnation, message.reason)
        return effects + self._announce()

    def _on_view_request(self, now_ns: int, sender: str, message: ViewRequest) -> list[Effect]:
        return [Send(sender, self._view())]

    def _on_drain(self, now_ns: int, sender: str, message: Drain) -> list[Effect]:
        return [Send(sender, Drained(node=self._node, actor="registry"))]

    def _on_instance_timer(self, now_ns: int, sender: str, message: InstanceTimer) -> list[Effect]:
        entry = self._entries.get(message.instance)
        if entry is None or entry.info.incarnation != message.incarnation or not entry.visible:
            return []
        entry.visible = False
        silent = InstanceSilent(instance=message.instance, incarnation=message.incarnation, silent_ms=self._silent_ms)
        return [
            self._note("warning", f"no heartbeat for {self._silent_ms} ms", message.instance, message.incarnation),
            Send(SUPERVISOR, silent),
            *self._announce(),
        ]

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _bury(self, instance: str, incarnation: int, reason: str) -> list[Effect]:
        """Remember that this incarnation is dead and tell everybody but itself; the view is announced by the caller."""
        self._lost[instance] = incarnation
        effects: list[Effect] = []
        entry = self._entries.get(instance)
        if entry is not None and entry.info.incarnation <= incarnation:
            del self._entries[instance]
            effects.append(StopTimer(("silence", instance)))
        lost = InstanceLost(instance=instance, incarnation=incarnation, reason=reason)
        effects += [Send(address, lost) for address in self._audience()]
        effects.append(self._note("warning", f"instance lost: {reason}", instance, incarnation))
        return effects

    def _announce(self) -> list[Effect]:
        self._version += 1
        for_gateway = Send(GATEWAY, self._view())
        views = {role: self._view(_partner(role)) for role in {entry.info.role for entry in self._entries.values()}}
        return [for_gateway, *(Send(entry.address, views[entry.info.role]) for entry in self._in_order())]

    def _audience(self) -> list[str]:
        return [GATEWAY, *(entry.address for entry in self._in_order())]

    def _in_order(self) -> list[_Entry]:
        return [entry for _, entry in sorted(self._entries.items())]

    def _link_states(self) -> tuple[Linked, Refused]:
        visible = {name: entry for name, entry in self._entries.items() if entry.visible}
        infos = {name: entry.info for name, entry in visible.items()}
        return link_states(infos, {name: entry.links for name, entry in visible.items()})

    def _view(self, partners: Container[InstanceRole] = ()) -> ClusterView:
        """With the manifests of instances of these roles: for whoever links with them."""
        linked, refused = self._link_states()
        visible = [entry for entry in self._in_order() if entry.visible]
        return ClusterView(
            version=self._version,
            registry_incarnation=self._incarnation,
            instances=tuple(entry.info if entry.info.role in partners else entry.brief for entry in visible),
            lost=tuple(sorted(self._lost.items())),
            links=linked,
            refused=refused,
        )

    def _silence_timer(self, instance: str, incarnation: int) -> StartTimer:
        due = InstanceTimer(instance=instance, incarnation=incarnation, purpose="silence")
        return StartTimer(("silence", instance), float(self._silent_ms), due)

    @staticmethod
    def _note(level: str, event: str, instance: str, incarnation: int) -> Note:
        return Note(level, event, (("instance", instance), ("incarnation", incarnation)))


def _partner(role: InstanceRole) -> tuple[InstanceRole, ...]:
    """The roles with which instances of ``role`` link."""
    return (OPPOSITE_ROLE[role],) if role in OPPOSITE_ROLE else ()
