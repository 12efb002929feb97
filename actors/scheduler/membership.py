"""An instance's place in the cluster: registered, heard, linked with the instances of the opposite role.

Once its ranks are ready the scheduler registers, again and again until the registry's view names this incarnation
(a restarted registry answers a heartbeat with a view that does not, so this heals by itself), and beats while it lives.
From each newer view it learns which instances of the opposite role to link; the engine does the linking. Only
``InstanceLost``, or a view that counts an incarnation as lost or shows a newer one, proves that one is dead.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.runtime.machine import Handlers
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import LinkState, Peers
from actors.scheduler.settings import SchedulerSettings
from messages.base import REGISTRY
from messages.cluster import (
    OPPOSITE_ROLE,
    ClusterView,
    Heartbeat,
    InstanceInfo,
    InstanceLost,
    LinkFailed,
    LinkPeer,
    PeerLinked,
    RegisterInstance,
    UnlinkPeer,
)
from messages.timers import InstanceTimer


class Membership:
    """See the module's theory. ``on_lost(instance, incarnation)`` is called once per death."""

    def __init__(
        self,
        settings: SchedulerSettings,
        peers: Peers,
        out: Outbox,
        *,
        load: Callable[[], Heartbeat],
        on_lost: Callable[[str, int], None],
        on_linked: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._peers = peers
        self._out = out
        self._load = load
        self._on_lost = on_lost
        self._on_linked = on_linked
        self._info: InstanceInfo | None = None
        self._view = (-1, -1)
        self.registered = False

    def handlers(self) -> Handlers[None]:
        """What is done with messages about the cluster."""
        handlers: Handlers[None] = Handlers()
        on = handlers.on
        on(ClusterView, self._on_cluster_view)
        on(InstanceLost, self._on_instance_lost)
        on(PeerLinked, self._on_peer_linked)
        on(LinkFailed, self._on_link_failed)
        return handlers

    @property
    def view_version(self) -> int:
        """Version of the newest view seen, -1 before the first."""
        return self._view[1]

    def begin(self, info: InstanceInfo) -> None:
        """All ranks are ready: register and beat."""
        self._info = info
        self._register()
        self._beat()

    def _on_instance_lost(self, now_ns: int, sender: str, message: InstanceLost) -> None:
        self._lose(message.instance, message.incarnation, message.reason)

    def _on_cluster_view(self, now_ns: int, sender: str, view: ClusterView) -> None:
        if (view.registry_incarnation, view.version) < self._view:
            return
        self._view = (view.registry_incarnation, view.version)
        own = self._settings
        for instance, incarnation in view.lost:
            self._lose(instance, incarnation, "the registry counts it as lost")
        if self._info is not None:
            named = any(i.instance == own.instance and i.incarnation == own.incarnation for i in view.instances)
            if named != self.registered:
                self.registered = named
                if not named:
                    self._register()
        listed = {info.instance: info.incarnation for info in view.instances}
        for peer in self._peers:
            peer.listed = listed.get(peer.info.instance) == peer.info.incarnation
        for info in view.instances:
            if info.role == OPPOSITE_ROLE.get(own.role):
                self._meet(info)

    def _meet(self, info: InstanceInfo) -> None:
        if self._peers.is_dead(info.instance, info.incarnation):
            return
        known = self._peers.current(info.instance)
        if known is not None and known.info.incarnation >= info.incarnation:
            return
        if known is not None:
            self._lose(info.instance, info.incarnation - 1, "a newer incarnation is here")
        self._peers.add(info)
        self._out.send(self._settings.engine, LinkPeer(peer=info))

    def _lose(self, instance: str, incarnation: int, reason: str) -> None:
        if self._peers.is_dead(instance, incarnation) or instance == self._settings.instance:
            return
        peer = self._peers.bury(instance, incarnation)
        if peer is not None:
            self._out.stop_instance_timer("link", instance, peer.info.incarnation)
            self._out.send(self._settings.engine, UnlinkPeer(instance=instance, incarnation=peer.info.incarnation))
            self._out.note("warning", "peer lost", instance=instance, incarnation=incarnation, reason=reason)
        self._on_lost(instance, incarnation)

    def _on_peer_linked(self, now_ns: int, sender: str, message: PeerLinked) -> None:
        peer = self._peers.get(message.instance, message.incarnation)
        if peer is None or peer.state is LinkState.LINKED:
            return
        peer.state = LinkState.LINKED
        self._out.note("info", "peer linked", instance=message.instance, incarnation=message.incarnation)
        self._beat()  # whoever waits for this link waits no longer than it takes
        self._on_linked()

    def _on_link_failed(self, now_ns: int, sender: str, message: LinkFailed) -> None:
        peer = self._peers.get(message.instance, message.incarnation)
        if peer is None or peer.state is LinkState.LINKED:
            return
        peer.state = LinkState.BROKEN
        peer.link_error = message.reason
        peer.link_given_up = message.final or peer.link_attempts >= self._settings.link_attempts_max
        self._out.note(
            "error",
            "link refused",
            instance=message.instance,
            incarnation=message.incarnation,
            attempt=peer.link_attempts,
            reason=message.reason,
        )
        if peer.link_given_up:
            self._beat()
            return
        delay_ms = self._settings.link_retry_ms * 2 ** (peer.link_attempts - 1)
        self._out.start_instance_timer("link", message.instance, message.incarnation, delay_ms)

    def on_timer(self, message: InstanceTimer) -> None:
        """Time to register again, to beat, or to try a link again."""
        match message.purpose:
            case "register":
                if not self.registered:
                    self._register()
            case "heartbeat":
                self._beat()
            case "link":
                peer = self._peers.get(message.instance, message.incarnation)
                if peer is not None and peer.state is LinkState.BROKEN:
                    peer.state = LinkState.LINKING
                    peer.link_attempts += 1
                    self._out.send(self._settings.engine, LinkPeer(peer=peer.info))

    def _register(self) -> None:
        if self._info is not None:
            self._out.send(REGISTRY, RegisterInstance(info=self._info))
            own = self._settings
            self._out.start_instance_timer("register", own.instance, own.incarnation, 2 * own.heartbeat_ms)

    def _beat(self) -> None:
        own = self._settings
        self._out.send(REGISTRY, self._load())
        self._out.start_instance_timer("heartbeat", own.instance, own.incarnation, own.heartbeat_ms)
