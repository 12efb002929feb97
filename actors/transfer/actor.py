"""The shell of a rank's ``transfer`` and ``staging`` actors.

Threads: actors handle their messages on the node's thread; writes, reads and links run on a small pool, merges (one at
a time) on one or two threads. Both actors share the node's data plane and a book of the plans that are in force. On a
mixed rank they exist and rest.
"""

from __future__ import annotations

import os

from actors.runtime.context import ActorSpec, NodeContext
from actors.transfer.executor import LinkBook, MergeExecutor, Synchronise, TransferExecutor, no_synchronisation
from actors.transfer.machine import TransferMachine
from actors.transfer.staging_machine import StagingMachine

THREADS_MAX = 4
"""Copies are bound by memory bandwidth; more threads than this only take cores from the forward pass."""

MERGE_THREADS_MAX = 2
"""One thread merges at about half of what it could copy: rows are interleaved. Two keep up with the pushes."""


def build(context: NodeContext) -> tuple[ActorSpec, ...]:
    """The two actors of one rank."""
    config = context.config
    book = LinkBook()
    synchronise = synchronisation(config.options.device)
    transfers = TransferExecutor(
        context.data_plane,
        book,
        config.rank,
        threads=max(2, min(THREADS_MAX, cores())),  # two at least: one slow peer must not hold up another
        scratch_region=f"{config.node}.{config.incarnation}.verify",
        synchronise=synchronise,
    )
    merges = MergeExecutor(
        context.data_plane, book, config.rank, threads=min(MERGE_THREADS_MAX, cores()), synchronise=synchronise
    )
    machine = TransferMachine(config.instance, config.rank, config.incarnation, config.role, config.options)
    return (
        ActorSpec("transfer", machine, transfers),
        ActorSpec("staging", StagingMachine(config.rank), merges),
    )


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def synchronisation(device: str) -> Synchronise:
    """What makes copied bytes visible to the device's default stream; nothing on the CPU, which needs no torch."""
    if device == "cpu":
        return no_synchronisation
    import torch

    if device == "npu":
        import torch_npu  # noqa: F401  registers torch.npu

        return lambda: torch.npu.default_stream().synchronize()
    return lambda: torch.cuda.default_stream().synchronize()
