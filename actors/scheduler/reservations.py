"""Decode side: whether an offer is taken on, and the memory that it is given. The theory is in ``decode_side.py``."""

from __future__ import annotations

from typing import Final, Literal

from actors.scheduler.attempts import Answers, Attempt, Attempts, Ending
from actors.scheduler.batching import Batcher
from actors.scheduler.blocks import CachePool
from actors.scheduler.intake import check_request, final_tokens
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import LinkState, Peers
from actors.scheduler.settings import Capacity, SchedulerSettings
from actors.scheduler.transitions import DecodeEvent
from messages.handoff import AddNewRequest
from messages.transfer import ReserveLeases

RECEIVE_PIN: Final = "receive"
"""Pins an attempt's memory while any rank may write to it on a hand-off's behalf."""


def prompt_blocks(pool: CachePool, attempt: Attempt) -> tuple[int, ...]:
    """The blocks that hold what is prefilled: exactly as many as the prefill instance has (C03)."""
    assert attempt.holding is not None
    return tuple(attempt.holding.blocks[: pool.blocks_for(attempt.total)])


class Reservations:
    """Grants memory to offers. ``closed_because`` set: nothing is taken any more."""

    def __init__(
        self,
        settings: SchedulerSettings,
        capacity: Capacity,
        pool: CachePool,
        batcher: Batcher,
        peers: Peers,
        out: Outbox,
        attempts: Attempts,
        answers: Answers,
    ) -> None:
        self.closed_because = ""
        self._settings = settings
        self._capacity = capacity
        self._pool = pool
        self._batcher = batcher
        self._peers = peers
        self._out = out
        self._attempts = attempts
        self._answers = answers

    def refusal(self, offer: AddNewRequest) -> tuple[Literal[400, 404, 413], str] | None:
        """Why this offer is not even tried."""
        own = self._settings
        if self.closed_because:
            return 404, self.closed_because
        refusal = check_request(
            self._capacity,
            len(offer.prompt_token_ids),
            len(offer.delivered_token_ids),
            offer.sampling,
            decodes=True,
            instance=own.instance,
        )
        if refusal is not None:
            return refusal.code, refusal.reason
        source = self._peers.get(offer.source_instance, offer.source_incarnation)
        if source is None or source.state is not LinkState.LINKED:
            why = f": {source.link_error}" if source is not None and source.link_error else " yet"
            return 404, f"{own.instance} is not linked with {offer.source_instance}{why}"
        waiting = [s for s in self._batcher.waiting if s.priority == "online" or offer.priority == "offline"]
        if waiting:
            return 404, f"{len(waiting)} preempted requests wait for blocks on {own.instance}"
        return None

    def reserve(self, now_ns: int, attempt: Attempt) -> None:
        """Hold what decode needs at first; preempt offline sequences for an online request; or refuse."""
        lookahead = attempt.total + 1 + self._capacity.speculative_tokens
        final = final_tokens(self._capacity, len(attempt.offer.prompt_token_ids), attempt.offer.sampling)
        needed = self._pool.blocks_for(min(lookahead, final))
        spare = self._pool.blocks.count // 100 if self._batcher.running else 0  # for what already runs
        if not self._pool.fits(needed + spare):
            if attempt.offer.priority == "online" and self._batcher.preempt_offline(needed):
                if not self._pool.fits(needed):
                    return  # their memory comes free when the step in flight is over
            else:
                self._attempts.end(attempt, DecodeEvent.REFUSE, Ending.GIVEN_UP)
                self._answers.refuse(
                    attempt.offer,
                    404,
                    f"no room on {self._settings.instance} now: {needed} blocks and a slot are needed,"
                    f" {self._pool.blocks.free_count} blocks and {self._pool.slots.free_count} slots are free",
                )
                return
        attempt.holding = self._pool.hold(attempt.key, needed)
        if attempt.holding is None:
            raise AssertionError(f"{attempt.key}: {needed} blocks were free a moment ago")
        self._pool.pin(attempt.holding, RECEIVE_PIN)
        attempt.move(now_ns, DecodeEvent.HOLD)
        offer = attempt.offer
        self._out.send(
            self._settings.engine,
            ReserveLeases(
                request_id=offer.request_id,
                epoch=offer.epoch,
                source_instance=offer.source_instance,
                source_incarnation=offer.source_incarnation,
                mode=offer.mode,
                target_block_ids=prompt_blocks(self._pool, attempt),
                target_slot=attempt.holding.slot,
                prompt_tokens=attempt.total,
            ),
        )
