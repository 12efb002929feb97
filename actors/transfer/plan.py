"""``plan``: from the manifests of all source ranks and of one target rank to a checked ``TransferPlan``.

For every tensor of the target and every span of its row, the source spans on the same logical axis are intersected. A
span that several source ranks hold identically is a **replica**; one of them is elected, so that the target ranks that
read it spread evenly over its holders: reader ``i`` of ``n`` takes holder ``i * holders // n``. For an MLA latent,
which every rank holds, that is source rank ``d * P // D``; for two KV heads on four source ranks and one target it is
ranks 0 and 2. Who the other readers are follows from the target's own span, because heads are contiguous by rank.

Whatever does not fit is refused with a text that names the tensor, the values seen and what would be allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from actors.transfer.routes import PlanRefused, Route, Segment, TransferPlan, writes_one_run_per_resource
from messages.layout import Manifest, Span, TensorLayout

PLANS_REMEMBERED = 256


def plan(
    sources: Sequence[Manifest],
    target: Manifest,
    *,
    source_incarnation: int | None = None,
    target_incarnation: int | None = None,
) -> TransferPlan:
    """The plan that fills every cache tensor of ``target`` from ``sources``, one manifest per source rank.

    The incarnations, when given, are those that the caller knows to be alive. Raises ``PlanRefused``.
    """
    sources = sorted(sources, key=lambda manifest: manifest.rank)
    _check_identity(sources, target, source_incarnation, target_incarnation)
    return _plan(tuple(sources), target)


@lru_cache(maxsize=PLANS_REMEMBERED)
def _plan(sources: tuple[Manifest, ...], target: Manifest) -> TransferPlan:
    """The plan itself: pure, so ranks that share a process (tests, simulation) make it once."""
    layouts = [{layout.name: layout for layout in manifest.tensors} for manifest in sources]
    _check_names(sources, target)
    routes: list[Route] = []
    for layout in target.tensors:
        holders = []
        for manifest, tensors in zip(sources, layouts, strict=True):
            source = tensors.get(layout.name)
            if source is None:
                raise PlanRefused(_missing(manifest, layout, target))
            _check_tensor(source, layout, manifest.rank)
            holders.append((manifest.rank, source))
        routes += _routes(holders, layout, target)
    first = sources[0]
    return TransferPlan(
        source_instance=first.instance,
        source_incarnation=first.incarnation,
        source_tp_size=first.tp_size,
        target_instance=target.instance,
        target_incarnation=target.incarnation,
        target_rank=target.rank,
        target_tp_size=target.tp_size,
        block_size=target.block_size,
        chunk_tokens_max=first.max_tokens_per_chunk,
        targets=target.tensors,
        routes=tuple(routes),
    )


# -- what must agree ----------------------------------------------------------------------------------------------


def _check_identity(
    sources: Sequence[Manifest], target: Manifest, source_incarnation: int | None, target_incarnation: int | None
) -> None:
    if not sources:
        raise PlanRefused("no source rank published a manifest")
    first = sources[0]
    for manifest in sources:
        who = f"source rank {manifest.rank} of {manifest.instance}"
        if (manifest.instance, manifest.incarnation) != (first.instance, first.incarnation):
            raise PlanRefused(
                f"{who} is incarnation {manifest.incarnation}, rank {first.rank} of {first.instance} is incarnation "
                f"{first.incarnation}: all must be of one life of one instance"
            )
        if source_incarnation is not None and manifest.incarnation != source_incarnation:
            raise PlanRefused(f"{who} is incarnation {manifest.incarnation}, alive is {source_incarnation}")
        if manifest.tp_size != first.tp_size:
            raise PlanRefused(f"{who} says TP{manifest.tp_size}, rank {first.rank} says TP{first.tp_size}")
        for what, theirs, ours in (
            ("model fingerprint", manifest.model_fingerprint, target.model_fingerprint),
            ("block size", manifest.block_size, target.block_size),
        ):
            if theirs != ours:
                raise PlanRefused(
                    f"{_first_name(target)}: {who} has {what} {theirs}, target rank {target.rank} of {target.instance} "
                    f"has {ours}: both must be equal"
                )
        if manifest.max_tokens_per_chunk != first.max_tokens_per_chunk:
            raise PlanRefused(
                f"{who} has max_tokens_per_chunk {manifest.max_tokens_per_chunk}, rank {first.rank} "
                f"{first.max_tokens_per_chunk}"
            )
    if target_incarnation is not None and target.incarnation != target_incarnation:
        raise PlanRefused(
            f"target rank {target.rank} of {target.instance} is incarnation {target.incarnation}, alive is "
            f"{target_incarnation}"
        )
    ranks = [manifest.rank for manifest in sources]
    name = _first_name(target)
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise PlanRefused(f"{name}: source rank {rank} of {first.instance} published {ranks.count(rank)} manifests")
        if not 0 <= rank < first.tp_size:
            raise PlanRefused(f"{name}: source rank {rank} does not exist in TP{first.tp_size} of {first.instance}")
    for rank in range(first.tp_size):
        if rank not in ranks:
            raise PlanRefused(f"{name}: source rank {rank} of {first.instance} (TP{first.tp_size}) is missing")


def _first_name(target: Manifest) -> str:
    """The first tensor that cannot be filled when a whole rank is wrong."""
    return target.tensors[0].name if target.tensors else f"rank {target.rank}"


def _check_names(sources: Sequence[Manifest], target: Manifest) -> None:
    """Target-namespace tensors must be the same on both sides; a draft that only the source has stays behind."""
    known = {layout.name for layout in target.tensors}
    if len(known) != len(target.tensors):
        raise PlanRefused(f"target rank {target.rank} of {target.instance} publishes a tensor twice")
    for manifest in sources:
        names = [layout.name for layout in manifest.tensors]
        for layout in manifest.tensors:
            if names.count(layout.name) > 1:
                raise PlanRefused(f"{layout.name}: source rank {manifest.rank} publishes it twice")
            if layout.namespace == "target" and layout.name not in known:
                raise PlanRefused(
                    f"{layout.name}: unknown to target rank {target.rank} of {target.instance}, source rank "
                    f"{manifest.rank} publishes it"
                )


def _missing(manifest: Manifest, layout: TensorLayout, target: Manifest) -> str:
    text = f"{layout.name}: source rank {manifest.rank} of {manifest.instance} does not publish it"
    if layout.namespace == "draft" and manifest.speculative_tokens == 0:
        text += (
            f"; {target.instance} drafts (num_speculative_tokens {target.speculative_tokens}), so "
            f"{manifest.instance} must fill the draft cache too (option: prefill_num_speculative_tokens, at least 1)"
        )
    return text


def _check_tensor(source: TensorLayout, target: TensorLayout, rank: int) -> None:
    pairs: list[tuple[str, object, object]] = [
        ("role", source.role, target.role),
        ("addressing", source.addressed_by, target.addressed_by),
        ("dtype", source.dtype, target.dtype),
        ("bytes per unit", source.unit_bytes, target.unit_bytes),
        ("live rows", source.live_rows, target.live_rows),
        ("logical axes", dict(source.axis_units), dict(target.axis_units)),
    ]
    if target.addressed_by == "block":
        pairs.append(("block size", source.rows_per_resource, target.rows_per_resource))
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise PlanRefused(f"{target.name}: {what} is {theirs} on source rank {rank}, {ours} on the target")
    for where, layout in ((f"source rank {rank}", source), ("the target", target)):
        _check_spans(layout, where)


def _check_spans(layout: TensorLayout, where: str) -> None:
    """Spans lie inside their axis and row, and neither overlap in the row nor hold a unit twice."""
    units = dict(layout.axis_units)
    for index, span in enumerate(layout.spans):
        if span.axis not in units:
            raise PlanRefused(f"{layout.name}: unknown axis {span.axis} on {where}")
        if span.length < 1 or span.start < 0 or span.start + span.length > units[span.axis]:
            raise PlanRefused(f"{layout.name}: {_text(span)} on {where} leaves axis {span.axis} of {units[span.axis]}")
        if span.offset < 0 or span.offset + span.length > layout.row_units:
            raise PlanRefused(f"{layout.name}: {_text(span)} on {where} leaves its row of {layout.row_units} units")
        for other in layout.spans[:index]:
            same_place = span.offset < other.offset + other.length and other.offset < span.offset + span.length
            same_units = span.axis == other.axis and _common(span, other) is not None
            if same_place or same_units:
                raise PlanRefused(f"{layout.name}: overlap of {_text(other)} and {_text(span)} on {where}")
    if layout.live_rows > layout.rows_per_resource or layout.row_stride_bytes < layout.row_bytes:
        raise PlanRefused(f"{layout.name}: rows on {where} overlap or are fewer than live")


def _text(span: Span) -> str:
    return f"{span.axis}[{span.start}, {span.start + span.length})"


def _common(one: Span, other: Span) -> tuple[int, int] | None:
    """The units ``[start, end)`` that both spans hold, if any. The axes are equal."""
    start, end = max(one.start, other.start), min(one.start + one.length, other.start + other.length)
    return (start, end) if start < end else None


# -- who sends what -----------------------------------------------------------------------------------------------


def _routes(holders: Sequence[tuple[int, TensorLayout]], layout: TensorLayout, target: Manifest) -> list[Route]:
    """The routes of one tensor, by source rank."""
    segments: dict[int, list[Segment]] = {}
    for span in layout.spans:
        for rank, source_span in _elect(holders, span, layout, target):
            start, end = _common(source_span, span) or (0, 0)
            segments.setdefault(rank, []).append(
                Segment(
                    axis=span.axis,
                    start=start,
                    length=end - start,
                    source_offset=source_span.offset + start - source_span.start,
                    target_offset=span.offset + start - span.start,
                )
            )
    routes = []
    for rank, source in holders:
        if rank in segments:
            parts = tuple(sorted(segments[rank], key=lambda segment: segment.target_offset))
            routes.append(Route(rank, source, layout, parts, writes_one_run_per_resource(parts, layout)))
    return routes


def _elect(
    holders: Sequence[tuple[int, TensorLayout]], span: Span, layout: TensorLayout, target: Manifest
) -> list[tuple[int, Span]]:
    """For every part of ``span``: the one source rank that sends it, and its span. Refuses gaps and overlaps."""
    replicas: dict[tuple[int, int], list[tuple[int, Span]]] = {}
    for rank, source in holders:
        for source_span in source.spans:
            if source_span.axis == span.axis and _common(source_span, span):
                replicas.setdefault((source_span.start, source_span.length), []).append((rank, source_span))
    chosen = []
    end, last_rank = span.start, -1
    for (start, length), group in sorted(replicas.items()):
        if start < end and last_rank >= 0:
            raise PlanRefused(
                f"{layout.name}: overlap, source ranks {last_rank} and {group[0][0]} both hold {span.axis}[{start}, "
                f"{min(end, start + length)}) but are no replicas of each other"
            )
        if start > end:
            raise PlanRefused(f"{layout.name}: gap, no source rank holds {span.axis}[{end}, {start})")
        readers = _readers(span, dict(layout.axis_units)[span.axis], target, start, start + length)
        rank, source_span = group[readers.index(target.rank) * len(group) // len(readers)]
        chosen.append((rank, source_span))
        end, last_rank = start + length, rank
    if end < span.start + span.length:
        raise PlanRefused(f"{layout.name}: gap, no source rank holds {span.axis}[{end}, {span.start + span.length})")
    return chosen


def _readers(span: Span, axis_units: int, target: Manifest, start: int, end: int) -> list[int]:
    """The target ranks that need some of units ``[start, end)``, this one among them.

    Follows from this rank's own span: heads are contiguous by rank, ``copies`` ranks in a row hold the same ones. Only
    for spreading readers: a layout that shards otherwise is still planned right, with itself as the only reader.
    """
    copies = max(1, target.tp_size * span.length // axis_units)
    starts = [rank // copies * span.length for rank in range(target.tp_size)]
    if not 0 <= target.rank < target.tp_size or starts[target.rank] != span.start:
        return [target.rank]
    return [rank for rank, first in enumerate(starts) if first < end and start < first + span.length]
