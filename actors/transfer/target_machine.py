"""The target side of a rank: receives pushed chunks, pulls the rest, reports restores, drains. Part of ``machine.py``.

Theory. One ``Receive`` per request attempt (states and table in ``receive.py``):

* ``opening``: waits for its staging lease, if any route of the plan goes through staging;
* ``open``: chunks arrive. What all its sources have written of a chunk is merged (``Restore`` to the staging actor),
  large layers one by one as they land (``LayersArrived``), the rest when the chunk is complete (``ChunkArrived``); in
  place there is nothing to merge. ``ChunkMerged`` gives the windows of a merged chunk back to the sources;
* ``restoring``: ``PullKVCache`` came. SSM and CONV are pulled at once, in parallel over sources or one after another;
  draft KV that did not travel with the chunks (and in PULL mode target KV) window by window. When chunks cover all
  computed tokens and all pieces are in place, ``Restored`` says so, after ``verifying`` if that was asked for;
* ``failed``: a push, pull or merge failed. The engine was told; nothing is read or merged any more;
* ``draining``: the attempt was given up. Every source that may still write is told ``AbortPush`` and must answer
  ``PushDrained`` or be known dead; own reads in flight end. Time alone never ends it: unanswered, it asks again;
* ``freeing``: nobody writes; the staging actor still must confirm that no merge runs. Then ``ReceiveReleased``.

Invariants: a lease is given back only when ``undrained`` is empty and no own job is in flight; ``Restored`` and
``RestoreFailed`` are sent at most once per attempt, never both; an attempt that was refused or released never
opens again under the same epoch; two attempts share nothing but the merge queue. Late messages (unknown attempt, other
incarnation, other generation, state that no longer waits for them) change nothing and are counted.
"""

from __future__ import annotations

from actors.runtime.machine import Effect, Handlers, Note, Run, Send, StartTimer, StopTimer
from actors.transfer import receive_messages as says
from actors.transfer.attempts import Attempt, Tombstones
from actors.transfer.links import LinkState, LinkTable, PeerLink
from actors.transfer.receive import RECEIVING, VERIFY_JOB, ArrivingChunk, Layer, Receive, ReceiveEvent, ReceiveState
from actors.transfer.restore import Pulls
from messages.base import node_of, rank_address
from messages.timers import RequestTimer
from messages.transfer import (
    ChunkArrived,
    FreeLease,
    LayersArrived,
    LeaseFreed,
    LeaseGranted,
    LeaseRefused,
    Merged,
    MergeFailed,
    OpenReceive,
    PullDone,
    PullKVCache,
    PushDrained,
    PushFailed,
    ReceiveRefused,
    ReceiveReleased,
    ReleaseReceive,
    RestoreFailed,
    VerifyDone,
)

NUDGE_MS = 1000.0
"""How often an unanswered request to stop writing, or to free a lease, is repeated."""


class TargetMachine:
    """The receives of one rank. Effects go to source transfers, the own staging actor, engine and shell."""

    def __init__(self, node: str, rank: int, links: LinkTable, *, windows: int, parallel: bool, verify: bool) -> None:
        self._rank = rank
        self._staging = f"{node}/staging"
        self._links = links
        self._windows = windows
        self._parallel = parallel
        self._verify = verify
        self._ended = Tombstones()
        self.receives: dict[Attempt, Receive] = {}
        self.late_count = 0
        self.restored_count = 0
        self.bytes_received = 0

    def handlers(self) -> Handlers[list[Effect]]:
        """What is done with messages about the attempts that this rank receives."""
        handlers: Handlers[list[Effect]] = Handlers()
        on = handlers.on
        on(OpenReceive, self.on_open_receive)
        on(LeaseGranted, self.on_lease_granted)
        on(LeaseRefused, self.on_lease_refused)
        on(ChunkArrived, self.on_chunk_arrived)
        on(LayersArrived, self.on_layers_arrived)
        on(PushFailed, self.on_push_failed)
        on(Merged, self.on_merged)
        on(MergeFailed, self.on_merge_failed)
        on(PullKVCache, self.on_pull_kv_cache)
        on(PullDone, self.on_pull_done)
        on(VerifyDone, self.on_verify_done)
        on(ReleaseReceive, self.on_release_receive)
        on(PushDrained, self.on_push_drained)
        on(LeaseFreed, self.on_lease_freed)
        on(RequestTimer, self.on_nudge)
        return handlers

    # -- opening --------------------------------------------------------------------------------------------------

    def on_open_receive(self, now_ns: int, sender: str, message: OpenReceive) -> list[Effect]:
        """Begin an attempt."""
        attempt = (message.request_id, message.epoch)
        known = self.receives.get(attempt)
        if known is not None:
            return self._opened(known) if known.state is ReceiveState.OPEN else self._late("OpenReceive")
        link = self._links.usable(message.source_instance, message.source_incarnation)
        if attempt in self._ended:
            return [self._refused(attempt, sender, "this attempt was refused or released before")]
        if link is None or not link.peer_is_source:
            self._ended.add(attempt)  # refused once, refused for good: its double must not open it
            reason = f"no link with {message.source_instance} incarnation {message.source_incarnation}"
            return [self._refused(attempt, sender, reason)]
        receive = Receive(message, sender, now_ns, link, link.plans[self._rank])
        self.receives[attempt] = receive
        link.users.add(attempt)
        if receive.plan.windows:
            receive.awaits_grant = True
            return [self._grant_lease(receive)]
        receive.advance(ReceiveEvent.LEASED)
        return self._opened(receive)

    def on_lease_granted(self, now_ns: int, sender: str, message: LeaseGranted) -> list[Effect]:
        """The staging actor's yes. A lease that nobody waits for is given back at once."""
        receive = self.receives.get((message.request_id, message.epoch))
        if receive is not None and receive.lease is not None and receive.generation == message.lease.generation:
            return self._late("LeaseGranted")
        if receive is None or not receive.awaits_grant:
            self.late_count += 1
            return [self._free_lease((message.request_id, message.epoch), message.lease.generation)]
        receive.awaits_grant = False
        receive.lease = message.lease
        if receive.state is ReceiveState.OPENING:
            receive.advance(ReceiveEvent.LEASED)
            return self._opened(receive)
        return self._settle(now_ns, receive)

    def on_lease_refused(self, now_ns: int, sender: str, message: LeaseRefused) -> list[Effect]:
        """The staging actor's no."""
        receive = self.receives.get((message.request_id, message.epoch))
        if receive is None or not receive.awaits_grant:
            return self._late("LeaseRefused")
        receive.awaits_grant = False
        if receive.state is ReceiveState.OPENING:
            self._forget(receive)
            self._ended.add(receive.attempt)
            return [self._refused(receive.attempt, receive.engine, message.reason)]
        return self._settle(now_ns, receive)

    # -- arriving -------------------------------------------------------------------------------------------------

    def on_chunk_arrived(self, now_ns: int, sender: str, message: ChunkArrived) -> list[Effect]:
        """One source rank has written all its layers of one chunk."""
        receive = self._current(message.request_id, message.epoch, message.source_instance, message.source_incarnation)
        if receive is None or receive.state not in RECEIVING or message.generation != receive.generation:
            return self._late("ChunkArrived")
        if message.source_rank not in receive.plan.push_ranks or receive.opened.mode != "PUSH":
            return self._late("ChunkArrived")
        chunk = receive.chunks.setdefault(message.chunk_index, ArrivingChunk(message.token_start, message.token_count))
        if message.source_rank in chunk.arrived:
            return self._late("ChunkArrived")
        if (chunk.token_start, chunk.token_count) != (message.token_start, message.token_count):
            return self._break(now_ns, receive, f"the sources disagree on the tokens of chunk {message.chunk_index}")
        chunk.arrived[message.source_rank] = message.window_index >= 0
        chunk.with_draft = chunk.with_draft and message.has_draft
        chunk.push_ms = max(chunk.push_ms, message.push_ms)
        receive.bytes_pushed += message.bytes_written
        if len(chunk.arrived) < len(receive.plan.push_ranks):
            return []
        came = [layer for layer in receive.plan.staged_layers if layer[0] == "target" or chunk.with_draft]
        return self._merge_layers(
            receive, message.chunk_index, [layer for layer in came if layer not in chunk.asked]
        ) or (self._chunk_goes_on(now_ns, receive, message.chunk_index))

    def on_layers_arrived(self, now_ns: int, sender: str, message: LayersArrived) -> list[Effect]:
        """One source rank has written some layers of a chunk: merge those that all sources have written."""
        receive = self._current(message.request_id, message.epoch, message.source_instance, message.source_incarnation)
        if receive is None or receive.state not in RECEIVING or message.generation != receive.generation:
            return self._late("LayersArrived")
        chunk = receive.chunks.setdefault(message.chunk_index, ArrivingChunk(message.token_start, message.token_count))
        if message.source_rank in chunk.arrived or chunk.token_count != message.token_count:
            return self._late("LayersArrived")
        ready = []
        for layer in message.layers:
            sources = chunk.early.setdefault(layer, set())
            sources.add(message.source_rank)
            if layer not in chunk.asked and sources >= receive.plan.staged_layers.get(layer, {-1}):
                ready.append(layer)
        return self._merge_layers(receive, message.chunk_index, ready)

    def on_push_failed(self, now_ns: int, sender: str, message: PushFailed) -> list[Effect]:
        """A source rank cannot send this attempt."""
        receive = self.receives.get((message.request_id, message.epoch))
        expected = rank_address(receive.opened.source_instance, message.source_rank, "transfer") if receive else ""
        if receive is None or sender != expected or receive.state not in RECEIVING:
            return self._late("PushFailed")
        if receive.opened.mode == "PUSH" and receive.pull is not None and receive.covered:
            return self._late("PushFailed")  # it does not matter: everything has arrived
        return self._break(now_ns, receive, f"source rank {message.source_rank} could not push: {message.reason}")

    def on_merged(self, now_ns: int, sender: str, message: Merged) -> list[Effect]:
        """The staging actor merged a piece."""
        receive = self.receives.get((message.request_id, message.epoch))
        if receive is None or message.generation != receive.generation or receive.state not in RECEIVING:
            return self._late("Merged")
        effects: list[Effect] = []
        if message.kind == "chunk":
            chunk = receive.chunks.get(message.piece_index)
            if chunk is None or message.part not in chunk.merging:
                return self._late("Merged")
            chunk.merging.discard(message.part)
            effects += self._chunk_goes_on(now_ns, receive, message.piece_index)
        elif receive.pulls is None or not receive.pulls.merged(message.kind, message.piece_index):
            return self._late("Merged")
        receive.merge_ms += message.merge_ms
        receive.sync_ms += message.sync_ms
        return effects if message.kind == "chunk" else self._settle(now_ns, receive)

    def on_merge_failed(self, now_ns: int, sender: str, message: MergeFailed) -> list[Effect]:
        """The staging actor could not merge a piece."""
        receive = self.receives.get((message.request_id, message.epoch))
        if receive is None or message.generation != receive.generation or receive.state not in RECEIVING:
            return self._late("MergeFailed")
        return self._break(now_ns, receive, f"merge of {message.kind} {message.piece_index} failed: {message.reason}")

    def _merge_layers(self, receive: Receive, index: int, layers: list[Layer]) -> list[Effect]:
        """Have these layers of a chunk merged, if there are any."""
        if not layers:
            return []
        return [Send(self._staging, says.restore_chunk(receive, index, receive.chunks[index], self._windows, layers))]

    def _chunk_goes_on(self, now_ns: int, receive: Receive, index: int) -> list[Effect]:
        """A chunk that all sources have written, and whose merges have ended, is done: its windows are free."""
        chunk = receive.chunks[index]
        if len(chunk.arrived) < len(receive.plan.push_ranks) or chunk.merging:
            return []
        chunk.done = True
        merged = says.chunk_merged(receive, self._rank, index)
        told: list[Effect] = [
            Send(self._source(receive, rank), merged) for rank, staged in chunk.arrived.items() if staged
        ]
        return told + self._settle(now_ns, receive)

    # -- restoring ------------------------------------------------------------------------------------------------

    def on_pull_kv_cache(self, now_ns: int, sender: str, message: PullKVCache) -> list[Effect]:
        """Restore now: pull what was not pushed."""
        receive = self._current(message.request_id, message.epoch, message.source_instance, message.source_incarnation)
        if receive is None or not receive.allows(ReceiveEvent.PULL_ASKED):
            return self._late("PullKVCache")
        receive.advance(ReceiveEvent.PULL_ASKED)
        receive.pull = message
        receive.pull_began_ns = receive.pull_ended_ns = now_ns
        receive.pulls = Pulls(receive.plan, self._windows)
        receive.pulls.add_state()
        if receive.opened.mode == "PULL":
            receive.draft_planned = True
            receive.pulls.add_tokens("target", [(0, message.computed_tokens)])
            receive.pulls.add_tokens("draft", [(0, message.computed_tokens)])
        return self._settle(now_ns, receive)

    def on_pull_done(self, now_ns: int, sender: str, message: PullDone) -> list[Effect]:
        """A read of ours ended."""
        receive = self.receives.get((message.request_id, message.epoch))
        job = (message.kind, message.piece_index, message.source_rank)
        if receive is None or receive.pulls is None or job not in receive.jobs:
            return self._late("PullDone")
        receive.jobs.discard(job)
        receive.bytes_pulled += message.bytes_read
        receive.pull_ended_ns = now_ns
        if receive.state is not ReceiveState.RESTORING:
            return self._settle(now_ns, receive)
        if message.error:
            return self._break(now_ns, receive, f"pull of {message.kind} failed: {message.error}")
        piece = receive.pulls.pulled(message.kind, message.piece_index, message.source_rank)
        effects: list[Effect] = [Send(self._staging, says.restore_piece(receive, piece))] if piece is not None else []
        return effects + self._settle(now_ns, receive)

    def on_verify_done(self, now_ns: int, sender: str, message: VerifyDone) -> list[Effect]:
        """The restored caches were compared with their sources."""
        receive = self.receives.get((message.request_id, message.epoch))
        if receive is None or VERIFY_JOB not in receive.jobs:
            return self._late("VerifyDone")
        receive.jobs.discard(VERIFY_JOB)
        if receive.state is not ReceiveState.VERIFYING:
            return self._settle(now_ns, receive)
        if message.error:
            return self._break(now_ns, receive, f"the restored caches differ: {message.error}")
        receive.verified_bytes = message.bytes_compared
        return self._complete(receive)

    # -- ending ---------------------------------------------------------------------------------------------------

    def on_release_receive(self, now_ns: int, sender: str, message: ReleaseReceive) -> list[Effect]:
        """Give the attempt up; answered with ``ReceiveReleased`` once nobody writes or reads for it."""
        attempt = (message.request_id, message.epoch)
        receive = self.receives.get(attempt)
        if receive is None:
            self._ended.add(attempt)
            return [self._released(attempt, sender)]
        receive.released_to = sender
        if not receive.allows(ReceiveEvent.RELEASE_ASKED):
            return []  # on its way already
        writers_know = receive.state is not ReceiveState.OPENING
        receive.advance(ReceiveEvent.RELEASE_ASKED)
        if receive.state is ReceiveState.FREEING:
            return []  # restored: only the lease is still being freed
        receive.pull_queue.clear()
        if writers_know and receive.opened.mode == "PUSH" and receive.link.state is not LinkState.LOST:
            receive.undrained = set(receive.plan.push_ranks)
        return [*self._aborts(receive), self._nudge_later(receive), *self._settle(now_ns, receive)]

    def on_push_drained(self, now_ns: int, sender: str, message: PushDrained) -> list[Effect]:
        """A source rank has stopped writing for this attempt."""
        receive = self._current(message.request_id, message.epoch, message.source_instance, message.source_incarnation)
        if receive is None or message.source_rank not in receive.undrained:
            return self._late("PushDrained")
        receive.undrained.discard(message.source_rank)
        return self._settle(now_ns, receive)

    def on_lease_freed(self, now_ns: int, sender: str, message: LeaseFreed) -> list[Effect]:
        """No merge of this lease runs any more: the attempt is over on this rank."""
        receive = self.receives.get((message.request_id, message.epoch))
        over = receive is not None and receive.state in (ReceiveState.RESTORED, ReceiveState.FREEING)
        if receive is None or not over or message.generation != receive.generation:
            return self._late("LeaseFreed")
        return self._end(receive)

    def on_nudge(self, now_ns: int, sender: str, message: RequestTimer) -> list[Effect]:
        """Ask again whoever has not answered yet."""
        receive = self.receives.get((message.request_id, message.epoch))
        if receive is None:
            return []
        effects = self._aborts(receive)
        if receive.awaits_grant:
            effects.append(self._grant_lease(receive))
        if receive.state in (ReceiveState.RESTORED, ReceiveState.FREEING):
            effects.append(self._free_lease(receive.attempt, receive.generation))
        return [*effects, self._nudge_later(receive)]

    def on_link_broken(self, now_ns: int, node: str) -> list[Effect]:
        """A source rank may wait for a window that it was told is free: attempts that still need chunks of it fail now,
        instead of at their timeout."""
        effects: list[Effect] = []
        for receive in self.receives.values():
            waits = receive.state in RECEIVING and receive.opened.mode == "PUSH" and not receive.covered
            sources = receive.plan.push_ranks if waits else ()
            if node in [node_of(self._source(receive, rank)) for rank in sources]:
                effects += self._break(now_ns, receive, f"the link to {node} broke")
        return effects

    def on_peer_lost(self, now_ns: int, link: PeerLink) -> list[Effect]:
        """The source's incarnation is dead: it writes nothing any more, and what is missing never comes."""
        effects: list[Effect] = []
        for receive in [receive for receive in self.receives.values() if receive.link is link]:
            receive.undrained.clear()
            reason = f"{link.instance} incarnation {link.incarnation} is lost"
            if receive.state is ReceiveState.OPENING:
                receive.advance(ReceiveEvent.RELEASE_ASKED)
                effects += [self._refused(receive.attempt, receive.engine, reason), self._nudge_later(receive)]
            elif receive.state in RECEIVING:
                effects += self._break(now_ns, receive, reason)
            effects += self._settle(now_ns, receive)
        return effects

    # -- what follows from a change -------------------------------------------------------------------------------

    def _settle(self, now_ns: int, receive: Receive) -> list[Effect]:
        """Do what the attempt's state now allows."""
        if receive.state is ReceiveState.RESTORING:
            return self._go_on(receive)
        idle = not receive.undrained and not receive.jobs and not receive.awaits_grant
        if receive.state is ReceiveState.DRAINING and idle:
            receive.advance(ReceiveEvent.DRAINED)
            if receive.lease is None:
                return self._end(receive)
            return [self._free_lease(receive.attempt, receive.generation)]
        return []

    def _go_on(self, receive: Receive) -> list[Effect]:
        """Restoring: begin the pulls that may begin, or finish."""
        pulls, pull = receive.pulls, receive.pull
        if pulls is None or pull is None:
            return []
        if receive.covered and not receive.draft_planned:
            receive.draft_planned = True
            without = [chunk for chunk in receive.chunks.values() if not chunk.with_draft]
            pulls.add_tokens("draft", [(chunk.token_start, chunk.token_count) for chunk in without])
        for piece, source in pulls.begin(windows_are_ours=receive.covered):
            receive.pull_queue.append(says.pull_job(receive, piece, source))
        effects: list[Effect] = []
        while receive.pull_queue and (self._parallel or not receive.jobs):
            job = receive.pull_queue.popleft()
            receive.jobs.add((job.kind, job.piece_index, job.source_rank))
            effects.append(Run(job))
        if not receive.covered or not pulls.done or receive.jobs:
            return effects
        if not self._verify:
            return effects + self._complete(receive)
        receive.advance(ReceiveEvent.VERIFY_BEGINS)
        receive.jobs.add(VERIFY_JOB)
        return [*effects, Run(says.verify_job(receive))]

    def _complete(self, receive: Receive) -> list[Effect]:
        """Everything is in its final place."""
        receive.advance(ReceiveEvent.COMPLETED)
        self.restored_count += 1
        self.bytes_received += receive.bytes_pushed + receive.bytes_pulled
        effects: list[Effect] = [Send(receive.engine, says.restored(receive, self._rank))]
        if receive.lease is None:
            return effects + self._end(receive)
        return [*effects, self._free_lease(receive.attempt, receive.generation), self._nudge_later(receive)]

    def _break(self, now_ns: int, receive: Receive, reason: str) -> list[Effect]:
        """The attempt cannot be restored here."""
        receive.advance(ReceiveEvent.BROKE)
        receive.pull_queue.clear()
        request_id, epoch = receive.attempt
        failed = RestoreFailed(request_id=request_id, epoch=epoch, rank=self._rank, reason=reason)
        note = Note("warning", "restore failed", (("request", request_id), ("rank", self._rank), ("reason", reason)))
        return [note, Send(receive.engine, failed)]

    def _end(self, receive: Receive) -> list[Effect]:
        """Nothing of this attempt is left on this rank."""
        self._forget(receive)
        self._ended.add(receive.attempt)
        effects: list[Effect] = [StopTimer(_nudge_key(receive))]
        if receive.released_to:
            effects.append(self._released(receive.attempt, receive.released_to))
        return effects

    def _forget(self, receive: Receive) -> None:
        del self.receives[receive.attempt]
        receive.link.users.discard(receive.attempt)

    def _current(self, request_id: str, epoch: int, instance: str, incarnation: int) -> Receive | None:
        """The attempt, if the message comes from (or names) the very life of the source that it was opened for."""
        receive = self.receives.get((request_id, epoch))
        return receive if receive is not None and receive.link.key == (instance, incarnation) else None

    # -- helpers --------------------------------------------------------------------------------------------------

    def _opened(self, receive: Receive) -> list[Effect]:
        return [Send(receive.engine, says.opened(receive, self._rank))]

    def _refused(self, attempt: Attempt, to: str, reason: str) -> Send:
        return Send(to, ReceiveRefused(request_id=attempt[0], epoch=attempt[1], rank=self._rank, reason=reason))

    def _released(self, attempt: Attempt, to: str) -> Send:
        return Send(to, ReceiveReleased(request_id=attempt[0], epoch=attempt[1], rank=self._rank))

    def _grant_lease(self, receive: Receive) -> Send:
        return Send(self._staging, says.grant_lease(receive, self._windows))

    def _free_lease(self, attempt: Attempt, generation: int) -> Send:
        return Send(self._staging, FreeLease(request_id=attempt[0], epoch=attempt[1], generation=generation))

    def _aborts(self, receive: Receive) -> list[Effect]:
        abort = says.abort_push(receive, self._rank)
        return [Send(self._source(receive, rank), abort) for rank in sorted(receive.undrained)]

    def _source(self, receive: Receive, source_rank: int) -> str:
        return rank_address(receive.opened.source_instance, source_rank, "transfer")

    def _nudge_later(self, receive: Receive) -> StartTimer:
        request_id, epoch = receive.attempt
        timer = RequestTimer(request_id=request_id, epoch=epoch, purpose="nudge")
        return StartTimer(_nudge_key(receive), NUDGE_MS, timer)

    def _late(self, what: str) -> list[Effect]:
        self.late_count += 1
        return [Note("debug", "late message ignored", (("message", what),))]


def _nudge_key(receive: Receive) -> tuple[str | int, ...]:
    return ("nudge", *receive.attempt)
