"""The transfer machine of one rank: links, and both sides of a transfer.

Theory. One actor per rank. On a prefill rank it pushes (``source_machine.py``), on a decode rank it receives
(``target_machine.py``), on a mixed rank it does nothing but pass ``WorkerReady`` on. What both sides share is here:

* **Start.** ``WorkerReady`` passes through on its way to the engine. On a decode rank it says how long a row of this
  rank is, hence how large a staging lease can be; the staging region is created, announced to the staging actor and
  added to the manifest. A configuration whose staging cannot hold one lease ends the node with the option to raise.
* **Links.** ``LinkPeer`` → plan → map the peer's regions → ``PeerLinked``, or ``LinkFailed`` with the reason. On
  ``UnlinkPeer`` (or ``InstanceLost``) the link is lost: both sides end what depended on it; when the last attempt is
  gone the regions are unmapped.
* **Broken connections.** ``PeerLost`` says that messages to a node may not have arrived, not that anybody is dead:
  attempts that go on with that rank fail, and are offered again.

Who says what to whom is written in ``messages/transfer.py``.
"""

from __future__ import annotations

import msgspec

from actors.runtime.config import Options
from actors.runtime.machine import Effect, Fail, Handlers, Note, Run, Send
from actors.transfer.jobs import CreateStaging, UnmapPeer
from actors.transfer.links import LinkState, LinkTable, PeerLink, TooEarly
from actors.transfer.routes import PlanRefused
from actors.transfer.source_machine import SourceMachine
from actors.transfer.staging import StagingSize
from actors.transfer.target_machine import TargetMachine
from messages.base import Message, control_address
from messages.cluster import InstanceLost, LinkFailed, LinkPeer, PeerLinked, PeerUnlinked, UnlinkPeer
from messages.lifecycle import PeerLost, WorkerReady
from messages.transfer import (
    PeerMapped,
    StagingCreated,
    StagingReady,
)

Values = tuple[tuple[str, float | int | str], ...]
Requests = tuple[tuple[str, int, str, str, int], ...]


class TransferMachine:
    """One rank's transfer actor. ``role`` is the instance's: "MIX", "PREFILL" or "DECODE"."""

    def __init__(self, instance: str, rank: int, incarnation: int, role: str, options: Options) -> None:
        self._node = f"{instance}.r{rank}"
        self._rank = rank
        self._engine = control_address(instance, "engine")
        self._incarnation = incarnation
        self._role = role
        self._options = options
        self._ready: WorkerReady | None = None
        verify = options.verify_handoffs
        self.links = LinkTable(rank, options.lease_windows, verify)
        self.source = SourceMachine(instance, rank, incarnation, self.links)
        self.target = TargetMachine(
            self._node,
            rank,
            self.links,
            windows=options.lease_windows,
            parallel=options.enable_pd_parallel_shard_pull,
            verify=verify,
        )
        self._handlers: Handlers[list[Effect]] = Handlers()
        on = self._handlers.on
        on(WorkerReady, self._on_worker_ready)
        on(StagingCreated, self._on_staging_created)
        on(LinkPeer, self._on_link_peer)
        on(PeerMapped, self._on_peer_mapped)
        on(UnlinkPeer, self._on_unlink_peer)
        on(InstanceLost, self._on_instance_lost)
        on(PeerLost, self._on_link_broken)
        self._handlers.take(self.source.handlers())
        self._handlers.take(self.target.handlers())

    def start(self, now_ns: int) -> list[Effect]:
        """Nothing until the worker is ready."""
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """See ``actors/runtime/machine.py``."""
        handler = self._handlers.get(type(message))
        effects = handler(now_ns, sender, message) if handler is not None else []
        return effects + self._unmap_unused() if self.links.lost else effects

    def status(self, now_ns: int) -> tuple[Values, Requests]:
        """Links, attempts on both sides, and what each of them waits for."""
        values: Values = (
            ("links", len(self.links)),
            ("pushes", len(self.source.pushes)),
            ("receives", len(self.target.receives)),
            ("restored", self.target.restored_count),
            ("bytes_written", self.source.bytes_written),
            ("bytes_received", self.target.bytes_received),
            ("late_messages", self.source.late_count + self.target.late_count),
        )
        rows = [
            (*push.attempt, f"push {push.state.value}", "writes" if push.in_flight else "layers", push.opened_ns)
            for push in self.source.pushes.values()
        ]
        rows += [
            (*receive.attempt, f"receive {receive.state.value}", receive.waits_for, receive.opened_ns)
            for receive in self.target.receives.values()
        ]
        return values, tuple(rows)

    # -- start ----------------------------------------------------------------------------------------------------

    def _on_worker_ready(self, now_ns: int, sender: str, message: WorkerReady) -> list[Effect]:
        if self._role != "DECODE":
            return [Send(self._engine, message)]
        if self._ready is not None:
            return []
        self._ready = message
        if self._options.lease_windows < 1:
            return [Fail(f"lease_windows {self._options.lease_windows}: a lease needs at least 1 window", fatal=True)]
        size = StagingSize(message.manifest, self._options.lease_windows)
        staging_bytes = self._options.staging_mb << 20 or size.lease_bytes * self._options.staging_leases
        if staging_bytes < size.lease_min_bytes:
            reason = (
                f"staging_mb {self._options.staging_mb} cannot hold one lease of {size.lease_bytes >> 20} MiB "
                f"({self._options.lease_windows} windows of {message.manifest.max_tokens_per_chunk} tokens); raise "
                "staging_mb, or lower max_tokens_per_chunk_for_prefill or lease_windows"
            )
            return [Fail(reason, fatal=True)]
        region_id = f"{self._node}.{self._incarnation}.staging"
        return [Run(CreateStaging(region_id=region_id, size_bytes=staging_bytes))]

    def _on_staging_created(self, now_ns: int, sender: str, message: StagingCreated) -> list[Effect]:
        if self._ready is None:
            return []
        if message.region is None:
            return [Fail(message.error)]
        manifest = msgspec.structs.replace(
            self._ready.manifest,
            regions=(*self._ready.manifest.regions, message.region),
            staging_region_id=message.region.region_id,
            staging_bytes=message.region.size_bytes,
        )
        return [
            Send(f"{self._node}/staging", StagingReady(region=message.region)),
            Send(self._engine, msgspec.structs.replace(self._ready, manifest=manifest)),
        ]

    # -- links ----------------------------------------------------------------------------------------------------

    def _on_link_peer(self, now_ns: int, sender: str, message: LinkPeer) -> list[Effect]:
        peer = message.peer
        known = self.links.find(peer.instance, peer.incarnation)
        if known is not None:
            known.asked_by = sender
            return [Send(sender, self._linked(known))] if known.state is LinkState.LINKED else []
        try:
            _, job = self.links.propose(sender, message)
        except PlanRefused as refusal:
            final = not isinstance(refusal, TooEarly)
            return [self._link_failed(sender, peer.instance, peer.incarnation, str(refusal), final=final)]
        return [Run(job)]

    def _on_peer_mapped(self, now_ns: int, sender: str, message: PeerMapped) -> list[Effect]:
        link = self.links.find(message.instance, message.incarnation)
        if link is None or link.mapped:
            return []
        link.mapped = True
        if link.state is LinkState.LOST or message.error:
            self.links.lose(link)  # unmapped below what was mapped
            reason = message.error or "lost meanwhile"
            return [self._link_failed(link.asked_by, link.instance, link.incarnation, reason)]
        link.state = LinkState.LINKED
        return [Send(link.asked_by, self._linked(link))]

    def _on_unlink_peer(self, now_ns: int, sender: str, message: UnlinkPeer) -> list[Effect]:
        heard = PeerUnlinked(instance=message.instance, incarnation=message.incarnation, rank=self._rank)
        return [*self._on_peer_lost(now_ns, message.instance, message.incarnation), Send(sender, heard)]

    def _on_instance_lost(self, now_ns: int, sender: str, message: InstanceLost) -> list[Effect]:
        return self._on_peer_lost(now_ns, message.instance, message.incarnation)

    def _on_link_broken(self, now_ns: int, sender: str, message: PeerLost) -> list[Effect]:
        return self.source.on_link_broken(message.node) + self.target.on_link_broken(now_ns, message.node)

    def _on_peer_lost(self, now_ns: int, instance: str, incarnation: int) -> list[Effect]:
        link = self.links.find(instance, incarnation)
        if link is None or link.state is LinkState.LOST:
            return []
        self.links.lose(link)
        if not link.mapped:
            return []  # PeerMapped is on its way and ends it
        return self.target.on_peer_lost(now_ns, link) if link.peer_is_source else self.source.on_peer_lost(link)

    def _unmap_unused(self) -> list[Effect]:
        """Unmap lost peers to which nothing refers any more; called after every message while there are any."""
        effects: list[Effect] = []
        for link in [link for link in self.links.lost.values() if link.mapped and not link.users]:
            self.links.forget(link)
            fields = (("instance", link.instance), ("incarnation", link.incarnation))
            unmap = UnmapPeer(instance=link.instance, incarnation=link.incarnation)
            effects += [Note("info", "peer unmapped", fields), Run(unmap)]
        return effects

    def _linked(self, link: PeerLink) -> PeerLinked:
        return PeerLinked(instance=link.instance, incarnation=link.incarnation, rank=self.links.rank)

    def _link_failed(self, to: str, instance: str, incarnation: int, reason: str, *, final: bool = False) -> Send:
        rank = self.links.rank
        return Send(to, LinkFailed(instance=instance, incarnation=incarnation, rank=rank, reason=reason, final=final))
