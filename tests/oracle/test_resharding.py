"""Resharding against a naive oracle: every small pair of TP sizes, head counts, widths, depths, block sizes and modes.

After a hand-over the whole region of every target rank is compared, so wrong bytes, missing bytes and bytes written
outside live rows (guards, tails, other requests' blocks) all fail. Cases C10 to C14 and C33 of the hand-off list.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle.conveyor import Conveyor
from tests.oracle.world import NaivePlane, Request, expected, fill_instance, geometry, instance

FIRST = Request("first", 10, (7, 2, 3), (1, 6, 5), 1, 2)
SECOND = Request("second", 5, (4, 0), (9, 8), 2, 0)
PAIRS = [(p, d) for p in (1, 2, 3, 4) for d in (1, 2, 3, 4)] + [(6, 4), (8, 2), (8, 1)]


def heads_for(source_tp: int, target_tp: int) -> tuple[int, int]:
    """(key heads, value heads) that both sizes divide, with more value heads than key heads."""
    whole = int(np.lcm(source_tp, target_tp))
    return whole, 2 * whole


def kv_heads_for(source_tp: int, target_tp: int) -> list[int]:
    """KV head counts that shard or replicate evenly on both sides."""
    fits = lambda heads, tp: heads % tp == 0 or tp % heads == 0  # noqa: E731
    return [heads for heads in (1, 2, 3, 4, 6, 12) if fits(heads, source_tp) and fits(heads, target_tp)]


def hand_over(
    source_tp: int,
    target_tp: int,
    *,
    kv_heads: int,
    mode: str = "push",
    chunk_tokens: int = 6,
    block_size: int = 4,
    source_depth: int = 1,
    target_depth: int = 1,
    source_replicated: bool = False,
    target_replicated: bool = False,
    with_draft: bool = True,
    key_dim: int = 3,
    value_dim: int = 5,
    requests: tuple[Request, ...] = (FIRST, SECOND),
) -> Conveyor:
    """Carry the requests over and compare every byte of every target region with the oracle."""
    key_heads, value_heads = heads_for(source_tp, target_tp)
    model = geometry(
        kv_heads=kv_heads, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim
    )
    plane = NaivePlane()
    sources = instance(
        plane,
        model,
        "p0",
        source_tp,
        block_size=block_size,
        speculative_tokens=source_depth,
        draft_replicated=source_replicated,
        chunk_tokens=chunk_tokens,
    )
    targets = instance(
        plane,
        model,
        "d0",
        target_tp,
        block_size=block_size,
        speculative_tokens=target_depth,
        draft_replicated=target_replicated,
    )
    fill_instance(plane, sources, requests)
    before = {m.rank: plane.regions[m.regions[0].region_id].copy() for m in sources}
    conveyor = Conveyor(plane, sources, targets)
    if mode == "push":
        conveyor.push(requests, chunk_tokens, with_draft=with_draft)
    else:
        conveyor.pull(requests, chunk_tokens)
    for target in targets:
        actual = plane.regions[target.regions[0].region_id]
        assert np.array_equal(actual, expected(plane, target, requests)), f"rank {target.rank} differs"
    for manifest in sources:
        assert np.array_equal(plane.regions[manifest.regions[0].region_id], before[manifest.rank])
    assert conveyor.staging_guards_are_intact()
    return conveyor


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("source_tp", "target_tp"), PAIRS)
def test_every_pair_of_sizes_and_head_count_restores_the_direct_shard(
    source_tp: int, target_tp: int, mode: str
) -> None:
    for kv_heads in kv_heads_for(source_tp, target_tp):
        hand_over(source_tp, target_tp, kv_heads=kv_heads, mode=mode)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (2, 7), (5, 2)])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(8, 1), (4, 2), (2, 4), (2, 3), (3, 2), (6, 4)])
def test_conv_is_regrouped_by_segment_whatever_the_widths(
    source_tp: int, target_tp: int, key_dim: int, value_dim: int
) -> None:
    kv_heads = kv_heads_for(source_tp, target_tp)[-1]
    hand_over(source_tp, target_tp, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, requests=(SECOND,))


@pytest.mark.parametrize(("source_depth", "target_depth"), [(1, 3), (3, 1), (5, 2), (2, 0), (8, 8)])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_unequal_speculation_depths_move_only_the_live_state(
    source_tp: int, target_tp: int, source_depth: int, target_depth: int
) -> None:
    hand_over(source_tp, target_tp, kv_heads=2, source_depth=source_depth, target_depth=target_depth)


@pytest.mark.parametrize("replicated", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (4, 2), (2, 4), (1, 4), (4, 4)])
def test_a_replicated_draft_body_is_read_once(source_tp: int, target_tp: int, replicated: tuple[bool, bool]) -> None:
    source, target = replicated
    hand_over(source_tp, target_tp, kv_heads=2, source_replicated=source, target_replicated=target)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5, 16])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (2, 2)])
def test_chunks_that_are_no_multiple_of_the_block_land_at_the_right_rows(
    source_tp: int, target_tp: int, chunk_tokens: int, block_size: int
) -> None:
    requests = (
        Request("first", 11, (7, 2, 3, 4, 5, 6, 0, 1, 9, 10, 11), (1, 6, 5, 3, 2, 11, 10, 9, 0, 7, 8), 1, 2),
        Request("second", 1, (8,), (4,), 0, 1),
    )
    for mode in ("push", "pull"):
        hand_over(
            source_tp,
            target_tp,
            kv_heads=2,
            mode=mode,
            chunk_tokens=chunk_tokens,
            block_size=block_size,
            requests=requests,
        )


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (4, 2), (1, 2)])
def test_draft_kv_that_did_not_travel_with_the_chunks_is_pulled(source_tp: int, target_tp: int) -> None:
    hand_over(source_tp, target_tp, kv_heads=2, with_draft=False)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_sizes_never_pay_for_staging(tp: int) -> None:
    conveyor = hand_over(tp, tp, kv_heads=4)
    assert all(not plan.staged_ranks for plan in conveyor.plans)
    assert [plan.source_ranks for plan in conveyor.plans] == [(rank,) for rank in range(tp)]


def test_no_rank_reads_a_rank_that_is_not_its_source() -> None:
    conveyor = hand_over(4, 2, kv_heads=4, mode="pull")
    assert [plan.source_ranks for plan in conveyor.plans] == [(0, 1), (2, 3)]
    pairs = set(zip(conveyor.plane.reads, conveyor.plane.writes, strict=True))
    for target, ranks in ((0, (0, 1)), (1, (2, 3))):
        readers = {source for source, place in pairs if place.startswith(f"d0.r{target}.") and source.startswith("p0")}
        assert readers == {f"p0.r{rank}.1.caches" for rank in ranks}
