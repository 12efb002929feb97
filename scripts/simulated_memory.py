"""Memory of a simulated cluster: registered regions, and copies between them, piece by piece in virtual time.

A region is anonymous memory under its id; pages that are never touched cost nothing. One-sided access is what makes the
data plane dangerous: a region can be written by a peer at any time, and a dead process's memory can still be written by
those who mapped it. So regions outlive their processes here until the supervisor has cleaned up after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap

from messages.layout import RegionDescriptor
from transport.dataplane import DataPlaneError, Strided


class Violation(AssertionError):
    """An invariant of the protocol does not hold; the text begins with its name, I1 to I7."""


class Memory:
    """All regions of a cluster, by region id (which names node and incarnation)."""

    def __init__(self) -> None:
        self._regions: dict[str, mmap] = {}

    def create(self, region_id: str, size_bytes: int) -> RegionDescriptor:
        """A new region of zeros."""
        if region_id in self._regions:
            raise DataPlaneError(f"region {region_id} exists")
        self._regions[region_id] = mmap(-1, size_bytes)
        return RegionDescriptor(region_id=region_id, size_bytes=size_bytes, backend="simulated", location=region_id)

    def region(self, region_id: str) -> mmap:
        """The bytes of a region; raises ``DataPlaneError`` when it is gone."""
        region = self._regions.get(region_id)
        if region is None:
            raise DataPlaneError(f"no region {region_id}")
        return region

    def remove_of(self, instance: str, incarnation: int) -> None:
        """Forget the regions of every node of one life of an instance."""
        for region_id in list(self._regions):
            node, _, rest = region_id.rpartition(".")[0].rpartition(".")
            if node.partition(".")[0] == instance and rest == str(incarnation):
                del self._regions[region_id]


class NodeMemory:
    """What one life of a node can reach: its own regions, and those of peers that it has mapped.

    A mapping stays good when its owner dies and even when the region is removed, as mapped shared memory does.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._mapped: dict[str, mmap] = {}

    def create_region(self, region_id: str, size_bytes: int) -> RegionDescriptor:
        """Register a region of this node."""
        descriptor = self._memory.create(region_id, size_bytes)
        self._mapped[region_id] = self._memory.region(region_id)
        return descriptor

    def view(self, region_id: str) -> mmap:
        """The bytes of a region of this node, or of one that it has mapped."""
        region = self._mapped.get(region_id)
        if region is None:
            raise DataPlaneError(f"region {region_id} is not attached")
        return region

    def attach(self, descriptor: RegionDescriptor) -> None:
        """Map a peer's region."""
        self._mapped[descriptor.region_id] = self._memory.region(descriptor.region_id)

    def detach(self, region_id: str) -> None:
        """Forget a peer's region."""
        self._mapped.pop(region_id, None)

    def copy(self, source_region: str, source: Sequence[Strided], target_region: str, target: Sequence[Strided]) -> int:
        """Copy paired ranges; returns the bytes moved. Raises ``DataPlaneError`` before any moved, or ``Violation``
        for a range outside its region (the planner's fault, never the network's)."""
        from_, to = self.view(source_region), self.view(target_region)
        moved = 0
        for left, right in zip(source, target, strict=True):
            if left[1:3] == right[1:3]:  # as many runs of as many bytes
                moved += _copy_equal(from_, left, to, right)
            else:
                moved += _copy_unequal(from_, left, to, right)
        return moved


def _check(region: mmap, piece: Strided) -> None:
    offset, size, count, stride = piece
    if offset < 0 or offset + (count - 1) * stride + size > len(region):
        raise Violation(f"I3: {piece} ends outside a region of {len(region)} bytes")


def _copy_equal(from_: mmap, left: Strided, to: mmap, right: Strided) -> int:
    _check(from_, left)
    _check(to, right)
    read, size, count, read_stride = left
    write, _, _, write_stride = right
    for _ in range(count):
        to[write : write + size] = from_[read : read + size]
        read += read_stride
        write += write_stride
    return size * count


def _copy_unequal(from_: mmap, left: Strided, to: mmap, right: Strided) -> int:
    _check(from_, left)
    _check(to, right)
    data = b"".join(
        from_[left.offset + i * left.stride_bytes : left.offset + i * left.stride_bytes + left.run_bytes]
        for i in range(left.count)
    )
    if len(data) != right.run_bytes * right.count:
        raise Violation(f"I6: a pair of ranges of unequal size: {left} and {right}")
    for index in range(right.count):
        begin = right.offset + index * right.stride_bytes
        to[begin : begin + right.run_bytes] = data[index * right.run_bytes : (index + 1) * right.run_bytes]
    return len(data)
