"""Owners of blocks and slots: by example and by chance."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from actors.scheduler.blocks import BlockPool, CachePool, Holding, OwnershipError, SlotPool


def test_the_lowest_free_blocks_are_granted_first_so_that_neighbours_coalesce() -> None:
    pool = BlockPool(8)
    assert pool.take(("a", 0), 3) == [0, 1, 2]
    assert pool.take(("b", 0), 2) == [3, 4]
    pool.give_back(("a", 0), [2, 0, 1])
    assert pool.take(("c", 0), 4) == [0, 1, 2, 5]


def test_a_block_freed_twice_raises() -> None:
    pool = BlockPool(4)
    pool.take(("a", 0), 2)
    pool.give_back(("a", 0), [0])
    with pytest.raises(OwnershipError, match="its owner is None"):
        pool.give_back(("a", 0), [0])
    with pytest.raises(OwnershipError, match="twice"):
        pool.give_back(("a", 0), [1, 1])
    assert pool.free_count == 3


def test_a_block_freed_by_somebody_else_raises_and_frees_nothing() -> None:
    pool = SlotPool(4)
    pool.take(("a", 0), 1)
    pool.take(("b", 0), 1)
    with pytest.raises(OwnershipError, match="its owner is"):
        pool.give_back(("a", 0), [0, 1])
    assert pool.owner_of(0) == ("a", 0)


def test_taking_more_than_is_free_raises() -> None:
    with pytest.raises(OwnershipError, match="2 of 2 are free"):
        BlockPool(2).take(("a", 0), 3)


def test_an_owner_cannot_hold_twice_release_twice_or_grow_after_its_release() -> None:
    pool = CachePool(block_count=4, slot_count=4, block_size=4)
    holding = pool.hold(("a", 0), 1)
    assert holding is not None
    with pytest.raises(OwnershipError, match="already holds"):
        pool.hold(("a", 0), 1)
    pool.pin(holding, "step")
    pool.release(holding)
    with pytest.raises(OwnershipError, match="twice"):
        pool.release(holding)
    with pytest.raises(OwnershipError, match="grows after"):
        pool.grow(holding, 2)


def test_memory_is_all_or_nothing() -> None:
    pool = CachePool(block_count=4, slot_count=1, block_size=4)
    assert pool.hold(("a", 0), 5) is None
    assert pool.hold(("a", 0), 2) is not None
    assert pool.hold(("b", 0), 1) is None  # blocks are free, slots are not
    assert pool.blocks.free_count == 2


def test_released_memory_stays_until_the_last_pin_is_gone() -> None:
    pool = CachePool(block_count=4, slot_count=1, block_size=4)
    holding = pool.hold(("a", 0), 2)
    assert holding is not None
    pool.pin(holding, "step")
    pool.pin(holding, ("a", 1))
    pool.release(holding)
    pool.unpin(holding, "step")
    pool.unpin(holding, "step")
    assert not holding.freed
    pool.unpin(holding, ("a", 1))
    assert holding.freed and pool.blocks.free_count == 4 and not pool.holdings
    with pytest.raises(OwnershipError, match="after it was freed"):
        pool.pin(holding, "step")


def test_blocks_for_rounds_up() -> None:
    pool = CachePool(block_count=4, slot_count=1, block_size=4)
    assert [pool.blocks_for(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_what_samples_share_comes_free_with_the_last_of_them_and_is_counted_so() -> None:
    pool = CachePool(block_count=12, slot_count=4, block_size=4)
    first = pool.hold(("a", 0), 4)
    assert first is not None
    second = pool.fork(first, ("b", 0), 3, 5)
    third = pool.fork(first, ("c", 0), 3, 4)
    assert second is not None and third is not None
    assert second.blocks[:3] == third.blocks[:3] == first.blocks[:3] and len(set(second.blocks[3:])) == 2
    assert [pool.freed_by(holdings) for holdings in ([first], [first, second], [first, second, third])] == [1, 3, 7]
    pool.release(first)
    pool.release(third)
    assert pool.blocks.free_count == 12 - 5
    pool.check()
    pool.release(second)
    assert pool.blocks.free_count == 12 and not pool.holdings


def test_a_fork_is_all_or_nothing_and_shares_nothing_then() -> None:
    pool = CachePool(block_count=6, slot_count=2, block_size=4)
    first = pool.hold(("a", 0), 4)
    assert first is not None
    assert pool.fork(first, ("b", 0), 1, 4) is None
    assert first.base is None
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Holdings taken, grown, pinned, released and unpinned in any order: nothing is ever lost or shared."""

    holdings = Bundle("holdings")
    pinned = Bundle("pinned")
    joined = Bundle("joined")

    def __init__(self) -> None:
        super().__init__()
        self.pool = CachePool(block_count=12, slot_count=3, block_size=4)
        self.count = 0
        self.joined_by_others: list[Holding] = []  # they write nowhere any more

    @precondition(lambda self: self.pool.slots.free_count > 0)
    @rule(target=holdings, blocks=st.integers(1, 6))
    def hold(self, blocks: int) -> Holding | None:
        self.count += 1
        fits = self.pool.fits(blocks)
        holding = self.pool.hold((f"r{self.count}", 0), blocks)
        assert (holding is not None) == fits
        return holding

    @rule(target=holdings, holding=holdings, more=st.integers(0, 3))
    def fork(self, holding: Holding | None, more: int) -> Holding | None:
        """A mixed instance's: the prompt's full blocks are shared, the others and the slot are not."""
        if holding is None or holding.released or holding in self.joined_by_others:
            return None
        self.count += 1
        shared = len(holding.base.blocks) if holding.base is not None else len(holding.blocks) // 2
        forked = self.pool.fork(holding, (f"r{self.count}", 0), shared, shared + more)
        if forked is not None:
            assert forked.blocks[:shared] == holding.blocks[:shared] and forked.slot != holding.slot
        return forked

    @rule(target=joined, holding=holdings)
    def join(self, holding: Holding | None) -> Holding | None:
        """A prefill instance's: everything is shared."""
        if holding is None or holding.freed or holding.base is not None:
            return None
        self.count += 1
        joined = self.pool.join(holding, (f"r{self.count}", 0))
        self.joined_by_others.append(holding)
        assert (joined.blocks, joined.slot) == (holding.blocks, holding.slot)
        return joined

    @rule(holding=consumes(joined))
    def leave(self, holding: Holding | None) -> None:
        if holding is not None:
            assert holding.base is not None and not holding.base.freed
            self.pool.release(holding)

    @rule(holding=holdings, blocks=st.integers(1, 8))
    def grow(self, holding: Holding | None, blocks: int) -> None:
        if holding is not None and not holding.released and holding not in self.joined_by_others:
            before = list(holding.blocks)
            grown = self.pool.grow(holding, blocks)
            assert holding.blocks[: len(before)] == before
            assert not grown or len(holding.blocks) >= blocks

    @rule(target=pinned, holding=holdings, pin=st.sampled_from(["step", "receive", ("r", 1)]))
    def pin(self, holding: Holding | None, pin: object) -> tuple[Holding | None, object]:
        if holding is not None and not holding.freed:
            self.pool.pin(holding, pin)
        return holding, pin

    @rule(holding=consumes(holdings))
    def release(self, holding: Holding | None) -> None:
        if holding is not None and not holding.released:
            promised, free = self.pool.freed_by([holding]), self.pool.blocks.free_count
            self.pool.release(holding)
            assert holding.freed == (not holding.pins)
            assert self.pool.blocks.free_count == free + (promised if holding.freed else 0)

    @rule(pair=consumes(pinned))
    def unpin(self, pair: tuple[Holding | None, object]) -> None:
        holding, pin = pair
        if holding is not None:
            self.pool.unpin(holding, pin)
            assert holding.freed == (holding.released and not holding.pins)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        self.pool.check()


TestPools = PoolMachine.TestCase
TestPools.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
