"""The conversation about moving caches: engine ↔ transfer ↔ staging, and transfer ↔ transfer across instances.

Naming: *source* is the prefill rank that holds the shards, *target* the decode rank that receives them.
"""

from __future__ import annotations

from typing import Literal

from messages.base import Message
from messages.handoff import RankLease, TransferMode
from messages.layout import Namespace, RegionDescriptor

# -- leases: D scheduler → D engine → staging of every rank ------------------------------------------------------


class ReserveLeases(Message, frozen=True, kw_only=True):
    """D scheduler → D engine: a staging lease on every rank for this attempt, and open the receiving side."""

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    mode: TransferMode
    target_block_ids: tuple[int, ...]
    target_slot: int
    prompt_tokens: int


class LeasesReserved(Message, frozen=True, kw_only=True):
    """D engine → D scheduler: all ranks granted."""

    request_id: str
    epoch: int
    leases: tuple[RankLease, ...]


class LeasesRefused(Message, frozen=True, kw_only=True):
    """D engine → D scheduler: at least one rank had no room (the others were given back) or the link is not up."""

    request_id: str
    epoch: int
    reason: str


class OpenReceive(Message, frozen=True, kw_only=True):
    """D engine → D transfer of one rank: expect this attempt's chunks; get a staging lease if a route needs one."""

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    mode: TransferMode
    target_block_ids: tuple[int, ...]
    target_slot: int
    prompt_tokens: int


class ReceiveOpened(Message, frozen=True, kw_only=True):
    """D transfer → D engine."""

    request_id: str
    epoch: int
    rank: int
    lease: RankLease


class ReceiveRefused(Message, frozen=True, kw_only=True):
    """D transfer → D engine."""

    request_id: str
    epoch: int
    rank: int
    reason: str


class GrantLease(Message, frozen=True, kw_only=True):
    """D transfer → D staging: ``window_count`` windows of ``window_bytes[i]`` bytes for each ``source_ranks[i]``."""

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    source_ranks: tuple[int, ...]
    window_bytes: tuple[int, ...]
    window_count: int


class LeaseGranted(Message, frozen=True, kw_only=True):
    """D staging → D transfer."""

    request_id: str
    epoch: int
    lease: RankLease


class LeaseRefused(Message, frozen=True, kw_only=True):
    """D staging → D transfer: no room now."""

    request_id: str
    epoch: int
    reason: str


class FreeLease(Message, frozen=True, kw_only=True):
    """D transfer → D staging: every writer of this lease has stopped (or its incarnation is dead)."""

    request_id: str
    epoch: int
    generation: int


class LeaseFreed(Message, frozen=True, kw_only=True):
    """D staging → D transfer: no merge of this lease runs or will run, its rows may have another owner."""

    request_id: str
    epoch: int
    generation: int


class StagingReady(Message, frozen=True, kw_only=True):
    """D transfer → D staging, once: the staging region exists and is this large."""

    region: RegionDescriptor


# -- pushing: P engine → P transfers, worker → transfer, P transfer → D transfer ---------------------------------


class OpenPush(Message, frozen=True, kw_only=True):
    """P scheduler → P engine → every P transfer: where this attempt's chunks go.

    ``ready_tokens`` > 0: these tokens are already in the source caches (a re-offer after a lost D): push them now as
    one or more chunks, numbered from 0, without any ``LayerReady``.
    """

    request_id: str
    epoch: int
    target_instance: str
    target_incarnation: int
    mode: TransferMode
    source_block_ids: tuple[int, ...]
    source_slot: int
    target_block_ids: tuple[int, ...]
    target_slot: int
    leases: tuple[RankLease, ...]
    ready_tokens: int = 0


class LayerReady(Message, frozen=True, kw_only=True):
    """P worker → its transfer actor: layer ``layer`` of this chunk is computed and synchronised.

    The chunk is tokens ``[token_start, token_start+token_count)``; ``is_last_layer`` and ``is_last_chunk`` close it.
    ``layer`` counts within ``namespace``. A worker that fills its draft cache chunk by chunk says so with
    ``namespace="draft"``, and marks the draft layer (not the last target layer) as the last: the draft KV then travels
    with the chunks, and the restore time does not grow with the prompt. Otherwise D pulls it at the end.
    """

    request_id: str
    epoch: int
    chunk_index: int
    layer: int
    token_start: int
    token_count: int
    is_last_layer: bool
    is_last_chunk: bool
    namespace: Namespace = "target"


class ChunkArrived(Message, frozen=True, kw_only=True):
    """P transfer → D transfer: all layers of this chunk from this source rank are written.

    ``window_index`` is the lease window they lie in, -1 when they were written in place.
    """

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    source_rank: int
    chunk_index: int
    token_start: int
    token_count: int
    window_index: int
    generation: int
    bytes_written: int
    push_ms: float = 0.0
    has_draft: bool = False  # the draft KV of these tokens came along


class LayersArrived(Message, frozen=True, kw_only=True):
    """P transfer → D transfer: these layers of a chunk from this source rank lie in its window; more will follow.

    D may merge them before ``ChunkArrived`` completes the chunk: while later layers compute, and before the bytes have
    left the cache. Sent only for pieces that are worth a message; if it is lost, ``ChunkArrived`` covers it.
    """

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    source_rank: int
    chunk_index: int
    token_start: int
    token_count: int
    generation: int
    layers: tuple[tuple[Namespace, int], ...]


class ChunkMerged(Message, frozen=True, kw_only=True):
    """D transfer → P transfer: the window of this chunk may be written again."""

    request_id: str
    epoch: int
    target_rank: int
    chunk_index: int
    generation: int


class PushFailed(Message, frozen=True, kw_only=True):
    """P transfer → D transfer and P engine: a write failed; this attempt cannot be restored there."""

    request_id: str
    epoch: int
    source_rank: int
    target_instance: str
    reason: str


class ClosePush(Message, frozen=True, kw_only=True):
    """P scheduler → P engine → every P transfer: the hand-off is over, forget it (nothing is in flight)."""

    request_id: str
    epoch: int


class PushClosed(Message, frozen=True, kw_only=True):
    """P transfer → P engine, and (rank -1, once all ranks said so) P engine → P scheduler: the push is over and none of
    its writes is in flight, so nothing of it reads the source blocks. The engine repeats ``ClosePush`` until then."""

    request_id: str
    epoch: int
    rank: int


class AbortPush(Message, frozen=True, kw_only=True):
    """D transfer → P transfer: stop writing for this attempt and say when you have. Also remembered for a push that
    was never opened, so that a late ``OpenPush`` of this epoch starts nothing."""

    request_id: str
    epoch: int
    target_instance: str
    target_rank: int


class PushDrained(Message, frozen=True, kw_only=True):
    """P transfer → D transfer: no write of this attempt is in flight, none will start."""

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    source_rank: int


# -- restoring: D scheduler → D engine → D transfers ↔ staging ------------------------------------------------------


class PullKVCache(Message, frozen=True, kw_only=True):
    """D scheduler → D engine → every D transfer: restore now."""

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    source_block_ids: tuple[int, ...]
    source_slot: int
    chunk_count: int
    computed_tokens: int


class Restore(Message, frozen=True, kw_only=True):
    """D transfer → D staging: merge what lies in these windows into the final blocks or slot.

    ``kind``: "chunk" (target KEY/VALUE of one chunk), "conv", "draft", "target" (a pulled piece of target KEY/VALUE).
    """

    request_id: str
    epoch: int
    generation: int
    kind: Literal["chunk", "conv", "draft", "target"]
    piece_index: int
    window_index: int
    token_start: int
    token_count: int
    target_block_ids: tuple[int, ...]
    target_slot: int
    with_draft: bool = False  # a chunk that brought its draft KV along
    part: int = 0  # counts the merges of one piece
    layers: tuple[tuple[Namespace, int], ...] = ()  # of a chunk; empty: all that came


class Merged(Message, frozen=True, kw_only=True):
    """D staging → D transfer: that piece is in its final place and the device is synchronised."""

    request_id: str
    epoch: int
    generation: int
    kind: Literal["chunk", "conv", "draft", "target"]
    piece_index: int
    merge_ms: float
    sync_ms: float = 0.0
    part: int = 0


class MergeFailed(Message, frozen=True, kw_only=True):
    """D staging → D transfer."""

    request_id: str
    epoch: int
    generation: int
    kind: Literal["chunk", "conv", "draft", "target"]
    piece_index: int
    reason: str
    part: int = 0


class Restored(Message, frozen=True, kw_only=True):
    """D transfer → D engine: this rank's caches are complete, merged and synchronised."""

    request_id: str
    epoch: int
    rank: int
    bytes_moved: int
    push_ms: float
    pull_ms: float
    merge_ms: float
    sync_ms: float
    bytes_by_role: tuple[tuple[str, int], ...] = ()  # "target.KEY" … "draft.VALUE" → bytes that crossed, both ways
    verified_bytes: int = 0  # with --verify-handoffs: bytes read again from the sources and found equal


class RestoreFailed(Message, frozen=True, kw_only=True):
    """D transfer → D engine → D scheduler: this rank cannot restore this attempt."""

    request_id: str
    epoch: int
    rank: int
    reason: str


class AllRestored(Message, frozen=True, kw_only=True):
    """D engine → D scheduler: every rank restored."""

    request_id: str
    epoch: int
    bytes_moved: int
    push_ms: float
    pull_ms: float
    merge_ms: float
    sync_ms: float
    bytes_by_role: tuple[tuple[str, int], ...] = ()  # "target.KEY" … "draft.VALUE" → bytes that crossed, both ways
    verified_bytes: int = 0  # with --verify-handoffs: bytes read again from the sources and found equal


class ReleaseReceive(Message, frozen=True, kw_only=True):
    """D scheduler → D engine → every D transfer: give up this attempt; drain its writers, free its lease."""

    request_id: str
    epoch: int


class ReceiveReleased(Message, frozen=True, kw_only=True):
    """D transfer → D engine, and (rank -1, once all ranks said so) D engine → D scheduler: no writer and no reader of
    this attempt is left, its target blocks may have another owner."""

    request_id: str
    epoch: int
    rank: int


# -- results of jobs: from an actor's shell back to the actor itself ----------------------------------------------


class PeerMapped(Message, frozen=True, kw_only=True):
    """Transfer to itself: the peer's regions are mapped, or ``error`` says why not."""

    instance: str
    incarnation: int
    error: str = ""


class PeerUnmapped(Message, frozen=True, kw_only=True):
    """Transfer to itself: nothing of this incarnation is mapped any more."""

    instance: str
    incarnation: int
    error: str = ""


class StagingCreated(Message, frozen=True, kw_only=True):
    """Transfer to itself: the staging region of this rank is registered, or ``error`` says why not."""

    region: RegionDescriptor | None = None
    error: str = ""


class WriteDone(Message, frozen=True, kw_only=True):
    """P transfer to itself: ``part`` of a chunk (some layers) lies at the target rank, or ``error`` says why not."""

    request_id: str
    epoch: int
    target_rank: int
    chunk_index: int
    part: int
    layer_count: int
    bytes_written: int
    write_ms: float = 0.0
    error: str = ""


class PullDone(Message, frozen=True, kw_only=True):
    """D transfer to itself: one source's part of a piece was read, or ``error`` says why not.

    ``kind``: as in ``Restore``, and "ssm" for state that was read straight into its slot.
    """

    request_id: str
    epoch: int
    source_rank: int
    kind: Literal["ssm", "conv", "draft", "target"]
    piece_index: int
    bytes_read: int
    pull_ms: float = 0.0
    error: str = ""


class MergeDone(Message, frozen=True, kw_only=True):
    """D staging to itself: the merge that ran has ended, or ``error`` says why it could not."""

    request_id: str
    epoch: int
    generation: int
    kind: Literal["chunk", "conv", "draft", "target"]
    piece_index: int
    bytes_merged: int
    merge_ms: float = 0.0
    sync_ms: float = 0.0
    part: int = 0
    error: str = ""


class VerifyDone(Message, frozen=True, kw_only=True):
    """D transfer to itself: the restored caches were compared with their sources; ``error`` names what differs."""

    request_id: str
    epoch: int
    bytes_compared: int
    error: str = ""
