"""Collectives between ranks of one host through one shared-memory segment and a counter per rank.

An operation: a rank copies its part into its own buffer, advances its counter, waits until every counter has arrived,
and reads all parts in rank order. Two sets of buffers alternate: a rank that is one operation ahead writes into the
other set, and it cannot get two ahead, because the operation between waits for everybody. Beside each part lie its size
and, at a step's begin, its step number, so that ranks that disagree find out instead of mixing batches.

Publishing relies on stores becoming visible in program order, as x86 guarantees; on other machines the interpreter's
own locks between the copy and the counter's store order them in practice.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from actors.worker.collectives import CollectiveError

SHM_FOLDER = Path("/dev/shm")
PART_BYTES = 2 << 20
SPINS = 200
YIELDS = 2000
SLEEP_S = 50e-6
_LINE = 8  # int64 words: one cache line per rank, so that waiting ranks do not share lines with writers
_WORDS_PER_SET = 2  # size, step


class ShmCollective:
    """One rank's end. One thread. ``name`` is the segment's file name in ``/dev/shm``, the same on all ranks."""

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        size: int,
        timeout_ms: int = 60_000,
        join_timeout_ms: int = 300_000,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Join the group; returns once all ranks have. Raises ``CollectiveError`` after ``join_timeout_ms``.

        The segment is unlinked as soon as everybody has it mapped: nothing is left behind, however a rank ends.
        """
        self.rank, self.size = rank, size
        self._timeout_ms = timeout_ms
        self._part_bytes = part_bytes
        self._operation = 0
        header_words = size * _LINE * 2
        total = header_words * 8 + 2 * size * part_bytes
        path = SHM_FOLDER / name
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, total)
            self._map = mmap.mmap(file, total)
        finally:
            os.close(file)
        view = memoryview(self._map)
        self._counters = view[: size * _LINE * 8].cast("q")
        self._labels = view[size * _LINE * 8 : header_words * 8].cast("q")
        data = torch.frombuffer(view, dtype=torch.uint8, offset=header_words * 8, count=2 * size * part_bytes)
        self._parts = data.view(2, size, part_bytes)
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        try:
            self._exchange(0, 0, join_timeout_ms, "join its group")
        finally:
            if rank == 0:
                path.unlink(missing_ok=True)

    def begin_step(self, step: int) -> None:
        """See ``Collective``."""
        self._exchange(0, step, self._timeout_ms, f"begin step {step}")
        steps = self._agreed(1)
        if any(other != step for other in steps):
            raise CollectiveError(
                "the ranks are at different steps: "
                + ", ".join(f"rank {rank} at {other}" for rank, other in enumerate(steps))
            )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collective``. In place when the tensor is contiguous."""
        tensor = tensor.contiguous()
        flat = tensor.view(-1)
        limit = self._part_bytes // tensor.element_size()
        for begin in range(0, flat.numel(), limit):
            piece = flat[begin : begin + limit]
            parts = self._share(piece)
            if tensor.dtype == torch.float32:
                torch.add(parts[0], parts[1], out=piece)
                for part in parts[2:]:
                    piece.add_(part)
            else:  # narrow types add up in float32 and round once
                total = parts[0].float()
                for part in parts[1:]:
                    total.add_(part)
                piece.copy_(total)
        return tensor

    def all_gather(self, tensor: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """See ``Collective``."""
        rows = tensor.shape[0]
        widest = max(widths)
        output = torch.empty(rows, sum(widths), dtype=tensor.dtype)
        step = max(1, self._part_bytes // (widest * tensor.element_size()))
        if widest * tensor.element_size() > self._part_bytes:
            raise CollectiveError(f"a row of {widest} values does not fit a part of {self._part_bytes} bytes")
        offsets = [sum(widths[:rank]) for rank in range(self.size)]
        for begin in range(0, rows, step):
            own = tensor[begin : begin + step].contiguous()
            count = own.shape[0]
            parts = self._share(own.view(-1), [count * width for width in widths])
            for part, offset, width in zip(parts, offsets, widths, strict=True):
                output[begin : begin + count, offset : offset + width] = part.view(count, width)
        return output

    def close(self) -> None:
        """See ``Collective``. The mapping goes when the last view of it does."""
        self._typed.clear()

    def _share(self, own: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Publish ``own`` (flat) and return all ranks' parts, ``counts[rank]`` elements each (default: alike)."""
        parity = (self._operation + 1) & 1
        buffers = self._typed.get(own.dtype)
        if buffers is None:
            buffers = [[self._parts[p, r].view(own.dtype) for r in range(self.size)] for p in range(2)]
            self._typed[own.dtype] = buffers
        count = own.numel()
        buffers[parity][self.rank][:count].copy_(own)
        self._exchange(count, 0, self._timeout_ms, "reach a collective")
        sizes = self._agreed(0)
        wanted = counts if counts is not None else [count] * self.size
        if sizes != list(wanted):
            raise CollectiveError(f"the ranks compute different batches: their parts have {sizes} elements")
        return [buffer[:length] for buffer, length in zip(buffers[parity], wanted, strict=True)]

    def _exchange(self, count: int, step: int, timeout_ms: int, what: str) -> None:
        """One operation's signalling: label the own part, publish it, and wait for all others."""
        self._operation += 1
        operation = self._operation
        place = self.rank * _LINE + (operation & 1) * _WORDS_PER_SET
        self._labels[place] = count
        self._labels[place + 1] = step
        self._counters[self.rank * _LINE] = operation
        for rank in range(self.size):
            index = rank * _LINE
            if self._counters[index] < operation:
                _wait(lambda index=index: self._counters[index] >= operation, timeout_ms, rank, what)  # type: ignore[misc]

    def _agreed(self, word: int) -> list[int]:
        """Word ``word`` of every rank's label in the current operation."""
        base = (self._operation & 1) * _WORDS_PER_SET + word
        return [self._labels[rank * _LINE + base] for rank in range(self.size)]


def _wait(arrived: Callable[[], bool], timeout_ms: int, rank: int, what: str) -> None:
    """Spin briefly, then give the core away, then sleep: ranks usually arrive within microseconds of each other."""
    for _ in range(SPINS):
        if arrived():
            return
    for _ in range(YIELDS):
        os.sched_yield()
        time.sleep(0)  # lets other threads of this process run, which sched_yield alone does not
        if arrived():
            return
    deadline = time.monotonic() + timeout_ms / 1000
    while not arrived():
        if time.monotonic() > deadline:
            raise CollectiveError(
                f"rank {rank} did not {what} within {timeout_ms} ms: it is dead, stuck or lost a message "
                f"(option: collective_timeout_ms)"
            )
        time.sleep(SLEEP_S)
