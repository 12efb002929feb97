"""What transfer and staging ask their shells to do. Data only: a job names a linked peer, never a buffer or an object.

A ``window_offset`` is a byte of the target rank's staging region, -1 when the job needs no window.
"""

from __future__ import annotations

from typing import Literal

from actors.runtime.machine import Job
from actors.transfer.routes import TransferPlan
from messages.layout import Manifest, Namespace, RegionDescriptor

PieceKind = Literal["chunk", "conv", "draft", "target"]
PullKind = Literal["ssm", "conv", "draft", "target"]


class CreateStaging(Job, frozen=True, kw_only=True):
    """Register this rank's staging region. Result: ``StagingCreated``."""

    region_id: str
    size_bytes: int


class MapPeer(Job, frozen=True, kw_only=True):
    """Map the regions of one incarnation of a peer and remember the plans with it. Result: ``PeerMapped``.

    ``staging_region_ids`` names, plan by plan, the region that its windows lie in. ``sources`` and ``target`` are set
    when restores are verified.
    """

    instance: str
    incarnation: int
    plans: tuple[TransferPlan, ...]
    staging_region_ids: tuple[str, ...]
    regions: tuple[RegionDescriptor, ...]
    sources: tuple[Manifest, ...] = ()
    target: Manifest | None = None


class UnmapPeer(Job, frozen=True, kw_only=True):
    """Unmap what ``MapPeer`` mapped; no other job of this peer runs or will run. Result: ``PeerUnmapped``."""

    instance: str
    incarnation: int


class WriteJob(Job, frozen=True, kw_only=True):
    """P: write some layers of one chunk to one target rank. Result: ``WriteDone``."""

    request_id: str
    epoch: int
    target_instance: str
    target_incarnation: int
    target_rank: int
    chunk_index: int
    part: int  # counts the write jobs of this chunk and target
    layers: tuple[tuple[Namespace, int], ...]
    token_start: int
    token_count: int
    source_block_ids: tuple[int, ...]
    target_block_ids: tuple[int, ...]
    window_offset: int


class PullJob(Job, frozen=True, kw_only=True):
    """D: read one source rank's part of a piece, in place or into its window. Result: ``PullDone``.

    ``kind`` "ssm" is all slot state that is read in place, "conv" what goes through the window, "draft" and "target"
    are the tokens' KEY and VALUE of that namespace.
    """

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    source_rank: int
    kind: PullKind
    piece_index: int
    token_start: int
    token_count: int
    source_block_ids: tuple[int, ...]
    source_slot: int
    target_block_ids: tuple[int, ...]
    target_slot: int
    window_offset: int


class MergeJob(Job, frozen=True, kw_only=True):
    """D staging: merge a piece out of ``windows`` (source rank, offset) into the final place. Result: ``MergeDone``."""

    request_id: str
    epoch: int
    generation: int
    source_instance: str
    source_incarnation: int
    kind: PieceKind
    with_draft: bool
    piece_index: int
    token_start: int
    token_count: int
    target_block_ids: tuple[int, ...]
    target_slot: int
    windows: tuple[tuple[int, int], ...]
    part: int = 0
    layers: tuple[tuple[Namespace, int], ...] = ()  # of a chunk; empty: all that came


class VerifyJob(Job, frozen=True, kw_only=True):
    """D: read every source of a restored request again and compare (``--verify-handoffs``). Result: ``VerifyDone``."""

    request_id: str
    epoch: int
    source_instance: str
    source_incarnation: int
    source_block_ids: tuple[int, ...]
    source_slot: int
    target_block_ids: tuple[int, ...]
    target_slot: int
    token_count: int
