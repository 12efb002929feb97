"""Who owns each cache block and state slot of this instance, and until when.

Every block and slot is free or has one *owner*: one attempt of one request, named ``(request_id, epoch)``. A
``Holding`` is everything one owner has. Whoever may still touch a holding's memory *pins* it under a name of their own:
the step that runs over it ("step"), the decode instance that may still read it, the writers of a receive. ``release``
says that the owner needs it no more; the memory goes back to the pools when the last pin is gone. So ownership outlives
every writer, and nothing is granted while an older writer can still write (invariant I3).

Samples of one prompt share its memory without a second kind of ownership: what several read lies in one holding, the
*base* of the others', and each of them pins it. On a mixed instance (``fork``) that is a holding of nothing but the
prompt's full blocks, split off the one that computes the prompt; nobody writes there once the prompt is computed. On a
prefill instance (``join``), where nobody goes on writing, it is the computing request's own holding, slot included.

The pools raise ``OwnershipError`` for a double grant, a double free or a free by somebody else. Those are bugs of the
scheduler, never of a request: they end the instance rather than mix two requests' caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from typing import Final

Owner = tuple[str, int] | tuple[str, int, str]
"""(request id, epoch); with a third part for what an owner's samples share."""

SHARED: Final = "shared"


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
        self.changes = 0  # grants, frees and passings on so far: who watches the pool looks only when it changed

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

    def pass_on(self, owner: Owner, new_owner: Owner, ids: Iterable[int]) -> None:
        """What ``owner`` has of these belongs to ``new_owner`` from now on. Raises ``OwnershipError``."""
        self.changes += 1
        for index in ids:
            if self._owner.get(index) != owner:
                raise OwnershipError(f"{owner} passes on {self._what} {index} of {self._owner.get(index)}")
            self._owner[index] = new_owner

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
    """What one owner has: ``blocks`` (a block table, in token order) and one ``slot`` (-1: none).

    With a ``base``, the table begins with the base's blocks, and a slot that the base has is the base's.
    """

    __slots__ = ("base", "blocks", "freed", "owner", "pins", "released", "slot")

    def __init__(self, owner: Owner, blocks: list[int], slot: int, base: Holding | None = None) -> None:
        self.owner = owner
        self.blocks = blocks
        self.slot = slot
        self.base = base
        self.pins: set[Hashable] = set()
        self.released = False
        self.freed = False

    @property
    def own_blocks(self) -> list[int]:
        """The blocks that are its own."""
        return self.blocks[len(self.base.blocks) :] if self.base is not None else self.blocks

    @property
    def own_slots(self) -> tuple[int, ...]:
        """Its slot, if it has one of its own."""
        shared = self.base is not None and self.base.slot == self.slot
        return () if shared or self.slot < 0 else (self.slot,)


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

    def fork(self, holding: Holding, owner: Owner, shared_count: int, block_count: int) -> Holding | None:
        """Memory for a sequence that begins like ``holding``'s: a table of ``block_count`` blocks, of which the first
        ``shared_count`` are shared with it, and a slot; None when that is not free. Nobody may write to shared blocks
        any more but the step that is being planned."""
        if not self.fits(block_count - shared_count):
            return None
        base = self._share(holding, shared_count) if shared_count else None
        forked = self.hold(owner, block_count - shared_count)
        if forked is not None and base is not None:
            forked.base = base
            forked.blocks = [*base.blocks, *forked.blocks]
            self.pin(base, owner)
        return forked

    def _share(self, holding: Holding, count: int) -> Holding:
        """The first ``count`` blocks of ``holding``, owned by nobody but their readers."""
        if holding.base is None:
            owner = (holding.owner[0], holding.owner[1], SHARED)
            if owner in self.holdings:
                raise OwnershipError(f"{owner} is shared already")
            base = Holding(owner, holding.blocks[:count], -1)
            self.blocks.pass_on(holding.owner, owner, base.blocks)
            self.holdings[owner] = base
            self.pin(base, holding.owner)
            base.released = True
            holding.base = base
        if len(holding.base.blocks) != count:
            raise OwnershipError(f"{holding.owner} shares {len(holding.base.blocks)} blocks, not {count}")
        return holding.base

    def join(self, holding: Holding, owner: Owner) -> Holding:
        """All of ``holding``'s memory for one more reader, ``owner``, who will write nowhere."""
        if owner in self.holdings:
            raise OwnershipError(f"{owner} already holds blocks {self.holdings[owner].blocks}")
        self.pin(holding, owner)
        joined = Holding(owner, list(holding.blocks), holding.slot, holding)
        self.holdings[owner] = joined
        return joined

    def may_use(self, request_id: str, index: int, what: Pool) -> bool:
        """Whether ``index`` of the blocks or slots is an attempt's of this request, or shared with one (for tests)."""
        owner = what.owner_of(index)
        if owner is None or owner[0] == request_id:
            return owner is not None
        return any(
            holding.owner[0] == request_id and holding.base is not None and holding.base.owner == owner
            for holding in self.holdings.values()
        )

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

    def freed_by(self, holdings: Iterable[Holding]) -> int:
        """How many blocks come free when all of these are given up: their own, and what only they share."""
        owners = set()
        bases: dict[Owner, Holding] = {}
        count = 0
        for holding in holdings:
            owners.add(holding.owner)
            count += len(holding.own_blocks)
            if holding.base is not None:
                bases[holding.base.owner] = holding.base
        return count + sum(len(base.own_blocks) for base in bases.values() if base.released and base.pins <= owners)

    def check(self) -> None:
        """Raise ``OwnershipError`` unless pools and holdings agree exactly (for tests)."""
        self.blocks.check()
        self.slots.check()
        blocks = slots = 0
        for owner, holding in self.holdings.items():
            blocks += len(holding.own_blocks)
            slots += len(holding.own_slots)
            if any(self.blocks.owner_of(block) != owner for block in holding.own_blocks):
                raise OwnershipError(f"{owner} holds a block that it does not own")
            if any(self.slots.owner_of(slot) != owner for slot in holding.own_slots):
                raise OwnershipError(f"{owner} holds slot {holding.slot}, not its own")
            base = holding.base
            if base is not None and (
                base.freed or owner not in base.pins or base.blocks != holding.blocks[: len(base.blocks)]
            ):
                raise OwnershipError(f"{owner} reads {base.owner}'s blocks without a hold on them")
        if blocks != self.blocks.count - self.blocks.free_count:
            raise OwnershipError("a block is owned but in no holding")
        if slots != self.slots.count - self.slots.free_count:
            raise OwnershipError("a slot is owned but in no holding")

    def _free_if_done(self, holding: Holding) -> None:
        if holding.released and not holding.pins:
            self.blocks.give_back(holding.owner, holding.own_blocks)
            self.slots.give_back(holding.owner, holding.own_slots)
            holding.freed = True
            del self.holdings[holding.owner]
            if holding.base is not None:
                self.unpin(holding.base, holding.owner)
