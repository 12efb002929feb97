"""Who sends what to whom, as stated values; and every fault of coverage or identity refused, naming the tensor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from actors.transfer.plan import plan
from actors.transfer.routes import PlanRefused, Route, Segment, TransferPlan
from messages.layout import Manifest, Role, Span, TensorLayout
from tests.oracle.world import NaivePlane, geometry, instance

replace = msgspec.structs.replace


def pair(source_tp: int, target_tp: int, kv_heads: int, **more: int | bool) -> tuple[list[Manifest], list[Manifest]]:
    model = geometry(kv_heads=kv_heads, key_heads=24, value_heads=24)
    plane = NaivePlane()
    sides = []
    for name, tp in (("p0", source_tp), ("d0", target_tp)):
        sides.append(instance(plane, model, name, tp, speculative_tokens=1, **more))  # type: ignore[arg-type]
    return sides[0], sides[1]


def readers(source_tp: int, target_tp: int, kv_heads: int, role: Role) -> list[tuple[int, ...]]:
    """For each target rank: the source ranks that send it ``role``."""
    sources, targets = pair(source_tp, target_tp, kv_heads)
    found = []
    for target in targets:
        routes = plan(sources, target).routes
        found.append(tuple(sorted({route.source_rank for route in routes if route.target.role == role})))
    return found


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "kv_heads", "key_readers", "state_readers"),
    [
        (2, 1, 2, [(0, 1)], [(0, 1)]),
        (4, 1, 4, [(0, 1, 2, 3)], [(0, 1, 2, 3)]),
        (4, 2, 4, [(0, 1), (2, 3)], [(0, 1), (2, 3)]),  # not {0,2} and {1,3}, as src = dst + n * dst_tp would say
        (1, 2, 2, [(0,), (0,)], [(0,), (0,)]),
        (2, 3, 6, [(0,), (0, 1), (1,)], [(0,), (0, 1), (1,)]),
        (4, 1, 2, [(0, 2)], [(0, 1, 2, 3)]),
        (8, 2, 4, [(0, 2), (4, 6)], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (1, 4, 2, [(0,)] * 4, [(0,)] * 4),
        (4, 4, 2, [(0,), (1,), (2,), (3,)], [(0,), (1,), (2,), (3,)]),
        (2, 4, 2, [(0,), (0,), (1,), (1,)], [(0,), (0,), (1,), (1,)]),
    ],
)
def test_heads_go_to_the_ranks_that_hold_them(
    source_tp: int,
    target_tp: int,
    kv_heads: int,
    key_readers: list[tuple[int, ...]],
    state_readers: list[tuple[int, ...]],
) -> None:
    assert readers(source_tp, target_tp, kv_heads, "KEY") == key_readers
    assert readers(source_tp, target_tp, kv_heads, "VALUE") == key_readers
    assert readers(source_tp, target_tp, kv_heads, "CONV") == state_readers
    assert readers(source_tp, target_tp, kv_heads, "SSM") == state_readers


def test_one_kv_head_for_four_ranks_lands_whole_on_each_of_them() -> None:
    sources, targets = pair(1, 4, 2)
    heads = []
    for target in targets:
        (route,) = [route for route in plan(sources, target).routes if route.name == "target.1.KEY"]
        heads.append(route.segments[0].start)
        assert route.in_place
    assert heads == [0, 0, 1, 1]


@pytest.mark.parametrize("source_tp", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("target_tp", [1, 2, 3, 4, 6, 8])
def test_reads_of_a_replicated_latent_spread_over_the_sources(source_tp: int, target_tp: int) -> None:
    def latent(name: str, rank: int, tp: int) -> Manifest:
        layout = TensorLayout(
            name="target.0.KEY",
            namespace="target",
            layer=0,
            role="KEY",
            addressed_by="block",
            dtype="bfloat16",
            region_id=f"{name}.{rank}",
            base_bytes=0,
            resource_count=4,
            rows_per_resource=16,
            live_rows=16,
            row_units=1,
            unit_bytes=1152,
            resource_stride_bytes=16 * 1152,
            row_stride_bytes=1152,
            spans=(Span(axis="latent", start=0, length=1, offset=0),),
            axis_units=(("latent", 1),),
        )
        return manifest_of(name, rank, tp, (layout,))

    sources = [latent("p0", rank, source_tp) for rank in range(source_tp)]
    chosen = [plan(sources, latent("d0", rank, target_tp)).source_ranks for rank in range(target_tp)]
    assert chosen == [(rank * source_tp // target_tp,) for rank in range(target_tp)]


def manifest_of(name: str, rank: int, tp: int, tensors: tuple[TensorLayout, ...]) -> Manifest:
    return Manifest(
        instance=name,
        incarnation=1,
        rank=rank,
        tp_size=tp,
        model_fingerprint="m",
        block_size=16,
        block_count=4,
        slot_count=1,
        speculative_tokens=0,
        regions=(),
        tensors=tensors,
        max_tokens_per_chunk=64,
    )


def test_readers_of_a_replicated_draft_spread_even_when_the_target_shards_it() -> None:
    model = geometry(kv_heads=4, key_heads=4, value_heads=4)
    sources = instance(NaivePlane(), model, "p0", 4, speculative_tokens=1, draft_replicated=True)
    targets = instance(NaivePlane(), model, "d0", 2, speculative_tokens=1)
    chosen = []
    for target in targets:
        chosen.append({route.source_rank for route in plan(sources, target).routes if route.namespace == "draft"})
    assert chosen == [{0}, {2}]


def test_only_routes_that_interleave_go_through_staging() -> None:
    def staged(source_tp: int, target_tp: int) -> set[str]:
        sources, targets = pair(source_tp, target_tp, 4)
        routes = [route for target in targets for route in plan(sources, target).routes]
        return {route.target.role for route in routes if not route.in_place}

    assert staged(2, 1) == {"KEY", "VALUE", "CONV"}  # SSM heads are one run of the slot's only live row
    assert staged(4, 2) == {"KEY", "VALUE", "CONV"}
    assert staged(2, 2) == set()
    assert staged(1, 2) == set()
    assert staged(2, 4) == set()


# -- refusals -----------------------------------------------------------------------------------------------------


def refused(sources: list[Manifest], target: Manifest, **known: int) -> str:
    with pytest.raises(PlanRefused) as caught:
        plan(sources, target, **known)
    return str(caught.value)


def with_tensor(manifest: Manifest, name: str, change: Callable[[TensorLayout], TensorLayout | None]) -> Manifest:
    """The manifest with one tensor changed or (None) left out."""
    tensors = [change(layout) if layout.name == name else layout for layout in manifest.tensors]
    return replace(manifest, tensors=tuple(layout for layout in tensors if layout is not None))


def test_a_missing_rank_is_refused() -> None:
    sources, targets = pair(4, 2, 4)
    assert "target.0.CONV: source rank 2 of p0 (TP4) is missing" in refused([*sources[:2], sources[3]], targets[0])


def test_no_rank_at_all_is_refused() -> None:
    assert "no source rank" in refused([], pair(1, 1, 2)[1][0])


def test_a_duplicate_rank_is_refused() -> None:
    sources, targets = pair(2, 1, 2)
    text = refused([*sources, sources[1]], targets[0])
    assert "target.0.CONV" in text and "source rank 1" in text and "2 manifests" in text


def test_a_rank_beyond_the_size_is_refused() -> None:
    sources, targets = pair(2, 1, 2)
    assert "rank 5 does not exist" in refused([*sources, replace(sources[1], rank=5)], targets[0])


def test_ranks_of_different_lives_are_refused() -> None:
    sources, targets = pair(2, 1, 2)
    text = refused([sources[0], replace(sources[1], incarnation=2)], targets[0])
    assert "source rank 1 of p0 is incarnation 2" in text


def test_a_life_other_than_the_known_one_is_refused_on_either_side() -> None:
    sources, targets = pair(2, 1, 2)
    assert "alive is 7" in refused(sources, targets[0], source_incarnation=7)
    assert "alive is 8" in refused(sources, targets[0], target_incarnation=8)


def test_another_model_is_refused() -> None:
    sources, targets = pair(2, 1, 2)
    text = refused([sources[0], replace(sources[1], model_fingerprint="other")], targets[0])
    assert "model fingerprint other" in text and "rank 1" in text and "tiny" in text


def test_another_block_size_is_refused() -> None:
    sources, targets = pair(2, 1, 2)
    assert "block size 8" in refused([replace(source, block_size=8) for source in sources], targets[0])
    lying = with_tensor(sources[1], "target.1.KEY", lambda layout: replace(layout, rows_per_resource=8))
    assert refused([sources[0], lying], targets[0]).startswith("target.1.KEY: block size is 8 on source rank 1, 4")


def test_another_dtype_is_refused() -> None:
    sources, targets = pair(2, 1, 2)
    lying = with_tensor(sources[0], "target.1.VALUE", lambda layout: replace(layout, dtype="bfloat16"))
    assert refused([lying, sources[1]], targets[0]) == (
        "target.1.VALUE: dtype is bfloat16 on source rank 0, float32 on the target"
    )


@pytest.mark.parametrize("name", ["target.0.CONV", "target.0.SSM", "target.1.KEY", "target.1.VALUE", "draft.0.KEY"])
def test_an_omitted_tensor_is_refused(name: str) -> None:
    sources, targets = pair(2, 1, 2)
    text = refused([sources[0], with_tensor(sources[1], name, lambda layout: None)], targets[0])
    assert text.startswith(f"{name}: source rank 1 of p0 does not publish it")


def test_a_prefill_instance_without_draft_cache_is_refused_with_the_option_to_set() -> None:
    model = geometry()
    sources = instance(NaivePlane(), model, "p0", 1)
    target = instance(NaivePlane(), model, "d0", 1, speculative_tokens=3)[0]
    text = refused(sources, target)
    assert text.startswith("draft.0.KEY")
    assert "d0 drafts (num_speculative_tokens 3)" in text
    assert "prefill_num_speculative_tokens, at least 1" in text


@pytest.mark.parametrize(("source_depth", "target_depth"), [(1, 3), (3, 1), (8, 2), (2, 0)])
def test_unequal_draft_depths_move_the_live_state_and_the_draft_cache_only_where_it_is_used(
    source_depth: int, target_depth: int
) -> None:
    """C33: the same bytes as between equal depths; a target that does not draft leaves the draft behind."""
    model = geometry()
    sources = instance(NaivePlane(), model, "p0", 2, speculative_tokens=source_depth)
    target = instance(NaivePlane(), model, "d0", 1, speculative_tokens=target_depth)[0]
    equal = instance(NaivePlane(), model, "p0", 2, speculative_tokens=target_depth)

    def moved(manifests: list[Manifest]) -> list[tuple[str, int, tuple[Segment, ...]]]:
        return [(route.name, route.source_rank, route.segments) for route in plan(manifests, target).routes]

    assert moved(sources) == moved(equal)
    assert any(name.startswith("draft.") for name, _, _ in moved(sources)) is (target_depth > 0)


def test_a_tensor_that_the_target_does_not_know_is_refused() -> None:
    sources, targets = pair(2, 1, 2)
    renamed = with_tensor(sources[0], "target.1.KEY", lambda layout: replace(layout, name="target.9.KEY", layer=9))
    target = with_tensor(targets[0], "target.1.KEY", lambda layout: None)
    assert refused([renamed, sources[1]], target).startswith("target.9.KEY: unknown to target rank 0")


def test_a_tensor_published_twice_is_refused() -> None:
    sources, targets = pair(1, 1, 2)
    doubled = replace(sources[0], tensors=(*sources[0].tensors, sources[0].tensors[0]))
    assert "target.0.CONV: source rank 0 publishes it twice" in refused([doubled], targets[0])


def respan(**change: int) -> Callable[[TensorLayout], TensorLayout]:
    return lambda layout: replace(layout, spans=(replace(layout.spans[0], **change), *layout.spans[1:]))


def test_a_gap_between_source_spans_is_refused() -> None:
    sources, targets = pair(2, 1, 4)
    short = with_tensor(sources[0], "target.1.KEY", respan(length=1))
    assert "target.1.KEY: gap, no source rank holds kv_heads[1, 2)" in refused([short, sources[1]], targets[0])


def test_a_gap_at_the_end_is_refused() -> None:
    sources, targets = pair(2, 1, 4)
    short = with_tensor(sources[1], "target.1.KEY", respan(length=1))
    assert "target.1.KEY: gap, no source rank holds kv_heads[3, 4)" in refused([sources[0], short], targets[0])


def test_source_spans_that_overlap_without_being_replicas_are_refused() -> None:
    sources, targets = pair(2, 1, 4)
    shifted = with_tensor(sources[1], "target.1.KEY", respan(start=1))
    assert "target.1.KEY: overlap, source ranks 0 and 1" in refused([sources[0], shifted], targets[0])


def test_a_span_outside_its_axis_or_row_is_refused() -> None:
    sources, targets = pair(2, 1, 4)
    outside = with_tensor(sources[1], "target.1.KEY", respan(start=3))
    assert "target.1.KEY: kv_heads[3, 5) on source rank 1 leaves axis" in refused([sources[0], outside], targets[0])
    beyond = with_tensor(sources[1], "target.1.KEY", respan(offset=1))
    assert "leaves its row of 2 units" in refused([sources[0], beyond], targets[0])


def test_spans_of_one_row_that_overlap_are_refused() -> None:
    sources, targets = pair(1, 1, 4)
    double = with_tensor(
        targets[0], "target.0.CONV", lambda layout: replace(layout, spans=(*layout.spans, layout.spans[0]))
    )
    assert "target.0.CONV: overlap of Q" in refused(sources, double)


def test_a_target_row_that_no_span_covers_is_refused() -> None:
    sources, targets = pair(1, 1, 4)
    holey = with_tensor(targets[0], "target.0.CONV", lambda layout: replace(layout, spans=layout.spans[:2]))
    assert "target.0.CONV: gap, no writer for units" in refused(sources, holey)


def test_a_source_that_names_no_chunk_size_is_refused_only_where_staging_needs_it() -> None:
    sources, targets = pair(2, 1, 2)
    silent = [replace(source, max_tokens_per_chunk=0) for source in sources]
    assert "max_tokens_per_chunk" in refused(silent, targets[0])
    sources, targets = pair(2, 2, 2)
    plan([replace(source, max_tokens_per_chunk=0) for source in sources], targets[0])


# -- objects that cannot exist ------------------------------------------------------------------------------------


def a_plan() -> TransferPlan:
    sources, targets = pair(2, 1, 2)
    return plan(sources, targets[0])


def rebuilt(original: TransferPlan, routes: tuple[Route, ...]) -> TransferPlan:
    fields = {name: getattr(original, name) for name in original.__dataclass_fields__}
    return TransferPlan(**(fields | {"routes": routes}))


def test_a_plan_without_one_of_its_routes_cannot_be_built() -> None:
    original = a_plan()
    for left_out in range(len(original.routes)):
        routes = original.routes[:left_out] + original.routes[left_out + 1 :]
        with pytest.raises(PlanRefused, match="gap, no writer"):
            rebuilt(original, routes)


def test_a_plan_with_a_second_writer_cannot_be_built() -> None:
    original = a_plan()
    with pytest.raises(PlanRefused, match="overlap, unit 0"):
        rebuilt(original, (*original.routes, original.routes[0]))


def test_an_empty_segment_cannot_be_built() -> None:
    with pytest.raises(PlanRefused):
        Segment("kv_heads", 0, 0, 0, 0)


def test_an_interleaving_route_cannot_be_in_place() -> None:
    route = next(route for route in a_plan().routes if route.target.role == "KEY")
    with pytest.raises(PlanRefused, match="cannot write in place"):
        Route(route.source_rank, route.source, route.target, route.segments, True)


def test_windows_hold_one_chunk_and_the_state_behind_it() -> None:
    original = a_plan()
    for rank, window in original.windows.items():
        staged = original.select(source_rank=rank, in_place=False)
        assert set(window.offsets) == {route.name for route in staged}
        ends = []
        for route in staged:
            rows = original.chunk_tokens_max if route.by_block else route.target.live_rows
            ends.append((window.offsets[route.name], window.offsets[route.name] + rows * route.row_bytes))
        ends.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert ends[-1][1] <= window.size_bytes
        block_areas = [window.offsets[route.name] for route in staged if route.by_block]
        state_areas = [window.offsets[route.name] for route in staged if not route.by_block]
        assert max(block_areas) < min(state_areas)
