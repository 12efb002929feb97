"""C29 with drafts: a seed repeats its tokens whatever its neighbours need, and on whatever instance it goes on.

A real scheduler drives a real rank. What is drawn depends on where the steps before it began, what they drafted and
from which state, so each of these is compared, too. All is float32 on the demo model with fixed seeds: recomputed
caches differ in their last bits, and a draw changes only if its uniform number lies as near to a limit. These do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch

from actors.worker.sequences import OpenSequence
from actors.worker.speculation import Drafter, Proposal
from messages.base import control_address
from messages.batch import BatchRow, ExecuteBatch
from messages.requests import Finished, Generation, Sibling, SubmitRequest
from scripts.models import DEMO_MODEL_DIR
from tests.scheduler.harness import Harness, submit
from tests.scheduler.invariants import check_idle
from tests.worker.harness import LocalEngine, one_thread

BLOCK_SIZE = 4
AMPLE_BLOCKS = 200
MAX_TOKENS = 24
Draft = tuple[tuple[int, ...], tuple[torch.Tensor, ...]]


@dataclass
class Served:
    """What requests got: the tokens of each step, and every proposal by (request, index of its first token)."""

    steps: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    proposals: dict[tuple[str, int], Draft] = field(default_factory=dict)
    usage: dict[str, tuple[int, ...]] = field(default_factory=dict)
    preempted: int = 0

    def tokens(self, request_id: str) -> list[int]:
        return [token for step in self.steps[request_id] for token in step]


@pytest.fixture(scope="module", params=[1, 3, 5], ids="S={}".format)
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    options = {"speculative_tokens": request.param, "block_size": BLOCK_SIZE, "block_count": AMPLE_BLOCKS}
    with one_thread(), LocalEngine(DEMO_MODEL_DIR, slot_count=8, **options) as running:
        yield running


def requests() -> list[SubmitRequest]:
    rules: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.4},
        {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.2},
        {"temperature": 0.0},
        {"temperature": 0.9, "min_p": 0.02},
    ]
    return [
        submit(
            f"r{salt}",
            [300 + (salt * 977 + i * i * 31 + i * 7) % 1500 for i in range(9 + 3 * salt)],
            seed=11 + salt,
            max_tokens=MAX_TOKENS - salt,
            eos_token_ids=(),
            **rule,
        )
        for salt, rule in enumerate(rules)
    ]


def serve(engine: LocalEngine, submits: Sequence[SubmitRequest], **options: Any) -> Served:
    """All at once on a mixed instance with this much memory and room in a step."""
    found = Served()
    original = Drafter.propose

    def propose(self: Drafter, rows: Sequence[tuple[OpenSequence, BatchRow]]) -> list[Proposal]:
        proposals = original(self, rows)
        for (sequence, _), proposal in zip(rows, proposals, strict=True):
            key = (sequence.request_id, len(sequence.outputs))
            found.proposals[key] = (tuple(proposal.tokens), tuple(proposal.weights))
        return proposals

    settings = engine.plan.settings
    limits: dict[str, Any] = {"block_count": AMPLE_BLOCKS, "max_tokens_per_batch": 64, "max_seqs_per_batch": 8}
    depth = settings.speculative_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "propose", propose)
        machine = Harness(
            block_size=BLOCK_SIZE, slot_count=8, max_model_len=64, speculative_tokens=depth, **limits | options
        )
        for message in submits:
            machine.tell(message)
        while batches := machine.take(ExecuteBatch):
            (batch,) = batches
            result = engine.execute(batch.rows, batch.opened, batch.closed)
            answer = msgspec.structs.replace(result, step=batch.step, incarnation=1)
            machine.tell(answer, control_address("m0", "engine"))
    check_idle(machine.machine)
    for generation in machine.take(Generation):
        found.steps.setdefault(generation.request_id, []).append(generation.token_ids)
    for end in machine.take(Finished):
        usage = end.usage
        found.usage[end.request_id] = (usage.completion_tokens, usage.drafted_tokens, usage.accepted_tokens)
    assert machine.machine.batcher is not None
    found.preempted = machine.machine.batcher.preempted_count
    return found


@pytest.fixture(scope="module")
def alone(engine: LocalEngine) -> Served:
    """Every request on its own, undisturbed."""
    merged = Served()
    for message in requests():
        served = serve(engine, [message])
        for name in ("steps", "proposals", "usage"):
            getattr(merged, name).update(getattr(served, name))
    assert all(accepted > 0 for _, _, accepted in merged.usage.values())
    return merged


def assert_same(found: Served, expected: Served) -> None:
    """The same tokens in the same steps, proposed from the same draft distributions."""
    assert found.steps == expected.steps
    assert found.usage == expected.usage
    assert found.proposals.keys() == expected.proposals.keys()
    for key, (tokens, weights) in expected.proposals.items():
        assert found.proposals[key][0] == tokens, key
        for ours, theirs in zip(found.proposals[key][1], weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("block_count", [12, 16, 20])
def test_a_seed_repeats_its_tokens_under_any_memory_pressure(
    engine: LocalEngine, alone: Served, block_count: int
) -> None:
    found = serve(engine, requests(), block_count=block_count)
    assert found.preempted >= 2
    assert_same(found, alone)


def test_a_seed_repeats_its_tokens_when_a_step_has_no_room_for_all_rows(engine: LocalEngine, alone: Served) -> None:
    """A row with all its drafts, or none: what is left of the budget never decides how much is drafted."""
    room = engine.plan.settings.speculative_tokens + 3
    assert_same(serve(engine, requests(), max_tokens_per_batch=room), alone)


def test_samples_of_one_prompt_repeat_their_tokens_under_memory_pressure(engine: LocalEngine) -> None:
    """C28: each is what a request with its seed gets alone, preempted or not."""
    first, *_ = requests()
    seeds = (5, 6, 7, 8)
    samplings = [msgspec.structs.replace(first.sampling, seed=seed) for seed in seeds]
    singles = [msgspec.structs.replace(first, request_id=f"s{k}", sampling=samplings[k]) for k in range(len(seeds))]
    siblings = [Sibling(request_id=f"s{k}", epoch=0, sampling=samplings[k]) for k in range(1, len(seeds))]
    together = msgspec.structs.replace(singles[0], siblings=tuple(siblings))
    expected = [serve(engine, [single]).steps[single.request_id] for single in singles]
    found = serve(engine, [together], block_count=16)
    assert found.preempted >= 2
    assert [found.steps[single.request_id] for single in singles] == expected


def test_a_seed_goes_on_with_the_same_tokens_on_another_instance(engine: LocalEngine, alone: Served) -> None:
    """What the gateway submits when an instance died: the prompt and what is delivered, after any number of steps."""
    for message in requests():
        steps = alone.steps[message.request_id]
        for count in range(1, len(steps), 3):
            delivered = tuple(token for step in steps[:count] for token in step)
            again = msgspec.structs.replace(message, epoch=1 << 16, delivered_token_ids=delivered)
            assert serve(engine, [again]).steps[message.request_id] == steps[count:], (message.request_id, count)
