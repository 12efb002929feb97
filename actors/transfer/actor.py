"""The shell of a rank's ``transfer`` and ``staging`` actors.

Threads: each actor handles its messages on its own thread; writes, reads and links run on a small pool, merges on one
thread. Both actors share the node's data plane and a book of the plans that are in force. On a mixed rank they exist
and rest.
"""

from __future__ import annotations

import os

from actors.runtime.config import NodeConfig
from actors.runtime.context import ActorSpec, NodeContext
from actors.transfer.executor import LinkBook, MergeExecutor, Synchronise, TransferExecutor, no_synchronisation
from actors.transfer.machine import TransferMachine
from actors.transfer.staging_machine import StagingMachine

THREADS_MAX = 4
"""Copies are bound by memory bandwidth; more threads than this only take cores from the forward pass."""


def build(context: NodeContext) -> tuple[ActorSpec, ...]:
    """The two actors of one rank."""
    config = context.config
    book = LinkBook()
    synchronise = synchronisation(config.options.device)
    transfers = TransferExecutor(
        context.data_plane,
        book,
        config.rank,
        threads=thread_count(config),
        scratch_region=f"{config.node}.{config.incarnation}.verify",
        synchronise=synchronise,
    )
    merges = MergeExecutor(context.data_plane, book, config.rank, threads=1, synchronise=synchronise)
    machine = TransferMachine(config.instance, config.rank, config.incarnation, config.role, config.options)
    return (
        ActorSpec("transfer", machine, transfers),
        ActorSpec("staging", StagingMachine(config.rank), merges),
    )


def thread_count(config: NodeConfig) -> int:
    """Threads for concurrent writes or reads: two at least, so that one slow peer does not hold up another."""
    return max(2, min(THREADS_MAX, os.cpu_count() or 1))


def synchronisation(device: str) -> Synchronise:
    """What makes copied bytes visible to the device's default stream; nothing on the CPU, which needs no torch."""
    if device == "cpu":
        return no_synchronisation
    import torch

    if device == "npu":
        import torch_npu  # noqa: F401  registers torch.npu

        return lambda: torch.npu.default_stream().synchronize()
    return lambda: torch.cuda.default_stream().synchronize()
