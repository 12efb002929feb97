"""Which bytes a job moves: from a plan and a job to copies between regions. Pure: an executor carries them out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import NamedTuple

from actors.transfer.jobs import MergeJob, PullJob, WriteJob
from actors.transfer.ranges import (
    Ranges,
    TokenRange,
    area_offset,
    block_ranges,
    block_to_window,
    slot_ranges,
    slot_to_window,
    window_to_block,
    window_to_slot,
)
from actors.transfer.routes import Route, TransferPlan

SPLIT_BYTES_MIN = 1 << 20
"""Shorter copies are not worth a second thread."""


class Copy(NamedTuple):
    """One operation of the data plane: ``ranges`` from one region to another."""

    source_region: str
    target_region: str
    ranges: Ranges


class Link(NamedTuple):
    """A plan with one peer, and the region in which its staging windows lie."""

    plan: TransferPlan
    staging_region: str


def write_copies(link: Link, source_rank: int, job: WriteJob) -> list[Copy]:
    """What source rank ``source_rank`` writes for ``job``."""
    tokens = TokenRange(job.token_start, job.token_count)
    parts = []
    for namespace, layer in job.layers:
        for route in link.plan.select(source_rank=source_rank, by_block=True, namespace=namespace, layer=layer):
            if route.in_place:
                ranges = block_ranges(route, job.source_block_ids, job.target_block_ids, tokens)
                parts.append((route.source.region_id, route.target.region_id, ranges))
            else:
                area = area_offset(link.plan, route, job.window_offset)
                ranges = block_to_window(route, job.source_block_ids, tokens, area)
                parts.append((route.source.region_id, link.staging_region, ranges))
    return _grouped(parts)


def pull_copies(link: Link, job: PullJob) -> list[Copy]:
    """What the target rank reads for ``job``."""
    tokens = TokenRange(job.token_start, job.token_count)
    parts = []
    for route in _pulled(link.plan, job):
        area = -1 if route.in_place else area_offset(link.plan, route, job.window_offset)
        if route.by_block and route.in_place:
            ranges = block_ranges(route, job.source_block_ids, job.target_block_ids, tokens)
        elif route.by_block:
            ranges = block_to_window(route, job.source_block_ids, tokens, area)
        elif route.in_place:
            ranges = slot_ranges(route, job.source_slot, job.target_slot)
        else:
            ranges = slot_to_window(route, job.source_slot, area)
        target_region = route.target.region_id if route.in_place else link.staging_region
        parts.append((route.source.region_id, target_region, ranges))
    return _grouped(parts)


def merge_copies(link: Link, job: MergeJob) -> list[Copy]:
    """What the staging actor merges for ``job``: every source's window into the final rows.

    Ranges that fill the same rows of one tensor from different sources follow each other, so that whoever copies may
    put rows together.
    """
    tokens = TokenRange(job.token_start, job.token_count)
    windows = dict(job.windows)
    tensors: dict[str, list[Ranges]] = {}
    for route in _merged(link.plan, job):
        area = area_offset(link.plan, route, windows[route.source_rank])
        if route.by_block:
            ranges = window_to_block(route, job.target_block_ids, tokens, area)
        else:
            ranges = window_to_slot(route, job.target_slot, area)
        tensors.setdefault(route.target.name, []).append(ranges)
    regions = {layout.name: layout.region_id for layout in link.plan.targets}
    return _grouped((link.staging_region, regions[name], _beside(parts)) for name, parts in tensors.items())


def _beside(parts: list[Ranges]) -> Ranges:
    """The ranges of several sources as one list: the first of each, then the second of each, and so on."""
    if all(len(part.source) == 1 for part in parts):
        return Ranges([part.source[0] for part in parts], [part.target[0] for part in parts])
    merged = Ranges([], [])
    for group in zip_longest(*(zip(part.source, part.target, strict=True) for part in parts)):
        for pair in group:
            if pair is not None:
                merged.source.append(pair[0])
                merged.target.append(pair[1])
    return merged


def split(copies: Iterable[Copy], parts: int) -> list[list[Copy]]:
    """The same copies as up to ``parts`` lists of about equal bytes, for as many threads; short ones stay whole."""
    whole = list(copies)
    total = sum(copy.ranges.size_bytes for copy in whole)
    if parts < 2 or total < SPLIT_BYTES_MIN:
        return [whole]
    share, filled = -(-total // parts), 0
    lists: list[list[Copy]] = [[]]
    for copy in whole:
        begin = 0
        for index, (_, run_bytes, count, _) in enumerate(copy.ranges.source):
            filled += run_bytes * count
            if filled >= share:
                lists[-1].append(_between(copy, begin, index + 1))
                lists.append([])
                begin, filled = index + 1, 0
        if begin < len(copy.ranges.source):
            lists[-1].append(_between(copy, begin, len(copy.ranges.source)))
    return [part for part in lists if part]


def _between(copy: Copy, begin: int, end: int) -> Copy:
    return copy._replace(ranges=Ranges(copy.ranges.source[begin:end], copy.ranges.target[begin:end]))


def _pulled(plan: TransferPlan, job: PullJob) -> tuple[Route, ...]:
    if job.kind == "ssm":
        return plan.select(source_rank=job.source_rank, by_block=False, in_place=True)
    if job.kind == "conv":
        return plan.select(source_rank=job.source_rank, by_block=False, in_place=False)
    return plan.select(source_rank=job.source_rank, by_block=True, namespace=job.kind)


def _merged(plan: TransferPlan, job: MergeJob) -> tuple[Route, ...]:
    if job.kind == "conv":
        return plan.select(by_block=False, in_place=False)
    if job.layers:
        layers = (plan.select(by_block=True, in_place=False, namespace=name, layer=layer) for name, layer in job.layers)
        return tuple(chain.from_iterable(layers))
    if job.kind == "chunk":
        return plan.select(by_block=True, in_place=False, namespace=None if job.with_draft else "target")
    return plan.select(by_block=True, in_place=False, namespace=job.kind)


def _grouped(parts: Iterable[tuple[str, str, Ranges]]) -> list[Copy]:
    """One copy per pair of regions, in the order in which the pairs first appear."""
    groups: dict[tuple[str, str], Ranges] = {}
    for source_region, target_region, ranges in parts:
        group = groups.get((source_region, target_region))
        if group is None:
            groups[source_region, target_region] = ranges
        else:
            group.extend(ranges)
    return [Copy(source, target, ranges) for (source, target), ranges in groups.items()]
