"""Deliberate bugs, one at a time, planted into the real machines: what a simulation worth its name must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from actors.engine.receives import Receives
from actors.gateway.machine import GatewayMachine
from actors.gateway.record import Record, Released
from actors.runtime.machine import Effect, Send
from actors.scheduler import batching
from actors.scheduler.batching import Batcher
from actors.scheduler.blocks import CachePool
from actors.scheduler.decode_side import DecodeSide
from actors.scheduler.machine import SchedulerMachine
from actors.scheduler.offers import Offers
from actors.scheduler.planning import Planner
from actors.scheduler.prefill_side import PrefillSide
from actors.scheduler.reservations import RECEIVE_PIN
from actors.scheduler.sequence import Sequence
from actors.scheduler.transitions import DecodeState
from actors.transfer import plan, ranges
from actors.transfer.attempts import Tombstones
from actors.transfer.receive import Receive
from actors.transfer.routes import Route, Run
from actors.transfer.source_machine import Lane, SourceMachine
from actors.transfer.staging_machine import TRANSITIONS, LeaseEvent, LeaseState
from actors.transfer.target_machine import TargetMachine
from messages.base import instance_of
from messages.cluster import InstanceLost
from messages.lifecycle import PeerLost
from messages.requests import SubmitRequest
from messages.transfer import AllRestored

Patch = tuple[Any, str, Any]
"""(class, attribute, what it is for the length of a run)."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug ``name`` is in the machines until the block ends."""
    owner, attribute, value = MUTATIONS[name]()
    old = owner.__dict__[attribute] if isinstance(owner, type) else owner[attribute]
    _put(owner, attribute, value)
    try:
        yield
    finally:
        _put(owner, attribute, old)


def _put(owner: Any, attribute: Any, value: Any) -> None:
    """What a process remembers of plans was made with the bug, or without: it is forgotten either way."""
    plan._plan.cache_clear()
    ranges._groups.cache_clear()
    if isinstance(owner, type):
        setattr(owner, attribute, value)
    else:
        owner[attribute] = value


def _free_before_drained() -> Patch:
    original = DecodeSide._give_up

    def give_up(self: Any, now_ns: int, attempt: Any, reason: str) -> None:
        original(self, now_ns, attempt, reason)
        if attempt.state is DecodeState.DRAINING and attempt.holding is not None:
            self._pool.unpin(attempt.holding, RECEIVE_PIN)

    return DecodeSide, "_give_up", give_up


def _drained_without_asking_the_writers() -> Patch:
    def aborts(self: Any, receive: Receive) -> list[Effect]:
        receive.undrained.clear()
        return []

    return TargetMachine, "_aborts", aborts


def _window_reused_early() -> Patch:
    return Lane, "may_write", lambda self, chunk_index: True


def _completion_counted_twice() -> Patch:
    original = Receives._on_restored

    def on_restored(self: Any, now_ns: int, sender: str, message: Any) -> list[Effect]:
        receive = self._receives.get((message.request_id, message.epoch))
        if receive is not None and message.rank in receive.restored:
            other = next((rank for rank in range(len(self._transfers)) if rank not in receive.restored), 0)
            receive.restored[other] = message
        effects: list[Effect] = original(self, now_ns, sender, message)
        return effects

    return Receives, "_on_restored", on_restored


def _restored_by_one_rank_is_enough() -> Patch:
    original = Receives._on_restored

    def on_restored(self: Any, now_ns: int, sender: str, message: Any) -> list[Effect]:
        receive = self._receives.get((message.request_id, message.epoch))
        if receive is not None:
            for rank in range(len(self._transfers)):
                receive.restored.setdefault(rank, message)
        effects: list[Effect] = original(self, now_ns, sender, message)
        return effects

    return Receives, "_on_restored", on_restored


def _restored_before_the_last_chunk() -> Patch:
    return Receive, "covered", property(lambda self: True)


def _decoded_before_restored() -> Patch:
    original = DecodeSide._on_first_generation

    def on_first_generation(self: Any, now_ns: int, sender: str, message: Any) -> None:
        original(self, now_ns, sender, message)
        restored = AllRestored(
            request_id=message.request_id,
            epoch=message.epoch,
            bytes_moved=0,
            push_ms=0.0,
            pull_ms=0.0,
            merge_ms=0.0,
            sync_ms=0.0,
        )
        self._on_all_restored(now_ns, sender, restored)

    return DecodeSide, "_on_first_generation", on_first_generation


def _prefill_frees_when_it_hands_over() -> Patch:
    original = PrefillSide._hand_off

    def hand_off(self: Any, request: Any, offer: Any) -> None:
        original(self, request, offer)
        pool, holding = self._batcher.pool, request.sequence.holding
        if holding is not None and not holding.released:
            pool.blocks.give_back(holding.owner, holding.blocks)
            pool.slots.give_back(holding.owner, (holding.slot,))
            pool.holdings.pop(holding.owner)
            holding.released = holding.freed = True

    return PrefillSide, "_hand_off", hand_off


def _the_next_life_buried_with_the_last() -> Patch:
    original = SchedulerMachine.handle

    def handle(self: Any, now_ns: int, sender: str, message: Any) -> list[Effect]:
        if isinstance(message, InstanceLost):
            message = msgspec.structs.replace(message, incarnation=message.incarnation + 1)
        effects: list[Effect] = original(self, now_ns, sender, message)
        return effects

    return SchedulerMachine, "handle", handle


def _tokens_delivered_as_they_come() -> Patch:
    def accept(self: Any, generation: Any) -> Released | None:
        self.tokens += generation.token_ids
        return Released(generation.first_index, generation.token_ids, generation.logprobs, ())

    return Record, "accept", accept


def _resubmitted_with_another_seed() -> Patch:
    original = GatewayMachine.handle

    def handle(self: Any, now_ns: int, sender: str, message: Any) -> list[Effect]:
        effects: list[Effect] = original(self, now_ns, sender, message)
        return [_reseeded(effect) for effect in effects]

    return GatewayMachine, "handle", handle


def _reseeded(effect: Effect) -> Effect:
    if not isinstance(effect, Send) or not isinstance(effect.message, SubmitRequest) or not effect.message.epoch:
        return effect
    submit = effect.message
    sampling = msgspec.structs.replace(submit.sampling, seed=submit.sampling.seed + submit.epoch)
    return Send(effect.to, msgspec.structs.replace(submit, sampling=sampling))


def _ended_attempts_forgotten() -> Patch:
    return Tombstones, "__contains__", lambda self, attempt: False


def _stopped_pushes_go_on() -> Patch:
    def on_abort_push(self: Any, now_ns: int, sender: str, message: Any) -> list[Effect]:
        return [self._drained((message.request_id, message.epoch), sender)]

    return SourceMachine, "on_abort_push", on_abort_push


def _conv_concatenated_without_regrouping() -> Patch:
    original = Route.__dict__["runs"].func

    def runs(self: Any) -> tuple[Run, ...]:
        found: tuple[Run, ...] = original(self)
        if self.target.role != "CONV" or self.in_place:
            return found
        base = self.source_rank * self.row_bytes
        return tuple(Run(run.source_bytes, run.staged_bytes, base + run.staged_bytes, run.size_bytes) for run in found)

    return Route, "runs", property(runs)


def _memory_of_a_running_step_freed() -> Patch:
    original = CachePool.pin

    def pin(self: Any, holding: Any, pin: Any) -> None:
        if not str(pin).startswith("step "):
            original(self, holding, pin)

    return CachePool, "pin", pin


def _two_steps_in_flight_share_their_pin() -> Patch:
    return batching.__dict__, "step_pin", lambda number: "step "  # type: ignore[return-value]  # as one ends, both let go


def _lease_freed_during_its_merge() -> Patch:
    return TRANSITIONS.rows, (LeaseState.MERGING, LeaseEvent.GIVEN_BACK), LeaseState.FREE  # type: ignore[return-value]


def _a_preempted_sequence_keeps_its_progress() -> Patch:
    original = Batcher.preempt

    def preempt(self: Any, victim: Any) -> None:
        computed = victim.computed
        original(self, victim)
        victim.computed = computed

    return Batcher, "preempt", preempt


def _drafts_give_way_to_memory() -> Patch:
    original = Planner._add_decode

    def add_decode(self: Any, sequence: Any) -> bool:
        whole = self._limits
        needed = self._pool.blocks_for(sequence.total + whole.speculative_tokens) - len(sequence.holding.blocks)
        if needed > self._pool.blocks.free_count:
            self._limits = replace(whole, speculative_tokens=0)
        try:
            return original(self, sequence)
        finally:
            self._limits = whole

    return Planner, "_add_decode", add_decode


def _output_computed_again_to_its_last_token() -> Patch:
    return Sequence, "prefill_end", property(lambda self: self.total)


def _a_continuation_decodes_two_tokens_early() -> Patch:
    return Sequence, "prefill_end", property(lambda self: max(len(self.prompt), self.total - 2))


def _samples_share_the_block_they_go_on_in() -> Patch:
    original = CachePool.fork

    def fork(self: Any, holding: Any, owner: Any, shared_count: int, block_count: int) -> Any:
        return original(self, holding, owner, min(shared_count + 1, block_count, len(holding.blocks)), block_count)

    return CachePool, "fork", fork


def _samples_do_not_hold_what_they_share() -> Patch:
    original = CachePool.join

    def join(self: Any, holding: Any, owner: Any) -> Any:
        joined = original(self, holding, owner)
        holding.pins.discard(owner)
        return joined

    return CachePool, "join", join


def _stale_epochs_accepted_by_the_gateway() -> Patch:
    def is_current(self: Any, epoch: int) -> bool:
        self.epoch = max(self.epoch, epoch)
        return True

    return Record, "is_current", is_current


def _an_older_offers_answer_accepted() -> Patch:
    def find(self: Any, request_id: str, epoch: int, instance: str, incarnation: int) -> Any:
        offers = [offer for (name, _), offer in self.open.items() if name == request_id]
        here = [offer for offer in offers if (offer.instance, offer.incarnation) == (instance, incarnation)]
        return here[-1] if here else None

    return Offers, "find", find


def _an_older_attempts_chunk_accepted() -> Patch:
    original = TargetMachine.on_chunk_arrived

    def on_chunk_arrived(self: Any, now_ns: int, sender: str, message: Any) -> list[Effect]:
        newest = [
            r for (name, epoch), r in self.receives.items() if name == message.request_id and epoch > message.epoch
        ]
        if newest:
            receive = newest[-1]
            message = msgspec.structs.replace(
                message,
                epoch=receive.attempt[1],
                generation=receive.generation,
                source_instance=receive.link.instance,
                source_incarnation=receive.link.incarnation,
            )
        effects: list[Effect] = original(self, now_ns, sender, message)
        return effects

    return TargetMachine, "on_chunk_arrived", on_chunk_arrived


def _an_older_attempts_cancel_obeyed() -> Patch:
    original = PrefillSide.on_cancel_request

    def on_cancel_request(self: Any, now_ns: int, sender: str, message: Any) -> None:
        request = self._book.requests.get(message.request_id)
        if request is not None and request.submit.epoch > message.epoch:
            message = msgspec.structs.replace(message, epoch=request.submit.epoch)
        original(self, now_ns, sender, message)

    return PrefillSide, "on_cancel_request", on_cancel_request


def _a_broken_link_taken_for_a_death() -> Patch:
    original = SchedulerMachine.handle

    def handle(self: Any, now_ns: int, sender: str, message: Any) -> list[Effect]:
        peer = self.peers.current(instance_of(message.node)) if isinstance(message, PeerLost) else None
        if peer is not None:
            lost = {"instance": peer.info.instance, "incarnation": peer.info.incarnation}
            message = InstanceLost(reason="the link broke", **lost)
        effects: list[Effect] = original(self, now_ns, sender, message)
        return effects

    return SchedulerMachine, "handle", handle


MUTATIONS: dict[str, Callable[[], Patch]] = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        _free_before_drained,
        _drained_without_asking_the_writers,
        _window_reused_early,
        _completion_counted_twice,
        _restored_by_one_rank_is_enough,
        _restored_before_the_last_chunk,
        _decoded_before_restored,
        _prefill_frees_when_it_hands_over,
        _the_next_life_buried_with_the_last,
        _tokens_delivered_as_they_come,
        _resubmitted_with_another_seed,
        _ended_attempts_forgotten,
        _stopped_pushes_go_on,
        _conv_concatenated_without_regrouping,
        _memory_of_a_running_step_freed,
        _two_steps_in_flight_share_their_pin,
        _lease_freed_during_its_merge,
        _a_preempted_sequence_keeps_its_progress,
        _drafts_give_way_to_memory,
        _output_computed_again_to_its_last_token,
        _a_continuation_decodes_two_tokens_early,
        _samples_share_the_block_they_go_on_in,
        _samples_do_not_hold_what_they_share,
        _stale_epochs_accepted_by_the_gateway,
        _an_older_offers_answer_accepted,
        _an_older_attempts_chunk_accepted,
        _an_older_attempts_cancel_obeyed,
        _a_broken_link_taken_for_a_death,
    )
}
"""Name of a bug → how it is planted."""
