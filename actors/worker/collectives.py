"""Sums and gathers over the ranks of one TP group: the interface, and the group of one.

Every rank calls the same operations in the same order. A sum adds the ranks' parts in rank order, so all ranks hold
bit-identical results and sample the same tokens. ``shm_collectives.py`` joins ranks of one host through shared memory;
``torch_collectives.py`` uses torch.distributed (gloo, nccl, hccl) for several hosts and accelerators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class CollectiveError(RuntimeError):
    """The group is broken: a rank is missing or stands at another step. The instance cannot go on."""


class Collective(Protocol):
    """One rank's end of its TP group. Used by one thread."""

    rank: int
    size: int

    def begin_step(self, step: int) -> None:
        """Wait for all ranks; raises ``CollectiveError`` when their step numbers differ or one is missing."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in rank order; may reuse ``tensor``. Raises ``CollectiveError``."""
        ...

    def all_gather(self, tensor: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """All ranks' columns side by side: [N, widths[rank]] → [N, sum(widths)]. Raises ``CollectiveError``."""
        ...

    def close(self) -> None:
        """Leave the group and release its buffers. Idempotent."""
        ...


class SingleRank:
    """The group of one rank: every operation is the identity."""

    rank = 0
    size = 1

    def begin_step(self, step: int) -> None:
        """Nothing to compare."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def close(self) -> None:
        """Nothing to release."""
