"""Ranges of a buffer as a byte stream over a socket, in bounded pieces: gathered to send, scattered when received.

A long contiguous piece goes straight between the buffer and the socket; many small or strided pieces go through a
scratch buffer, one system call for all that fit into it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import numpy as np

from transport.copy import Bytes, Pair, coalesce, copy_pairs
from transport.dataplane import Strided

SCRATCH_BYTES = 1 << 20
DIRECT_BYTES = 1 << 16
"""A contiguous piece at least this long needs no scratch buffer."""


class StreamClosed(ConnectionError):
    """The other side closed the connection in the middle of something."""


def new_scratch() -> Bytes:
    """A buffer for one connection's pieces."""
    return np.empty(SCRATCH_BYTES, dtype=np.uint8)


def joined(ranges: Sequence[Strided]) -> list[Strided]:
    """The same bytes in the same order, in as few ranges as possible."""
    targets, at = [], 0
    for piece in ranges:
        targets.append(Strided(at, piece.size_bytes))
        at += piece.size_bytes
    return [Strided(*source) for source, _ in coalesce(ranges, targets)]


def batches(ranges: Sequence[Strided]) -> Iterator[list[Pair]]:
    """Pairs (range of the buffer, where its bytes lie in the scratch buffer), as many at a time as fit into it.

    A contiguous piece of ``DIRECT_BYTES`` or more comes alone and whole, however long it is.
    """
    batch: list[Pair] = []
    used = 0
    for piece in ranges:
        offset, run_bytes, count, stride_bytes = piece
        if run_bytes >= DIRECT_BYTES:
            if batch:
                yield batch
                batch, used = [], 0
            for index in range(count):
                yield [((offset + index * stride_bytes, run_bytes, 1, 0), (0, run_bytes, 1, 0))]
            continue
        while count:
            fit = min(count, (SCRATCH_BYTES - used) // run_bytes)
            if not fit:
                yield batch
                batch, used = [], 0
                continue
            batch.append(((offset, run_bytes, fit, stride_bytes), (used, run_bytes, fit, run_bytes)))
            used += fit * run_bytes
            offset += fit * stride_bytes
            count -= fit
    if batch:
        yield batch


def _is_direct(batch: Sequence[Pair]) -> bool:
    return len(batch) == 1 and batch[0][0][1] >= DIRECT_BYTES


def send_ranges(connection: socket.socket, buffer: Bytes, ranges: Sequence[Strided], scratch: Bytes) -> None:
    """Send the bytes of ``ranges``, in order. Raises ``OSError``."""
    for batch in batches(ranges):
        if _is_direct(batch):
            offset, run_bytes, _, _ = batch[0][0]
            connection.sendall(buffer[offset : offset + run_bytes].data)
        else:
            copy_pairs(buffer, scratch, batch)
            connection.sendall(scratch[: sum(run_bytes * count for _, (_, run_bytes, count, _) in batch)].data)


def receive_ranges(connection: socket.socket, buffer: Bytes, ranges: Sequence[Strided], scratch: Bytes) -> None:
    """Receive the bytes of ``ranges``, in order. Raises ``OSError``."""
    for batch in batches(ranges):
        if _is_direct(batch):
            offset, run_bytes, _, _ = batch[0][0]
            receive_into(connection, buffer[offset : offset + run_bytes].data)
        else:
            size = sum(run_bytes * count for _, (_, run_bytes, count, _) in batch)
            receive_into(connection, scratch[:size].data)
            copy_pairs(scratch, buffer, [(kept, piece) for piece, kept in batch])


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view``. Raises ``StreamClosed`` when the other side ends before."""
    while view:
        count = connection.recv_into(view)
        if not count:
            raise StreamClosed("the connection was closed")
        view = view[count:]


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Exactly so many bytes. Raises ``StreamClosed``."""
    buffer = bytearray(size_bytes)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def discard(connection: socket.socket, size_bytes: int, scratch: Bytes) -> None:
    """Receive and forget so many bytes."""
    while size_bytes:
        count = connection.recv_into(scratch[: min(size_bytes, scratch.size)].data)
        if not count:
            raise StreamClosed("the connection was closed")
        size_bytes -= count
