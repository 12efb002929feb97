"""The source side of a rank: pushes chunks of KEY and VALUE to target ranks, layer by layer. Part of ``machine.py``.

Theory. A **push** is one request attempt toward one decode instance; it has a **lane** for every target rank that this
rank sends to. A chunk on a lane is written layer by layer, as the worker reports layers ready, while later layers still
compute; ``LayersArrived`` lets the target merge long ones at once. When all layers that the plan routes to that target
have been written, ``ChunkArrived`` tells the target so.

Flow control: chunk ``c`` of a staged lane may be written once the target said that chunk ``c - windows`` is merged;
what becomes ready before that waits and is then written in one go. Lanes in place need no leave.

States of a push (table in ``push.py``):

* ``open``: layers are written as they come;
* ``stopped``: a write failed or the target gave up. No write begins; those in flight end;
* ``closing``: the owner closed it, or the target's incarnation is dead, while writes were in flight. It is forgotten
  with the last of them.

``PushDrained`` answers an ``AbortPush`` when no write of that lane is in flight and none can begin. An attempt that was
never opened, or is over, is answered at once and remembered, so that a late ``OpenPush`` of it starts nothing.

Invariants: no write begins in ``stopped`` or ``closing``; a layer of a chunk is written at most once; ``ChunkArrived``
is sent at most once per chunk and lane, and only when every routed layer is written.
"""

from __future__ import annotations

from collections import OrderedDict

from actors.runtime.machine import Effect, Handlers, Note, Run, Send
from actors.transfer.attempts import Attempt, Tombstones
from actors.transfer.jobs import WriteJob
from actors.transfer.links import LinkTable, PeerLink
from actors.transfer.push import Chunk, Lane, Layer, Push, PushEvent, PushState
from actors.transfer.routes import TransferPlan
from messages.base import node_of, rank_address
from messages.transfer import (
    AbortPush,
    ChunkArrived,
    ChunkMerged,
    ClosePush,
    LayerReady,
    LayersArrived,
    OpenPush,
    PushClosed,
    PushDrained,
    PushFailed,
    WriteDone,
)

EARLY_BYTES_MIN = 1 << 20
"""Layers of a chunk that are written together and at least this long may be merged before the chunk is complete."""

READY_CHUNK_BYTES = 64 << 20
"""What is ready all at once is pushed in chunks of about this size per lane, where windows are that long: the messages
about a chunk cost as much as copying some 10 MiB, and the target still merges one chunk while the next is written."""

EARLY_ATTEMPTS_MAX = 64
"""Attempts whose layers may become ready before their ``OpenPush`` arrives; of more, the oldest are forgotten."""


class SourceMachine:
    """The pushes of one rank. Effects go to target transfers, the own engine and the own shell."""

    def __init__(self, instance: str, rank: int, incarnation: int, links: LinkTable) -> None:
        self._instance = instance
        self._rank = rank
        self._incarnation = incarnation
        self._links = links
        self._ended = Tombstones()
        self._early: OrderedDict[Attempt, list[LayerReady]] = OrderedDict()
        self.pushes: dict[Attempt, Push] = {}
        self.late_count = 0
        self.bytes_written = 0

    def handlers(self) -> Handlers[list[Effect]]:
        """What is done with messages about the attempts that this rank sends."""
        handlers: Handlers[list[Effect]] = Handlers()
        on = handlers.on
        on(OpenPush, self.on_open_push)
        on(LayerReady, self.on_layer_ready)
        on(WriteDone, self.on_write_done)
        on(ChunkMerged, self.on_chunk_merged)
        on(AbortPush, self.on_abort_push)
        on(ClosePush, self.on_close_push)
        return handlers

    # -- messages -------------------------------------------------------------------------------------------------

    def on_open_push(self, now_ns: int, sender: str, message: OpenPush) -> list[Effect]:
        """Begin an attempt; with ``ready_tokens``, push at once what the caches hold already."""
        attempt = (message.request_id, message.epoch)
        if attempt in self._ended or attempt in self.pushes:
            return self._late("OpenPush")
        link = self._links.usable(message.target_instance, message.target_incarnation)
        if link is None or link.peer_is_source:
            reason = f"no link with {message.target_instance} incarnation {message.target_incarnation}"
            return [self._failed(message, to, reason) for to in (sender, *_targets(message))]
        push = Push(message, sender, now_ns, link, {})
        if message.mode == "PUSH":
            for rank, plan in link.plans.items():
                lane = self._lane(message, rank, plan)
                if lane is None:
                    reason = f"no staging windows of rank {rank} for source rank {self._rank}"
                    return [self._failed(message, to, reason) for to in (sender, *_targets(message))]
                push.lanes[rank] = lane
        self.pushes[attempt] = push
        link.users.add(attempt)
        effects: list[Effect] = []
        for lane in push.lanes.values():
            effects += self._push_what_is_ready(push, lane)
        for early in self._early.pop(attempt, ()):
            effects += self._take_layer(early)
        return effects

    def on_layer_ready(self, now_ns: int, sender: str, message: LayerReady) -> list[Effect]:
        """Write one layer of one chunk to every target rank that the plan routes it to."""
        return self._take_layer(message)

    def _take_layer(self, message: LayerReady) -> list[Effect]:
        attempt = (message.request_id, message.epoch)
        push = self.pushes.get(attempt)
        if push is None and attempt not in self._ended:
            return self._keep_early(attempt, message)
        if push is None or push.state is not PushState.OPEN:
            return self._late("LayerReady")
        layer: Layer = (message.namespace, message.layer)
        effects: list[Effect] = []
        for lane in push.lanes.values():
            number = lane.numbers.setdefault(message.chunk_index, len(lane.chunks))
            chunk = lane.chunks.get(number)
            if chunk is None:
                if lane.windows and message.token_count > lane.plan.chunk_tokens_max:
                    reason = (
                        f"a chunk of {message.token_count} tokens does not fit a window of {lane.plan.chunk_tokens_max}"
                    )
                    return effects + self._stop(push, lane, reason)
                chunk = lane.chunks[number] = Chunk(message.token_start, message.token_count)
            if chunk.arrived:
                continue  # its window may have another chunk already
            if layer in lane.layers and layer not in chunk.seen:
                chunk.seen.add(layer)
                chunk.ready.append(layer)
            if message.is_last_layer:
                chunk.closed, chunk.with_draft = True, message.namespace == "draft"
            effects += self._write(push, lane, number)
            effects += self._arrive(push, lane, number)
        return effects

    def on_write_done(self, now_ns: int, sender: str, message: WriteDone) -> list[Effect]:
        """A write job ended."""
        push = self.pushes.get((message.request_id, message.epoch))
        lane = push.lanes.get(message.target_rank) if push else None
        chunk = lane.chunks.get(message.chunk_index) if lane else None
        if push is None or lane is None or chunk is None or message.part not in chunk.in_flight:
            return self._late("WriteDone")
        lane.in_flight -= 1
        written = chunk.in_flight.pop(message.part)
        chunk.bytes_written += message.bytes_written
        chunk.write_ms += message.write_ms
        self.bytes_written += message.bytes_written
        effects: list[Effect] = []
        if message.error and push.state is PushState.OPEN:
            effects += self._stop(push, lane, message.error)
        if push.state is PushState.OPEN:
            effects += self._arrive(push, lane, message.chunk_index)
            if not chunk.arrived and lane.windows and message.bytes_written >= EARLY_BYTES_MIN:
                effects.append(self._layers_arrived(push, lane, message.chunk_index, written))
        if lane.abort_asked_by and not lane.in_flight:
            effects.append(self._drained(push.attempt, lane.abort_asked_by))
        self._forget_if_over(push)
        return effects

    def on_chunk_merged(self, now_ns: int, sender: str, message: ChunkMerged) -> list[Effect]:
        """A window is free again: write what waited for it."""
        push = self.pushes.get((message.request_id, message.epoch))
        lane = push.lanes.get(message.target_rank) if push else None
        chunk = lane.chunks.get(message.chunk_index) if lane else None
        if push is None or lane is None or chunk is None or not chunk.arrived:
            return self._late("ChunkMerged")
        if message.generation != lane.generation or message.chunk_index in lane.merged:
            return self._late("ChunkMerged")
        lane.merged.add(message.chunk_index)
        return self._write(push, lane, message.chunk_index + len(lane.windows))

    def on_abort_push(self, now_ns: int, sender: str, message: AbortPush) -> list[Effect]:
        """Stop, and say when no write is in flight."""
        attempt = (message.request_id, message.epoch)
        push = self.pushes.get(attempt)
        if push is None:
            self._ended.add(attempt)
            self._early.pop(attempt, None)
            return [self._drained(attempt, sender)]
        push.advance(PushEvent.ABORTED)
        lane = push.lanes.get(message.target_rank)
        if lane is None or not lane.in_flight:
            return [self._drained(attempt, sender)]
        lane.abort_asked_by = sender
        return []

    def on_close_push(self, now_ns: int, sender: str, message: ClosePush) -> list[Effect]:
        """The hand-off is over."""
        attempt = (message.request_id, message.epoch)
        self._ended.add(attempt)
        self._early.pop(attempt, None)
        push = self.pushes.get(attempt)
        if push is not None:
            push.advance(PushEvent.CLOSED)
            self._forget_if_over(push)
        if attempt in self.pushes:
            return []  # a write still reads the source blocks; the engine asks again
        return [Send(sender, PushClosed(request_id=message.request_id, epoch=message.epoch, rank=self._rank))]

    def on_link_broken(self, node: str) -> list[Effect]:
        """What was told ``node``'s rank of an open push may not have reached it, and nothing of it is said twice: the
        attempt fails now, instead of at its timeout."""
        effects: list[Effect] = []
        for push in self.pushes.values():
            for lane in push.lanes.values():
                if push.state is PushState.OPEN and node_of(_target(push, lane)) == node:
                    effects += self._stop(push, lane, f"the link to {node} broke")
        return effects

    def on_peer_lost(self, link: PeerLink) -> list[Effect]:
        """The target's incarnation is dead: nothing more is written to it."""
        for push in [push for push in self.pushes.values() if push.link is link]:
            push.advance(PushEvent.PEER_LOST)
            self._forget_if_over(push)
        return []

    # -- helpers --------------------------------------------------------------------------------------------------

    def _keep_early(self, attempt: Attempt, message: LayerReady) -> list[Effect]:
        """The worker was faster than ``OpenPush``: keep what it said."""
        self._early.setdefault(attempt, []).append(message)
        while len(self._early) > EARLY_ATTEMPTS_MAX:
            self._early.popitem(last=False)
        return []

    def _lane(self, message: OpenPush, rank: int, plan: TransferPlan) -> Lane | None:
        """The lane to one target rank; None when the plan stages and the lease has no windows for this rank."""
        lease = next((lease for lease in message.leases if lease.target_rank == rank), None)
        sources = lease.sources if lease else ()
        windows = next((source.windows for source in sources if source.source_rank == self._rank), ())
        routes = plan.select(source_rank=self._rank, by_block=True)
        staged = any(not route.in_place for route in routes)
        if staged and not windows:
            return None
        return Lane(
            target_rank=rank,
            plan=plan,
            generation=lease.generation if lease else 0,
            windows=tuple(window.offset_bytes for window in windows) if staged else (),
            routes=routes,
            layers=frozenset((route.namespace, route.layer) for route in routes),
        )

    def _push_what_is_ready(self, push: Push, lane: Lane) -> list[Effect]:
        """Cut ``ready_tokens`` into chunks, all of whose layers are ready."""
        effects: list[Effect] = []
        ready = push.opened.ready_tokens
        size = ready
        if lane.windows:
            fitting = READY_CHUNK_BYTES // lane.token_bytes // lane.plan.block_size * lane.plan.block_size
            size = min(max(fitting, lane.plan.block_size), lane.plan.chunk_tokens_max)
        for index, start in enumerate(range(0, ready, max(1, size))):
            layers = sorted(lane.layers, key=lambda layer: (layer[0] != "target", layer[1]))
            lane.chunks[index] = Chunk(
                token_start=start,
                token_count=min(size, ready - start),
                ready=layers,
                seen=set(layers),
                closed=True,
                with_draft=True,
            )
            effects += self._write(push, lane, index)
        return effects

    def _write(self, push: Push, lane: Lane, chunk_index: int) -> list[Effect]:
        """Begin to write every ready layer of a chunk, if its window is free."""
        chunk = lane.chunks.get(chunk_index)
        if chunk is None or not chunk.ready or push.state is not PushState.OPEN or not lane.may_write(chunk_index):
            return []
        layers, chunk.ready = tuple(chunk.ready), []
        part, chunk.parts = chunk.parts, chunk.parts + 1
        chunk.in_flight[part] = layers
        lane.in_flight += 1
        opened = push.opened
        return [
            Run(
                WriteJob(
                    request_id=opened.request_id,
                    epoch=opened.epoch,
                    target_instance=opened.target_instance,
                    target_incarnation=opened.target_incarnation,
                    target_rank=lane.target_rank,
                    chunk_index=chunk_index,
                    part=part,
                    layers=layers,
                    token_start=chunk.token_start,
                    token_count=chunk.token_count,
                    source_block_ids=opened.source_block_ids,
                    target_block_ids=opened.target_block_ids,
                    window_offset=lane.windows[lane.window_index(chunk_index)] if lane.windows else -1,
                )
            )
        ]

    def _arrive(self, push: Push, lane: Lane, chunk_index: int) -> list[Effect]:
        """Tell the target once every layer that it must get of this chunk is written."""
        chunk = lane.chunks[chunk_index]
        needed = {layer for layer in lane.layers if layer[0] == "target" or chunk.with_draft}
        if chunk.arrived or not chunk.closed or chunk.in_flight or chunk.ready or not needed <= chunk.seen:
            return []
        chunk.arrived = True
        return [
            Send(
                _target(push, lane),
                ChunkArrived(
                    request_id=push.opened.request_id,
                    epoch=push.opened.epoch,
                    source_instance=self._instance,
                    source_incarnation=self._incarnation,
                    source_rank=self._rank,
                    chunk_index=chunk_index,
                    token_start=chunk.token_start,
                    token_count=chunk.token_count,
                    window_index=lane.window_index(chunk_index),
                    generation=lane.generation,
                    bytes_written=chunk.bytes_written,
                    push_ms=chunk.write_ms,
                    has_draft=chunk.with_draft,
                ),
            )
        ]

    def _layers_arrived(self, push: Push, lane: Lane, chunk_index: int, layers: tuple[Layer, ...]) -> Send:
        chunk = lane.chunks[chunk_index]
        return Send(
            _target(push, lane),
            LayersArrived(
                request_id=push.opened.request_id,
                epoch=push.opened.epoch,
                source_instance=self._instance,
                source_incarnation=self._incarnation,
                source_rank=self._rank,
                chunk_index=chunk_index,
                token_start=chunk.token_start,
                token_count=chunk.token_count,
                generation=lane.generation,
                layers=layers,
            ),
        )

    def _stop(self, push: Push, lane: Lane, reason: str) -> list[Effect]:
        """A lane cannot go on: the whole attempt stops, its engine and that target learn why."""
        push.advance(PushEvent.WRITE_FAILED)
        target = _target(push, lane)
        return [
            Note("warning", "push failed", (("request", push.opened.request_id), ("reason", reason))),
            self._failed(push.opened, target, reason),
            self._failed(push.opened, push.engine, reason),
        ]

    def _forget_if_over(self, push: Push) -> None:
        if push.state is PushState.CLOSING and not push.in_flight:
            del self.pushes[push.attempt]
            self._ended.add(push.attempt)
            push.link.users.discard(push.attempt)

    def _failed(self, message: OpenPush, to: str, reason: str) -> Send:
        return Send(
            to,
            PushFailed(
                request_id=message.request_id,
                epoch=message.epoch,
                source_rank=self._rank,
                target_instance=message.target_instance,
                reason=reason,
            ),
        )

    def _drained(self, attempt: Attempt, to: str) -> Send:
        return Send(
            to,
            PushDrained(
                request_id=attempt[0],
                epoch=attempt[1],
                source_instance=self._instance,
                source_incarnation=self._incarnation,
                source_rank=self._rank,
            ),
        )

    def _late(self, what: str) -> list[Effect]:
        self.late_count += 1
        return [Note("debug", "late message ignored", (("message", what),))]


def _target(push: Push, lane: Lane) -> str:
    """Address of the target rank of a lane."""
    return rank_address(push.opened.target_instance, lane.target_rank, "transfer")


def _targets(message: OpenPush) -> list[str]:
    """Addresses of the target ranks that a push names."""
    return [rank_address(message.target_instance, lease.target_rank, "transfer") for lease in message.leases]
