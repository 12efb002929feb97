"""Links of this instance's ranks with an instance of the opposite role: asked of all ranks, up when all say so.

    (new) --LinkPeer--> LINKING --every rank linked--> LINKED --UnlinkPeer--> (gone)
    LINKING --a rank's plan is refused, or a rank is silent too long--> (gone, LinkFailed; the scheduler may ask again)

A rank that had linked before another refused stays linked; a second ``LinkPeer`` finds it so. ``UnlinkPeer`` is
repeated to the ranks that have not said that they heard: a rank that does not know of a death waits for the dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from actors.runtime.machine import Effect, Handlers, Send, StartTimer, StatusValues, StopTimer
from messages.base import control_address, rank_address
from messages.cluster import LinkFailed, LinkPeer, PeerLinked, PeerUnlinked, UnlinkPeer
from messages.layout import Manifest
from messages.timers import InstanceTimer

Key = tuple[str, int]


@dataclass(eq=False)
class Link:
    """The ranks that are linked with one incarnation of a peer."""

    linked: set[int] = field(default_factory=set)


class Links:
    """See the module's theory."""

    def __init__(self, instance: str, tp_size: int, *, timeout_ms: float, resend_ms: float) -> None:
        self.own_manifests: tuple[Manifest, ...] = ()
        self._scheduler = control_address(instance, "scheduler")
        self._transfers = tuple(rank_address(instance, rank, "transfer") for rank in range(tp_size))
        self._timeout_ms = timeout_ms
        self._resend_ms = resend_ms
        self._links: dict[Key, Link] = {}
        self._unlinking: dict[Key, set[int]] = {}  # dead peers, and the ranks that have not heard

    def handlers(self) -> Handlers[list[Effect]]:
        """What is done with messages about links."""
        handlers: Handlers[list[Effect]] = Handlers()
        on = handlers.on
        on(LinkPeer, self._on_link_peer)
        on(PeerLinked, self._on_peer_linked)
        on(LinkFailed, self._on_link_failed)
        on(UnlinkPeer, self._on_unlink_peer)
        on(PeerUnlinked, self._on_peer_unlinked)
        return handlers

    def on_timer(self, now_ns: int, sender: str, message: InstanceTimer) -> list[Effect]:
        """Ranks have not heard of a death, or have not linked in time."""
        if message.purpose == "unlink":
            return self._tell_unlink((message.instance, message.incarnation))
        return self._on_timeout(now_ns, sender, message) if message.purpose == "link" else []

    def status(self) -> StatusValues:
        """How many ranks are linked with each peer."""
        total = len(self._transfers)
        return tuple(
            (f"link.{instance}", f"incarnation {incarnation}: {len(link.linked)} of {total} ranks")
            for (instance, incarnation), link in self._links.items()
        )

    def _on_link_peer(self, now_ns: int, sender: str, message: LinkPeer) -> list[Effect]:
        peer = message.peer
        self._links[(peer.instance, peer.incarnation)] = Link()
        request = msgspec.structs.replace(message, own_manifests=self.own_manifests)
        effects: list[Effect] = [Send(transfer, request) for transfer in self._transfers]
        due = InstanceTimer(instance=peer.instance, incarnation=peer.incarnation, purpose="link")
        return [*effects, StartTimer(("link", peer.instance, peer.incarnation), self._timeout_ms, due)]

    def _on_peer_linked(self, now_ns: int, sender: str, message: PeerLinked) -> list[Effect]:
        link = self._links.get((message.instance, message.incarnation))
        if link is None or message.rank in link.linked:
            return []
        link.linked.add(message.rank)
        if len(link.linked) < len(self._transfers):
            return []
        up = PeerLinked(instance=message.instance, incarnation=message.incarnation, rank=-1)
        return [StopTimer(("link", message.instance, message.incarnation)), Send(self._scheduler, up)]

    def _on_link_failed(self, now_ns: int, sender: str, message: LinkFailed) -> list[Effect]:
        if self._links.pop((message.instance, message.incarnation), None) is None:
            return []
        return [StopTimer(("link", message.instance, message.incarnation)), Send(self._scheduler, message)]

    def _on_unlink_peer(self, now_ns: int, sender: str, message: UnlinkPeer) -> list[Effect]:
        key = (message.instance, message.incarnation)
        self._links.pop(key, None)
        self._unlinking[key] = set(range(len(self._transfers)))
        return [StopTimer(("link", *key)), *self._tell_unlink(key)]

    def _tell_unlink(self, key: Key) -> list[Effect]:
        """Tell the ranks that have not heard, and again later."""
        missing = self._unlinking.get(key)
        if not missing:
            return []
        unlink = UnlinkPeer(instance=key[0], incarnation=key[1])
        due = InstanceTimer(instance=key[0], incarnation=key[1], purpose="unlink")
        told: list[Effect] = [Send(self._transfers[rank], unlink) for rank in sorted(missing)]
        return [*told, StartTimer(("unlink", *key), self._resend_ms, due)]

    def _on_peer_unlinked(self, now_ns: int, sender: str, message: PeerUnlinked) -> list[Effect]:
        key = (message.instance, message.incarnation)
        missing = self._unlinking.get(key)
        if missing is None:
            return []
        missing.discard(message.rank)
        if missing:
            return []
        del self._unlinking[key]
        return [StopTimer(("unlink", *key))]

    def _on_timeout(self, now_ns: int, sender: str, message: InstanceTimer) -> list[Effect]:
        link = self._links.get((message.instance, message.incarnation))
        if link is None or len(link.linked) == len(self._transfers):
            return []
        silent = [rank for rank in range(len(self._transfers)) if rank not in link.linked]
        reason = f"ranks {silent} did not answer within {self._timeout_ms:.0f} ms"
        failed = LinkFailed(instance=message.instance, incarnation=message.incarnation, rank=silent[0], reason=reason)
        return self._on_link_failed(now_ns, sender, failed)
