"""The data plane: registered memory regions, and one-sided reads and writes of byte ranges, as RDMA does.

A node registers its buffers under region ids and publishes their descriptors. A peer attaches a descriptor and then
writes into or reads from the region without the owner taking part; that a write is complete is told by a control
message afterwards. The data plane knows bytes only: no layer, head, cache role or request.

Ranges come in pairs: the i-th local range and the i-th remote range hold the same number of bytes, and the bytes of
one go to the other in order. Everything is checked before the first byte moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from messages.layout import RegionDescriptor

COPY_ENVIRONMENT: Final = (("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=0x40000"),)
"""Environment in which processes that move caches should start: the C library then writes runs of 512 KiB and more past
the cache, which nearly doubles the rate of long copies (what is written is read by somebody else, if at all, much
later). Its own threshold is most of the shared cache. Other C libraries and processors ignore it."""


class DataPlaneError(RuntimeError):
    """An operation was refused or broke off. Its text says what was asked, and what would have been allowed.

    After a refusal (unknown region, range outside a region, unequal pairs) nothing was written. After a broken
    connection part of the bytes may have arrived, and no more will.
    """


class Strided(NamedTuple):
    """``count`` runs of ``run_bytes`` bytes, the first at ``offset``, each ``stride_bytes`` after the one before.

    All in bytes from the region's start; of any size (offsets beyond 2^32 are exact). Runs must not overlap:
    ``stride_bytes >= run_bytes`` when ``count > 1``. With ``count == 1`` the stride means nothing.
    """

    offset: int
    run_bytes: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    stride_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes in all runs together."""
        return self.run_bytes * self.count


class DataPlane(Protocol):
    """One process's access to its own and its peers' regions. Every method may be called from any thread.

    Operations block until done, and release the GIL while bytes move. All errors are ``DataPlaneError``.
    """

    def create_region(self, region_id: str, size_bytes: int) -> RegionDescriptor:
        """Register a new, zeroed buffer of this process; its descriptor lets peers attach it."""
        ...

    def view(self, region_id: str) -> memoryview:
        """A local region as writable bytes. Valid as long as somebody holds it, also after ``close``."""
        ...

    def attach(self, descriptor: RegionDescriptor) -> None:
        """Make a peer's region reachable. Attaching the same descriptor again changes nothing."""
        ...

    def detach(self, region_id: str) -> None:
        """Forget a peer's region; an operation under way finishes. Unknown regions are ignored."""
        ...

    def write(self, local_region: str, local: Sequence[Strided], remote_region: str, remote: Sequence[Strided]) -> int:
        """Copy local ranges into a peer's region; returns the bytes moved once all of them are in place."""
        ...

    def read(self, remote_region: str, remote: Sequence[Strided], local_region: str, local: Sequence[Strided]) -> int:
        """Copy ranges of a peer's region into local ranges; returns the bytes moved."""
        ...

    def copy(self, source_region: str, source: Sequence[Strided], target_region: str, target: Sequence[Strided]) -> int:
        """Copy ranges between two local regions; returns the bytes moved."""
        ...

    def close(self) -> None:
        """Unregister everything. Later operations are refused; closing again changes nothing."""
        ...
