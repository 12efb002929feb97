"""Moves requests between instances of the oracle's world with the real plan, ranges, jobs and executors, in one thread.

What the machines decide is reduced to the obvious order; what is tested is that the right bytes arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from actors.runtime.machine import Job
from actors.transfer.executor import LinkBook, MergeExecutor, TransferExecutor
from actors.transfer.jobs import MapPeer, MergeJob, PieceKind, PullJob, PullKind, WriteJob
from actors.transfer.plan import plan
from actors.transfer.routes import TransferPlan
from messages.base import Message
from messages.layout import Manifest
from tests.oracle.world import NaivePlane, Request

WINDOWS = 2
GUARD_BYTES = 128


class Conveyor:
    """Links every source rank with every target rank and carries requests over."""

    def __init__(self, plane: NaivePlane, sources: Sequence[Manifest], targets: Sequence[Manifest]) -> None:
        self.plane, self.sources, self.targets = plane, sources, targets
        self.plans = [plan(sources, target) for target in targets]
        self.staging = [f"{target.instance}.r{target.rank}.staging" for target in targets]
        self.windows: list[dict[int, list[int]]] = []
        for target_plan, region_id in zip(self.plans, self.staging, strict=True):
            offsets, end = {}, GUARD_BYTES
            for rank, window in target_plan.windows.items():
                size = window.size_bytes + GUARD_BYTES
                offsets[rank] = [end + index * size for index in range(WINDOWS)]
                end += WINDOWS * size
            plane.create_region(region_id, end)
            self.windows.append(offsets)
        self.source_side = [self._executors(source.rank, "target") for source in sources]
        self.target_side = [self._executors(target.rank, "source") for target in targets]

    def _executors(self, rank: int, peer: Literal["source", "target"]) -> tuple[TransferExecutor, MergeExecutor]:
        book = LinkBook()
        other = self.targets if peer == "target" else self.sources
        if peer == "target":
            plans, staging = tuple(self.plans), tuple(self.staging)
        else:
            plans, staging = (self.plans[rank],), (self.staging[rank],)
        transfer = TransferExecutor(self.plane, book, rank, threads=0)
        run(
            transfer,
            MapPeer(
                instance=other[0].instance,
                incarnation=other[0].incarnation,
                plans=plans,
                staging_region_ids=staging,
                regions=tuple(region for manifest in other for region in manifest.regions),
            ),
        )
        return transfer, MergeExecutor(self.plane, book, rank, threads=0)

    def push(self, requests: Sequence[Request], chunk_tokens: int, *, with_draft: bool = True) -> None:
        """PUSH mode: chunks of all requests in turn, every layer by itself, merged as they land; then pull the rest."""
        longest = max(request.tokens for request in requests)
        for chunk_index, start in enumerate(range(0, longest, chunk_tokens)):
            for request in requests:
                count = min(chunk_tokens, request.tokens - start)
                if count > 0:
                    for target in range(len(self.targets)):
                        self._push_chunk(target, request, chunk_index, start, count, with_draft)
        for request in requests:
            self._pull_state(request)
            if not with_draft:
                self._pull_tokens(request, "draft", chunk_tokens)

    def pull(self, requests: Sequence[Request], chunk_tokens: int) -> None:
        """PULL mode: everything is read by the target."""
        for request in requests:
            self._pull_state(request)
            self._pull_tokens(request, "target", chunk_tokens)
            self._pull_tokens(request, "draft", chunk_tokens)

    def _push_chunk(
        self, target: int, request: Request, chunk_index: int, start: int, count: int, with_draft: bool
    ) -> None:
        target_plan = self.plans[target]
        for source_rank in target_plan.push_ranks:
            for namespace, layer in layers(target_plan, source_rank):
                if namespace == "draft" and not with_draft:
                    continue
                run(
                    self.source_side[source_rank][0],
                    WriteJob(
                        request_id=request.name,
                        epoch=0,
                        target_instance=self.targets[0].instance,
                        target_incarnation=self.targets[0].incarnation,
                        target_rank=target,
                        chunk_index=chunk_index,
                        part=0,
                        layers=((namespace, layer),),
                        token_start=start,
                        token_count=count,
                        source_block_ids=request.source_block_ids,
                        target_block_ids=request.target_block_ids,
                        window_offset=self._window(target, source_rank, chunk_index),
                    ),
                )
        self._merge(target, request, "chunk", chunk_index, start, count, with_draft)

    def _pull_state(self, request: Request) -> None:
        kinds: tuple[PullKind, ...] = ("ssm", "conv")
        for target in range(len(self.targets)):
            for kind in kinds:
                for source_rank in self.plans[target].source_ranks:
                    self._pull_piece(target, request, source_rank, kind, 0, 0, 0)
            self._merge(target, request, "conv", 0, 0, 0, False)

    def _pull_tokens(self, request: Request, kind: Literal["draft", "target"], chunk_tokens: int) -> None:
        for target in range(len(self.targets)):
            for piece, start in enumerate(range(0, request.tokens, chunk_tokens)):
                count = min(chunk_tokens, request.tokens - start)
                for source_rank in self.plans[target].push_ranks:
                    self._pull_piece(target, request, source_rank, kind, piece, start, count)
                self._merge(target, request, kind, piece, start, count, False)

    def _pull_piece(
        self, target: int, request: Request, source_rank: int, kind: PullKind, piece: int, start: int, count: int
    ) -> None:
        run(
            self.target_side[target][0],
            PullJob(
                request_id=request.name,
                epoch=0,
                source_instance=self.sources[0].instance,
                source_incarnation=self.sources[0].incarnation,
                source_rank=source_rank,
                kind=kind,
                piece_index=piece,
                token_start=start,
                token_count=count,
                source_block_ids=request.source_block_ids,
                source_slot=request.source_slot,
                target_block_ids=request.target_block_ids,
                target_slot=request.target_slot,
                window_offset=self._window(target, source_rank, piece),
            ),
        )

    def _merge(
        self, target: int, request: Request, kind: PieceKind, piece: int, start: int, count: int, with_draft: bool
    ) -> None:
        run(
            self.target_side[target][1],
            MergeJob(
                request_id=request.name,
                epoch=0,
                generation=1,
                source_instance=self.sources[0].instance,
                source_incarnation=self.sources[0].incarnation,
                kind=kind,
                with_draft=with_draft,
                piece_index=piece,
                token_start=start,
                token_count=count,
                target_block_ids=request.target_block_ids,
                target_slot=request.target_slot,
                windows=tuple((rank, offsets[piece % WINDOWS]) for rank, offsets in self.windows[target].items()),
            ),
        )

    def _window(self, target: int, source_rank: int, piece: int) -> int:
        offsets = self.windows[target].get(source_rank)
        return offsets[piece % WINDOWS] if offsets else -1

    def staging_guards_are_intact(self) -> bool:
        """Nothing was written between, before or behind the windows."""
        for region_id, offsets, target_plan in zip(self.staging, self.windows, self.plans, strict=True):
            outside = self.plane.regions[region_id].copy()
            for rank, starts in offsets.items():
                for start in starts:
                    outside[start : start + target_plan.windows[rank].size_bytes] = 0xEE
            if not (outside == 0xEE).all():
                return False
        return True


def layers(target_plan: TransferPlan, source_rank: int) -> list[tuple[Literal["target", "draft"], int]]:
    """The layers with KEY and VALUE that this source sends, in the order in which a model computes them."""
    routes = target_plan.select(source_rank=source_rank, by_block=True)
    return sorted({(route.namespace, route.layer) for route in routes}, key=lambda pair: (pair[0] != "target", pair[1]))


def run(executor: TransferExecutor | MergeExecutor, job: Job) -> Message:
    """Run one job to its end; fails the test when the job did."""
    results: list[Message] = []
    executor.submit(job, lambda to, message: None, results.append)
    error = getattr(results[0], "error", "")
    assert not error, error
    return results[0]
