"""Who owns each cache block and state slot of this instance, and until when.

Every block and slot is free or has one *owner*: one attempt of one request, named ``(request_id, epoch)``. A
``Holding`` is everything one owner has. Whoever may still touch a holding's memory *pins* it under a name of their own:
the step that runs over it ("step"), the decode instance that may still read it, the writers of a receive. ``release``
says that the owner needs it no more; the memory goes back to the pools when the last pin is gone. So ownership outlives
every writer, and nothing is granted while an older writer can still write (invariant I3).

The pools raise ``OwnershipError`` for a double grant, a double free or a free by somebody else. Those are bugs of the
scheduler, never of a request: they end the instance rather than mix two requests' caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from typing import Final

Owner = tuple[str, int]
"""(request id, epoch)."""


class OwnershipError(AssertionError):
    """Somebody took what has an owner, or gave back what is not theirs."""


class Pool:
    """``count`` equal resources, numbered from 0. The lowest free ids are granted first, so neighbours coalesce."""

    def __init__(self, count: int, what: str) -> None:
        if count < 1:
            raise ValueError(f"a pool needs at least one {what}, got {count}")
        self.count: Final = count
        self._what = what
        self._free = list(range(count))
        self._owner: dict[int, Owner] = {}
        self.changes = 0  # grants and frees so far: who watches the pool looks only when it changed

    @property
    def free_count(self) -> int:
        """How many have no owner."""
        return len(self._free)

    def take(self, owner: Owner, count: int) -> list[int]:
        """``count`` ids, ascending, now owned by ``owner``. Ask first: ``OwnershipError`` when fewer are free."""
        if count > len(self._free):
            raise OwnershipError(f"{owner} wants {count} {self._what}s, {len(self._free)} of {self.count} are free")
        self.changes += 1
        ids = [heappop(self._free) for _ in range(count)]
        for index in ids:
            if index in self._owner:
                raise OwnershipError(f"{self._what} {index} granted to {owner} is owned by {self._owner[index]}")
            self._owner[index] = owner
        return ids

    def give_back(self, owner: Owner, ids: Iterable[int]) -> None:
        """``owner`` needs these no more. Raises ``OwnershipError``, before any is freed, when one is not theirs."""
        ids = list(ids)
        if len(set(ids)) != len(ids):
            raise OwnershipError(f"{owner} frees a {self._what} twice in {ids}")
        for index in ids:
            if self._owner.get(index) != owner:
                raise OwnershipError(f"{owner} frees {self._what} {index}, its owner is {self._owner.get(index)}")
        self.changes += 1
        for index in ids:
            del self._owner[index]
            heappush(self._free, index)

    def owner_of(self, index: int) -> Owner | None:
        """Who owns ``index``; None when it is free."""
        return self._owner.get(index)

    def check(self) -> None:
        """Raise ``OwnershipError`` unless every id is either free, once, or owned (for tests)."""
        if len(set(self._free)) != len(self._free):
            raise OwnershipError(f"a {self._what} is free twice: {sorted(self._free)}")
        if sorted([*self._free, *self._owner]) != list(range(self.count)):
            raise OwnershipError(f"{self._what}s lost or both free and owned: {len(self._free)}+{len(self._owner)}")
        heapify(self._free)


class BlockPool(Pool):
    """The KV blocks of an instance (every rank has the same ids)."""

    def __init__(self, count: int) -> None:
        super().__init__(count, "block")


class SlotPool(Pool):
    """The recurrent-state slots of an instance (every rank has the same ids)."""

    def __init__(self, count: int) -> None:
        super().__init__(count, "slot")


class Holding:
    """What one owner has: ``blocks`` (a block table, in token order) and one ``slot``."""

    __slots__ = ("blocks", "freed", "owner", "pins", "released", "slot")

    def __init__(self, owner: Owner, blocks: list[int], slot: int) -> None:
        self.owner = owner
        self.blocks = blocks
        self.slot = slot
        self.pins: set[Hashable] = set()
        self.released = False
        self.freed = False


class CachePool:
    """Blocks and slots of one instance, granted together and freed together."""

    def __init__(self, *, block_count: int, slot_count: int, block_size: int) -> None:
        self.blocks: Final = BlockPool(block_count)
        self.slots: Final = SlotPool(slot_count)
        self.block_size: Final = block_size
        self.holdings: dict[Owner, Holding] = {}

    def blocks_for(self, token_count: int) -> int:
        """How many blocks hold ``token_count`` tokens."""
        return -(-token_count // self.block_size)

    def fits(self, block_count: int) -> bool:
        """Whether a slot and ``block_count`` blocks are free now."""
        return self.slots.free_count > 0 and self.blocks.free_count >= block_count

    def hold(self, owner: Owner, block_count: int) -> Holding | None:
        """All of it or nothing: one slot and ``block_count`` blocks. Raises ``OwnershipError`` for a second grant."""
        if owner in self.holdings:
            raise OwnershipError(f"{owner} already holds blocks {self.holdings[owner].blocks}")
        if not self.fits(block_count):
            return None
        holding = Holding(owner, self.blocks.take(owner, block_count), self.slots.take(owner, 1)[0])
        self.holdings[owner] = holding
        return holding

    def grow(self, holding: Holding, block_count: int) -> bool:
        """Lengthen the table to ``block_count`` blocks (it never shrinks); False when not enough are free."""
        if holding.released:
            raise OwnershipError(f"{holding.owner} grows after its release")
        missing = block_count - len(holding.blocks)
        if missing > self.blocks.free_count:
            return False
        if missing > 0:
            holding.blocks += self.blocks.take(holding.owner, missing)
        return True

    def pin(self, holding: Holding, pin: Hashable) -> None:
        """Keep ``holding``'s memory until ``unpin``, released or not. Raises ``OwnershipError`` when it is freed."""
        if holding.freed:
            raise OwnershipError(f"{holding.owner} is pinned by {pin} after it was freed")
        holding.pins.add(pin)

    def unpin(self, holding: Holding, pin: Hashable) -> None:
        """``pin`` touches it no more. Unknown pins are ignored: an end may be told twice."""
        if pin in holding.pins:
            holding.pins.remove(pin)
            self._free_if_done(holding)

    def release(self, holding: Holding) -> None:
        """Its owner needs it no more. Raises ``OwnershipError`` when told twice."""
        if holding.released:
            raise OwnershipError(f"{holding.owner} is released twice")
        holding.released = True
        self._free_if_done(holding)

    def check(self) -> None:
        """Raise ``OwnershipError`` unless pools and holdings agree exactly (for tests)."""
        self.blocks.check()
        self.slots.check()
        for owner, holding in self.holdings.items():
            if any(self.blocks.owner_of(block) != owner for block in holding.blocks):
                raise OwnershipError(f"{owner} holds a block that it does not own")
            if self.slots.owner_of(holding.slot) != owner:
                raise OwnershipError(f"{owner} holds slot {holding.slot}, not its own")
        if sum(len(holding.blocks) for holding in self.holdings.values()) != self.blocks.count - self.blocks.free_count:
            raise OwnershipError("a block is owned but in no holding")
        if len(self.holdings) != self.slots.count - self.slots.free_count:
            raise OwnershipError("a slot is owned but in no holding")

    def _free_if_done(self, holding: Holding) -> None:
        if holding.released and not holding.pins:
            self.blocks.give_back(holding.owner, holding.blocks)
            self.slots.give_back(holding.owner, (holding.slot,))
            holding.freed = True
            del self.holdings[holding.owner]
