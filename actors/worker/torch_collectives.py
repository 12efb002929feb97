"""Collectives over torch.distributed: gloo between hosts' CPUs, nccl and hccl between accelerators.

Parts are gathered and added in rank order by everybody, so that all ranks hold the same bits whatever the backend's own
reduction order is.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from actors.worker.collectives import CollectiveError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class TorchCollective:
    """One rank's end of a torch.distributed process group. One thread."""

    def __init__(
        self,
        init_method: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout_ms: int = 60_000,
    ) -> None:
        """Join the group at ``init_method`` (``file://…`` within a host, ``tcp://host:port`` between hosts)."""
        self.rank, self.size = rank, size
        self._device = device
        timeout = datetime.timedelta(milliseconds=timeout_ms)
        try:
            store, _, _ = next(dist.rendezvous(init_method, rank, size, timeout=timeout))
            store.set_timeout(timeout)
            dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(
                f"rank {rank} could not join its group of {size} at {init_method}: {error}"
            ) from error

    def begin_step(self, step: int) -> None:
        """See ``Collective``."""
        own = torch.tensor([step], dtype=torch.int64, device=self._device)
        steps = [int(part) for part in self._gather(own)]
        if any(other != step for other in steps):
            raise CollectiveError(
                "the ranks are at different steps: "
                + ", ".join(f"rank {rank} at {other}" for rank, other in enumerate(steps))
            )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collective``."""
        parts = self._gather(tensor.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        return total.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """See ``Collective``. Narrower parts are padded to the widest for the exchange."""
        widest = max(widths)
        padded = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[1])).contiguous()
        parts = self._gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def close(self) -> None:
        """See ``Collective``."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts: list[Any] = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(parts, tensor)
        except RuntimeError as error:
            raise CollectiveError(f"rank {self.rank} lost its peers in a collective: {error}") from error
        return parts
