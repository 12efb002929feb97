"""What the target machine says about an attempt, and the jobs it asks for: plain constructions from a ``Receive``."""

from __future__ import annotations

from collections.abc import Sequence

from actors.transfer.jobs import PullJob, VerifyJob
from actors.transfer.receive import ArrivingChunk, Layer, Receive
from actors.transfer.restore import Piece
from messages.handoff import RankLease
from messages.transfer import AbortPush, ChunkMerged, GrantLease, PullKVCache, ReceiveOpened, Restore, Restored


def grant_lease(receive: Receive, window_count: int) -> GrantLease:
    """To the staging actor: windows for every source rank that needs them."""
    windows = receive.plan.windows
    return GrantLease(
        request_id=receive.opened.request_id,
        epoch=receive.opened.epoch,
        source_instance=receive.link.instance,
        source_incarnation=receive.link.incarnation,
        source_ranks=tuple(windows),
        window_bytes=tuple(window.size_bytes for window in windows.values()),
        window_count=window_count,
    )


def opened(receive: Receive, rank: int) -> ReceiveOpened:
    """To the engine: chunks may come."""
    lease = receive.lease or RankLease(target_rank=rank, generation=0)
    return ReceiveOpened(request_id=receive.opened.request_id, epoch=receive.opened.epoch, rank=rank, lease=lease)


def abort_push(receive: Receive, rank: int) -> AbortPush:
    """To a source: stop writing for this attempt."""
    return AbortPush(
        request_id=receive.opened.request_id,
        epoch=receive.opened.epoch,
        target_instance=receive.plan.target_instance,
        target_rank=rank,
    )


def chunk_merged(receive: Receive, rank: int, chunk_index: int) -> ChunkMerged:
    """To a source: the window of this chunk is free."""
    return ChunkMerged(
        request_id=receive.opened.request_id,
        epoch=receive.opened.epoch,
        target_rank=rank,
        chunk_index=chunk_index,
        generation=receive.generation,
    )


def restore_chunk(
    receive: Receive, index: int, chunk: ArrivingChunk, window_count: int, layers: Sequence[Layer]
) -> Restore:
    """To the staging actor: merge these layers of a pushed chunk."""
    return Restore(
        request_id=receive.opened.request_id,
        epoch=receive.opened.epoch,
        generation=receive.generation,
        kind="chunk",
        piece_index=index,
        window_index=index % window_count,
        token_start=chunk.token_start,
        token_count=chunk.token_count,
        target_block_ids=receive.opened.target_block_ids,
        target_slot=receive.opened.target_slot,
        with_draft=any(namespace == "draft" for namespace, _ in layers),
        part=chunk.next_part(layers),
        layers=tuple(layers),
    )


def restore_piece(receive: Receive, piece: Piece) -> Restore:
    """To the staging actor: merge a pulled piece."""
    assert piece.kind != "ssm", "what is read in place is never merged"
    return Restore(
        request_id=receive.opened.request_id,
        epoch=receive.opened.epoch,
        generation=receive.generation,
        kind=piece.kind,
        piece_index=piece.index,
        window_index=piece.window_index,
        token_start=piece.token_start,
        token_count=piece.token_count,
        target_block_ids=receive.opened.target_block_ids,
        target_slot=receive.opened.target_slot,
    )


def restored(receive: Receive, rank: int) -> Restored:
    """To the engine: this rank is complete, and what it cost."""
    return Restored(
        request_id=receive.opened.request_id,
        epoch=receive.opened.epoch,
        rank=rank,
        bytes_moved=receive.bytes_pushed + receive.bytes_pulled,
        push_ms=sum(chunk.push_ms for chunk in receive.chunks.values()),
        pull_ms=(receive.pull_ended_ns - receive.pull_began_ns) / 1e6,
        merge_ms=receive.merge_ms,
        sync_ms=receive.sync_ms,
        bytes_by_role=receive.plan.bytes_by_role(_asked(receive).computed_tokens),
        verified_bytes=receive.verified_bytes,
    )


def pull_job(receive: Receive, piece: Piece, source_rank: int) -> PullJob:
    """Read one source's part of a piece."""
    pull = _asked(receive)
    return PullJob(
        request_id=pull.request_id,
        epoch=pull.epoch,
        source_instance=pull.source_instance,
        source_incarnation=pull.source_incarnation,
        source_rank=source_rank,
        kind=piece.kind,
        piece_index=piece.index,
        token_start=piece.token_start,
        token_count=piece.token_count,
        source_block_ids=pull.source_block_ids,
        source_slot=pull.source_slot,
        target_block_ids=receive.opened.target_block_ids,
        target_slot=receive.opened.target_slot,
        window_offset=receive.window_offset(source_rank, piece.window_index),
    )


def verify_job(receive: Receive) -> VerifyJob:
    """Compare everything with its sources."""
    pull = _asked(receive)
    return VerifyJob(
        request_id=pull.request_id,
        epoch=pull.epoch,
        source_instance=pull.source_instance,
        source_incarnation=pull.source_incarnation,
        source_block_ids=pull.source_block_ids,
        source_slot=pull.source_slot,
        target_block_ids=receive.opened.target_block_ids,
        target_slot=receive.opened.target_slot,
        token_count=pull.computed_tokens,
    )


def _asked(receive: Receive) -> PullKVCache:
    assert receive.pull is not None, "a restore begins with PullKVCache"
    return receive.pull
