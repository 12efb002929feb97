"""Transfer plans as data: which slice of which cache tensor goes from which source rank to which place of a target.

Theory. A manifest says for every cache tensor which **units** (heads, or channels of CONV's Q, K and V) of the logical,
unsharded axis the rank holds, and where in its own row they lie. ``actors/transfer/plan.py`` intersects the spans of
all source ranks with those of one target rank. What it finds is written down here:

* a ``Segment`` is a run of units with its place in the source row and in the target row;
* a ``Route`` is all segments of one tensor between one source rank and one target rank. It is **in place** when its
  bytes in the target are one contiguous run per resource (a whole row of every token, or part of a single row): then
  the source writes (or the target reads) straight into the final blocks or slot. Otherwise it goes through staging,
  where rows lie densely, and the target merges them;
* a ``TransferPlan`` is all routes into one target rank. Building one checks that every unit of every target row has
  exactly one writer; a plan that exists is a plan that holds.

A plan also fixes how the staging windows of a source are cut (``WindowLayout``), because both sides compute it: first
one area per staged block tensor, dense rows of one chunk; behind them one area per staged slot tensor. The second part
is the state's own, so CONV can be pulled while the last chunks still wait in their windows.

Everything is integers; nothing here knows torch, sockets or actors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from messages.layout import Namespace, TensorLayout

AREA_ALIGNMENT_BYTES = 64
"""Areas of a window start at multiples of this: a cache line."""


class PlanRefused(ValueError):
    """No transfer plan exists between these manifests. The text names the tensor (or the rank) and the reason."""


@dataclass(frozen=True)
class Segment:
    """Units ``[start, start+length)`` of logical ``axis``: at ``source_offset`` in the source's row and at
    ``target_offset`` in the target's row (all in units)."""

    axis: str
    start: int
    length: int
    source_offset: int
    target_offset: int

    def __post_init__(self) -> None:
        if self.length < 1 or min(self.start, self.source_offset, self.target_offset) < 0:
            raise PlanRefused(f"segment {self} of axis {self.axis} is empty or starts before its row")


@dataclass(frozen=True)
class Run:
    """A run of bytes common to source row, staged row and target row: ``size_bytes`` at each offset."""

    source_bytes: int
    staged_bytes: int
    target_bytes: int
    size_bytes: int


class Blocks(NamedTuple):
    """How a block tensor is laid out, relative to its base: what its layers and roles have in common."""

    resource_count: int
    rows: int
    resource_stride_bytes: int
    row_stride_bytes: int


@dataclass(frozen=True)
class Route:
    """All segments of one tensor from one source rank to the plan's target rank, sorted by place in the target row."""

    source_rank: int
    source: TensorLayout
    target: TensorLayout
    segments: tuple[Segment, ...]
    in_place: bool

    def __post_init__(self) -> None:
        if not self.segments:
            raise PlanRefused(f"{self.name}: a route from rank {self.source_rank} without segments")
        end = 0
        for segment in self.segments:
            if segment.target_offset < end:
                raise PlanRefused(
                    f"{self.name}: rank {self.source_rank} would write unit {segment.target_offset} twice"
                )
            end = segment.target_offset + segment.length
            if end > self.target.row_units:
                raise PlanRefused(
                    f"{self.name}: {segment} ends outside the target row of {self.target.row_units} units"
                )
            if segment.source_offset + segment.length > self.source.row_units:
                raise PlanRefused(
                    f"{self.name}: {segment} ends outside the source row of {self.source.row_units} units"
                )
        if self.in_place and not writes_one_run_per_resource(self.segments, self.target):
            raise PlanRefused(f"{self.name}: rank {self.source_rank} interleaves with others and cannot write in place")

    @property
    def name(self) -> str:
        """The tensor's name, the same on both sides: ``target.3.KEY``."""
        return self.target.name

    @property
    def namespace(self) -> Namespace:
        """ "target" or "draft"."""
        return self.target.namespace

    @property
    def layer(self) -> int:
        """Layer within the namespace."""
        return self.target.layer

    @cached_property
    def by_block(self) -> bool:
        """Rows are tokens in blocks (KEY, VALUE); otherwise rows of a state slot (CONV, SSM)."""
        return self.target.addressed_by == "block"

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row that take this route."""
        return sum(segment.length for segment in self.segments) * self.target.unit_bytes

    @cached_property
    def source_blocks(self) -> Blocks:
        """How the source's blocks lie."""
        return _blocks(self.source)

    @cached_property
    def target_blocks(self) -> Blocks:
        """How the target's blocks lie."""
        return _blocks(self.target)

    @cached_property
    def staged_blocks(self) -> Blocks:
        """A window's area as one endless block: rows of the route one behind the other."""
        return Blocks(0, self.target.rows_per_resource, 0, self.row_bytes)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The segments as runs of bytes, those that continue each other on both sides joined."""
        unit = self.target.unit_bytes
        runs: list[Run] = []
        staged = 0
        for segment in self.segments:
            source, target, size = segment.source_offset * unit, segment.target_offset * unit, segment.length * unit
            last = runs[-1] if runs else None
            if last and last.source_bytes + last.size_bytes == source and last.target_bytes + last.size_bytes == target:
                runs[-1] = Run(last.source_bytes, last.staged_bytes, last.target_bytes, last.size_bytes + size)
            else:
                runs.append(Run(source, staged, target, size))
            staged += size
        return tuple(runs)

    @cached_property
    def runs_in_place(self) -> tuple[tuple[int, int, int], ...]:
        """(byte of the source row, byte of the target row, bytes) of each run."""
        return tuple((run.source_bytes, run.target_bytes, run.size_bytes) for run in self.runs)

    @cached_property
    def runs_to_window(self) -> tuple[tuple[int, int, int], ...]:
        """(byte of the source row, byte of the row in a window, bytes) of each run."""
        return tuple((run.source_bytes, run.staged_bytes, run.size_bytes) for run in self.runs)

    @cached_property
    def runs_from_window(self) -> tuple[tuple[int, int, int], ...]:
        """(byte of the row in a window, byte of the target row, bytes) of each run."""
        return tuple((run.staged_bytes, run.target_bytes, run.size_bytes) for run in self.runs)


def _blocks(layout: TensorLayout) -> Blocks:
    return Blocks(
        layout.resource_count, layout.rows_per_resource, layout.resource_stride_bytes, layout.row_stride_bytes
    )


def writes_one_run_per_resource(segments: Iterable[Segment], target: TensorLayout) -> bool:
    """Whether these segments, sorted by target offset, are one contiguous run of bytes in every target resource."""
    parts = list(segments)
    adjacent = all(a.target_offset + a.length == b.target_offset for a, b in pairwise(parts))
    whole_row = adjacent and sum(part.length for part in parts) == target.row_units
    return whole_row or (adjacent and target.live_rows == 1)


@dataclass(frozen=True)
class WindowLayout:
    """How one source rank's staging window is cut: ``areas`` is (tensor name, offset in the window) in plan order."""

    areas: tuple[tuple[str, int], ...]
    size_bytes: int

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Tensor name → offset of its area in the window, in bytes."""
        return dict(self.areas)


@dataclass(frozen=True)
class TransferPlan:
    """All routes into one target rank, checked at construction: every target unit has exactly one writer.

    ``chunk_tokens_max`` is the largest chunk that a window must hold. ``targets`` are the layouts that must be filled.
    """

    source_instance: str
    source_incarnation: int
    source_tp_size: int
    target_instance: str
    target_incarnation: int
    target_rank: int
    target_tp_size: int
    block_size: int
    chunk_tokens_max: int
    targets: tuple[TensorLayout, ...]
    routes: tuple[Route, ...]

    def __post_init__(self) -> None:
        by_name: dict[str, list[Route]] = {layout.name: [] for layout in self.targets}
        for route in self.routes:
            if route.name not in by_name:
                raise PlanRefused(f"{route.name}: the target rank has no such tensor")
            by_name[route.name].append(route)
        for layout in self.targets:
            _check_coverage(layout, by_name[layout.name])
        if self.staged_ranks and self.chunk_tokens_max < 1:
            raise PlanRefused(
                f"{self.source_instance} publishes max_tokens_per_chunk {self.chunk_tokens_max}: routes through "
                "staging need at least 1 (option: max_tokens_per_chunk_for_prefill)"
            )

    @cached_property
    def source_ranks(self) -> tuple[int, ...]:
        """Source ranks with at least one route."""
        return tuple(sorted({route.source_rank for route in self.routes}))

    @cached_property
    def push_ranks(self) -> tuple[int, ...]:
        """Source ranks that hold block tensors of this target: in PUSH mode each sends every chunk."""
        return tuple(sorted({route.source_rank for route in self.routes if route.by_block}))

    @cached_property
    def staged_ranks(self) -> tuple[int, ...]:
        """Source ranks that need staging windows."""
        return tuple(sorted({route.source_rank for route in self.routes if not route.in_place}))

    def select(
        self,
        *,
        source_rank: int | None = None,
        by_block: bool | None = None,
        namespace: Namespace | None = None,
        layer: int | None = None,
        in_place: bool | None = None,
    ) -> tuple[Route, ...]:
        """The routes that match everything given, in plan order. Remembered: asked for every chunk and layer."""
        key = (source_rank, by_block, namespace, layer, in_place)
        found = self._selected.get(key)
        if found is None:
            found = self._selected[key] = tuple(
                route
                for route in self.routes
                if (source_rank is None or route.source_rank == source_rank)
                and (by_block is None or route.by_block == by_block)
                and (namespace is None or route.namespace == namespace)
                and (layer is None or route.layer == layer)
                and (in_place is None or route.in_place == in_place)
            )
        return found

    @cached_property
    def _selected(self) -> dict[tuple[object, ...], tuple[Route, ...]]:
        return {}

    @cached_property
    def staged_layers(self) -> dict[tuple[Namespace, int], frozenset[int]]:
        """(namespace, layer) → the source ranks whose KEY or VALUE of it goes through staging, in plan order."""
        ranks: dict[tuple[Namespace, int], frozenset[int]] = {}
        for route in self.select(by_block=True, in_place=False):
            key = (route.namespace, route.layer)
            ranks[key] = ranks.get(key, frozenset()) | {route.source_rank}
        return ranks

    @cached_property
    def windows(self) -> dict[int, WindowLayout]:
        """Source rank → layout of each of its staging windows, for the ranks in ``staged_ranks``."""
        return {rank: self._window(rank) for rank in self.staged_ranks}

    def _window(self, source_rank: int) -> WindowLayout:
        staged = self.select(source_rank=source_rank, in_place=False)
        areas: list[tuple[str, int]] = []
        end = 0
        for route in sorted(staged, key=lambda route: not route.by_block):  # stable: block tensors first
            areas.append((route.name, end))
            rows = self.chunk_tokens_max if route.by_block else route.target.live_rows
            end += -(-rows * route.row_bytes // AREA_ALIGNMENT_BYTES) * AREA_ALIGNMENT_BYTES
        return WindowLayout(tuple(areas), end)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes per prompt token into this target rank."""
        return sum(route.row_bytes for route in self.routes if route.by_block)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of recurrent state per request into this target rank."""
        return sum(route.row_bytes * route.target.live_rows for route in self.routes if not route.by_block)

    def bytes_by_role(self, tokens: int) -> tuple[tuple[str, int], ...]:
        """("target.KEY" and so on, bytes that a prompt of ``tokens`` moves into this target rank), in plan order."""
        sums: dict[str, int] = {}
        for route in self.routes:
            name = f"{route.namespace}.{route.target.role}"
            rows = tokens if route.by_block else route.target.live_rows
            sums[name] = sums.get(name, 0) + rows * route.row_bytes
        return tuple(sums.items())

    def request_bytes(self, tokens: int) -> int:
        """Bytes that a prompt of ``tokens`` moves into this target rank."""
        return tokens * self.token_bytes + self.slot_bytes


def _check_coverage(layout: TensorLayout, routes: list[Route]) -> None:
    """Raise ``PlanRefused`` unless the segments of all routes tile the target row exactly."""
    segments = [(segment, route.source_rank) for route in routes for segment in route.segments]
    segments.sort(key=lambda pair: pair[0].target_offset)
    end, writer = 0, -1
    for segment, rank in segments:
        if segment.target_offset < end:
            raise PlanRefused(
                f"{layout.name}: overlap, unit {segment.target_offset} of the target row would be written by source "
                f"ranks {writer} and {rank}"
            )
        if segment.target_offset > end:
            raise PlanRefused(
                f"{layout.name}: gap, no writer for units [{end}, {segment.target_offset}) of the target row"
            )
        end, writer = end + segment.length, rank
    if end != layout.row_units:
        raise PlanRefused(f"{layout.name}: gap, no writer for units [{end}, {layout.row_units}) of the target row")
