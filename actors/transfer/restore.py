"""What a target rank pulls to complete one request, piece by piece. Pure; part of the target machine.

A **piece** is read from several source ranks and is done when all of them were read and, if any of it went through
windows, merged. State (SSM in place, CONV through its own part of window 0) can be pulled at any time. Token pieces of
staged routes need a whole window of every source each, so they wait until one is free; token pieces that are read in
place need none and are not cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from actors.transfer.jobs import PullKind
from actors.transfer.routes import TransferPlan

TokenKind = Literal["draft", "target"]


class PieceState(Enum):
    """Where a piece stands."""

    WAITING = "waiting"
    PULLING = "pulling"
    MERGING = "merging"
    DONE = "done"


@dataclass
class Piece:
    """Part of a restore: state of a slot, or tokens ``[token_start, token_start+token_count)`` of a namespace."""

    kind: PullKind
    index: int
    token_start: int
    token_count: int
    sources: tuple[int, ...]
    staged: bool
    window_index: int = 0
    state: PieceState = PieceState.WAITING
    missing: frozenset[int] = frozenset()  # sources not read yet


class Pulls:
    """All pieces of one restore, and which windows they occupy."""

    def __init__(self, plan: TransferPlan, window_count: int) -> None:
        self._plan = plan
        self._free_windows = list(range(window_count))
        self._pieces: dict[tuple[PullKind, int], Piece] = {}

    @property
    def done(self) -> bool:
        """Whether every piece is in its final place."""
        return all(piece.state is PieceState.DONE for piece in self._pieces.values())

    def add_state(self) -> None:
        """The slot's recurrent state: what is read in place, and what must be merged."""
        for kind, in_place in (("ssm", True), ("conv", False)):
            routes = self._plan.select(by_block=False, in_place=in_place)
            sources = tuple(sorted({route.source_rank for route in routes}))
            if sources:
                pull_kind: PullKind = "ssm" if kind == "ssm" else "conv"
                self._add(Piece(pull_kind, 0, 0, 0, sources, staged=not in_place))

    def add_tokens(self, kind: TokenKind, ranges: Iterable[tuple[int, int]]) -> None:
        """KEY and VALUE of ``kind`` for token ranges ``(start, count)``, cut to what a window holds."""
        routes = self._plan.select(by_block=True, namespace=kind)
        sources = tuple(sorted({route.source_rank for route in routes}))
        if not sources:
            return
        staged = any(not route.in_place for route in routes)
        index = sum(1 for piece_kind, _ in self._pieces if piece_kind == kind)
        for start, count in ranges:
            step = self._plan.chunk_tokens_max if staged else count
            for first in range(start, start + count, step):
                self._add(Piece(kind, index, first, min(step, start + count - first), sources, staged))
                index += 1

    def _add(self, piece: Piece) -> None:
        self._pieces[piece.kind, piece.index] = piece

    def begin(self, *, windows_are_ours: bool) -> list[tuple[Piece, int]]:
        """The (piece, source rank) reads that may begin now. ``windows_are_ours``: no pusher writes to them now."""
        reads: list[tuple[Piece, int]] = []
        for piece in self._pieces.values():
            if piece.state is not PieceState.WAITING:
                continue
            if piece.staged and piece.kind != "conv":
                if not windows_are_ours or not self._free_windows:
                    continue
                piece.window_index = self._free_windows.pop(0)
            piece.state = PieceState.PULLING
            piece.missing = frozenset(piece.sources)
            reads += [(piece, source) for source in piece.sources]
        return reads

    def pulled(self, kind: PullKind, index: int, source: int) -> Piece | None:
        """A source was read. Returns the piece when it was the last one and a merge must follow."""
        piece = self._pieces.get((kind, index))
        if piece is None or source not in piece.missing:
            return None
        piece.missing -= {source}
        if piece.missing:
            return None
        piece.state = PieceState.MERGING if piece.staged else PieceState.DONE
        return piece if piece.staged else None

    def merged(self, kind: PullKind, index: int) -> bool:
        """A piece was merged; its window is free. False when no such merge was awaited."""
        piece = self._pieces.get((kind, index))
        if piece is None or piece.state is not PieceState.MERGING:
            return False
        piece.state = PieceState.DONE
        if piece.kind != "conv":
            self._free_windows.append(piece.window_index)
        return True
