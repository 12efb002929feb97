"""The worker's side of a hand-off: what a prefill rank reports, and how a decode rank goes on from restored caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from actors.worker.device import Device
from messages.batch import BatchRow, ExecuteBatch, SequenceStart
from messages.layout import Namespace
from messages.requests import SamplingParams
from tests.worker.harness import LocalEngine, Reference, Request, prompts_of

PREFIX_LENGTHS = [1, 16, 37, 50]


def sampling(max_tokens: int = 14) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def prefill(engine: LocalEngine, prompt: list[int], chunk_tokens: int = 0) -> Request:
    """Prefill on ``engine`` as P does: the request keeps its blocks and slot, and has its first token."""
    request = Request(prompt=tuple(prompt), sampling=sampling(1))
    engine.reserve(request)
    release = engine.release
    engine.release = lambda _: None  # type: ignore[method-assign,assignment]
    try:
        engine.run([request], chunk_tokens=chunk_tokens)
    finally:
        engine.release = release  # type: ignore[method-assign]
    return request


def hand_over(source: LocalEngine, sent: Request, target: LocalEngine, name: str) -> Request:
    """Copy live rows rank by rank (equal TP) into a reservation on ``target``; the request is ready to decode there."""
    request = Request(prompt=sent.prompt, sampling=sampling(), name=name, outputs=list(sent.outputs))
    target.reserve(request)
    for rank, runner in enumerate(source.runners):
        own = {tensor.name: tensor for tensor in target.runners[rank].plan.tensors}
        for theirs in runner.plan.tensors:
            mine = own.get(theirs.name)
            if mine is None:
                continue
            by_block = theirs.addressed_by == "block"
            pairs = zip(sent.blocks, request.blocks, strict=False) if by_block else [(sent.slot, request.slot)]
            size = theirs.live_rows * theirs.row_stride_bytes
            for source_row, target_row in pairs:
                a = theirs.base_bytes + source_row * theirs.resource_stride_bytes
                b = mine.base_bytes + target_row * mine.resource_stride_bytes
                target.regions[rank][b : b + size] = source.regions[rank][a : a + size]
    request.computed = len(sent.prompt)
    request.start = SequenceStart(
        request_id=name,
        epoch=0,
        slot=request.slot,
        sampling=request.sampling,
        prompt_token_ids=sent.prompt,
        output_token_ids=tuple(sent.outputs),
        bootstrap_hidden=sent.result.bootstrap,
        bootstrap_dtype=sent.result.bootstrap_dtype,
        restored=True,
    )
    return request


@pytest.mark.parametrize(("source_depth", "target_depth"), [(0, 0), (3, 3), (1, 5), (5, 1), (3, 0)])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_decoding_goes_on_from_restored_caches_at_any_pair_of_depths(
    model_dir: Path, reference: Reference, tp_size: int, source_depth: int, target_depth: int
) -> None:
    """C33: only the live state moves, so P and D need not use the same S; hand-offs join a running batch (C31)."""
    with (
        LocalEngine(model_dir, tp_size, speculative_tokens=source_depth) as source,
        LocalEngine(model_dir, tp_size, speculative_tokens=target_depth) as target,
    ):
        target.generate(prompts_of([44, 60]), sampling(4))  # the slots and blocks have had other owners
        requests = [
            hand_over(source, prefill(source, prompt, chunk_tokens=20), target, f"r{index}")
            for index, prompt in enumerate(prompts_of(PREFIX_LENGTHS))
        ]
        target.run(requests, arrivals=[0, 0, 3, 4])
    for request in requests:
        assert not request.result.error
        assert len(request.outputs) == 14
        reference.assert_greedy(request.prompt, request.outputs)
        assert (request.result.drafted > 0) == (target_depth > 0)


class ApartDevice(Device):
    """The CPU, but with caches of its own as on an accelerator, so that only the mirror reaches the host region."""

    shares_host_memory = False  # type: ignore[assignment]


@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_an_accelerators_caches_reach_the_host_region_and_come_back(
    model_dir: Path, reference: Reference, speculative_tokens: int
) -> None:
    seen: list[tuple[Namespace, int]] = []
    with (
        LocalEngine(model_dir, speculative_tokens=speculative_tokens, device=ApartDevice("cpu")) as source,
        LocalEngine(model_dir, speculative_tokens=speculative_tokens, device=ApartDevice("cpu")) as target,
    ):
        requests = [
            hand_over(source, prefill(source, prompt, chunk_tokens=20), target, f"r{index}")
            for index, prompt in enumerate(prompts_of(PREFIX_LENGTHS))
        ]
        target.run(requests, arrivals=[0, 0, 3, 4])
        pushed = Request(prompt=tuple(prompts_of([20])[0]), sampling=sampling(), name="pushed")
        source.reserve(pushed)
        row = msgspec.structs.replace(source._row(pushed, 0), push_chunk=0)
        source.execute(
            [row],
            [source._start(pushed)],
            on_layer_ready=lambda _row, namespace, layer, _last: seen.append((namespace, layer)),
        )
    for request in requests:
        assert not request.result.error
        reference.assert_greedy(request.prompt, request.outputs)
    assert seen == [("target", 3), ("draft", 0)][: 2 if speculative_tokens else 1]


def test_the_first_step_after_a_hand_off_drafts_what_a_mixed_instance_would(model_dir: Path) -> None:
    """C34: the draft's state really arrived, so acceptance cannot differ."""
    prompts = prompts_of(PREFIX_LENGTHS)
    drafted: dict[str, list[list[int]]] = {}

    def spy(engine: LocalEngine, label: str) -> None:
        drafter = engine.runners[0]._drafter
        assert drafter is not None
        original = drafter.propose

        def propose(rows):  # type: ignore[no-untyped-def]
            proposals = original(rows)
            drafted.setdefault(label, []).extend(list(proposal.tokens) for proposal in proposals)
            return proposals

        drafter.propose = propose  # type: ignore[method-assign]

    with LocalEngine(model_dir, speculative_tokens=3) as mixed:
        spy(mixed, "mixed")
        for prompt in prompts:
            mixed.generate([prompt], sampling())
    with (
        LocalEngine(model_dir, speculative_tokens=3) as source,
        LocalEngine(model_dir, speculative_tokens=3) as target,
    ):
        spy(target, "restored")
        for index, prompt in enumerate(prompts):
            target.run([hand_over(source, prefill(source, prompt), target, f"r{index}")])
    assert drafted["restored"] == drafted["mixed"]


Change = Callable[[SequenceStart], SequenceStart]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda start: msgspec.structs.replace(start, bootstrap_hidden=b""), "carried no MTP bootstrap"),
        (
            lambda start: msgspec.structs.replace(start, bootstrap_hidden=b"12345678"),
            "has 8 bytes, this model needs 256",
        ),
        (
            lambda start: msgspec.structs.replace(start, bootstrap_dtype="bfloat16"),
            "is bfloat16, this instance computes",
        ),
        (lambda start: msgspec.structs.replace(start, bootstrap_hidden=b"\xff" * 256), "not finite"),
        (lambda start: msgspec.structs.replace(start, output_token_ids=()), "first output token"),
    ],
)
def test_a_bad_bootstrap_fails_its_own_request_only(
    model_dir: Path, reference: Reference, change: Change, text: str
) -> None:
    """C35: the instance lives on, and so do the others in the batch."""
    with (
        LocalEngine(model_dir, speculative_tokens=2) as source,
        LocalEngine(model_dir, speculative_tokens=2) as target,
    ):
        good, bad = (
            hand_over(source, prefill(source, prompt), target, name)
            for prompt, name in zip(prompts_of([20, 30]), ("good", "bad"), strict=True)
        )
        assert bad.start is not None
        bad.start = change(bad.start)
        target.run([bad, good])
        assert text in bad.result.error
        assert not good.result.error
        reference.assert_greedy(good.prompt, good.outputs)
        (after,) = target.generate(prompts_of([33]), sampling())
    assert not after.error


@pytest.mark.parametrize("speculative_tokens", [0, 2])
def test_layers_are_reported_in_order_and_the_last_one_closes_the_chunk(
    tmp_path_factory: pytest.TempPathFactory, speculative_tokens: int
) -> None:
    from dataclasses import replace

    from tests.worker.harness import TINY, tiny_checkpoint

    folder = tiny_checkpoint(tmp_path_factory.mktemp("two"), sizes=replace(TINY, full_attention_interval=2))
    seen: list[tuple[str, int, Namespace, int, bool]] = []

    def on_layer_ready(row: BatchRow, namespace: Namespace, layer: int, is_last: bool) -> None:
        seen.append((row.request_id, row.push_chunk, namespace, layer, is_last))

    with LocalEngine(folder, speculative_tokens=speculative_tokens) as engine:
        starts, rows = [], []
        for name, push in (("pushed", 4), ("kept", -1)):
            request = Request(prompt=tuple(prompts_of([20])[0]), sampling=sampling(), name=name)
            engine.reserve(request)
            starts.append(engine._start(request))
            row = engine._row(request, 8)
            rows.append(msgspec.structs.replace(row, push_chunk=push))
        engine.execute(rows, starts, on_layer_ready=on_layer_ready)
    target = [("pushed", 4, "target", 1, False), ("pushed", 4, "target", 3, not speculative_tokens)]
    assert seen == (target if not speculative_tokens else [*target, ("pushed", 4, "draft", 0, True)])


def test_a_reported_layer_is_final_in_the_region(model_dir: Path) -> None:
    """What a transfer reads at the moment of the callback is what lies there when the step is over."""
    with LocalEngine(model_dir) as engine:
        request = Request(prompt=tuple(prompts_of([40])[0]), sampling=sampling(), name="r")
        engine.reserve(request)
        row = msgspec.structs.replace(engine._row(request, 0), push_chunk=0)
        key = next(tensor for tensor in engine.plan.tensors if tensor.role == "KEY")
        span = slice(key.base_bytes, key.base_bytes + key.resource_count * key.resource_stride_bytes)
        snapshots: list[bytes] = []
        batch = ExecuteBatch(step=1, incarnation=1, rows=(row,), opened=(engine._start(request),))
        engine.runners[0].execute(batch, lambda *_: snapshots.append(bytes(engine.regions[0][span])))
        assert snapshots == [bytes(engine.regions[0][span])]
        assert any(snapshots[0])
