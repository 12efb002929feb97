"""The invariants of the protocol, checked while a simulated cluster runs. Checks read the machines' own books.

After every message only what that step could have changed is looked at, so checking costs about as much as handling.
I1, I6 and I7 for clients are in ``simulated_client.py``, I2 and I6 for caches in ``simulated_model.py``.
"""

from __future__ import annotations

from itertools import pairwise

from actors.runtime.machine import Effect, Job
from actors.runtime.simulated_nodes import SimulatedActor, SimulatedNode
from actors.scheduler.blocks import CachePool, Owner, OwnershipError, Pool
from actors.scheduler.machine import SchedulerMachine
from actors.transfer.jobs import MergeJob, PullJob, WriteJob
from actors.transfer.machine import TransferMachine
from actors.transfer.staging_machine import StagingMachine
from messages.base import Message, instance_of, rank_address
from messages.batch import ExecuteBatch
from scripts.simulated_cluster import SimulatedCluster
from scripts.simulated_lateness import Handle, guarded
from scripts.simulated_memory import Violation


class Checks:
    """Attach with ``cluster.checks = Checks(cluster)`` before the cluster begins."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        cluster.checks = self
        self._schedulers: dict[str, tuple[SimulatedNode, SchedulerMachine]] = {}  # instance → its newest scheduler
        self._changes: dict[str, tuple[int, int, int, int]] = {}  # scheduler → its pool's, at the last look
        self._executed: dict[str, tuple[ExecuteBatch, int, int]] = {}  # rank → its last step, and its pool at that time

    # -- hooks --------------------------------------------------------------------------------------------------------

    def on_start(self, node: SimulatedNode) -> None:
        """A life of a node began: from here on its actors are looked at whenever they handled a message (I3, I5)."""
        for actor in node.actors.values():
            actor.handle = guarded(actor)
            if isinstance(actor.machine, SchedulerMachine):
                self._schedulers[node.config.instance] = (node, actor.machine)
                actor.handle = self._owning(actor, actor.machine)
            elif isinstance(actor.machine, StagingMachine):
                actor.handle = self._leasing(actor, actor.machine)

    def _owning(self, actor: SimulatedActor, machine: SchedulerMachine) -> Handle:
        """Blocks and slots have one owner each (I3)."""
        address, handle = actor.address, actor.handle

        def checked(now_ns: int, sender: str, message: Message) -> list[Effect]:
            effects = handle(now_ns, sender, message)
            pool = machine.pool
            if pool is not None and self._has_changed(address, pool) and not _is_consistent(pool):
                try:
                    pool.check()
                except OwnershipError as error:
                    raise Violation(f"I3: {address} after {type(message).__name__}: {error}") from error
            return effects

        return checked

    def _leasing(self, actor: SimulatedActor, machine: StagingMachine) -> Handle:
        """Staging leases are disjoint (I3)."""
        address, handle = actor.address, actor.handle

        def checked(now_ns: int, sender: str, message: Message) -> list[Effect]:
            effects = handle(now_ns, sender, message)
            self._check_leases(address, machine)
            return effects

        return checked

    def on_execute(self, node: str, batch: ExecuteBatch) -> None:
        """A rank begins or ends a step: every row runs in memory that its request owns (I3)."""
        pool = self._pool(instance_of(node), batch.incarnation)
        if pool is None:
            return
        seen, changes, holdings = self._executed.get(node, (None, 0, 0))
        if seen is batch and changes == pool.blocks.changes and holdings == len(pool.holdings):
            return  # it ends, and nobody was granted or gave back anything since it began
        self._executed[node] = (batch, pool.blocks.changes, len(pool.holdings))
        owners = pool.blocks._owner
        for row in batch.rows:
            for place, block in enumerate(row.block_ids):
                owner = owners.get(block)
                if owner is not None and owner[0] == row.request_id:
                    continue
                # Another owner's block is only read: a prompt's, shared by its samples, before where this row writes.
                is_read = (place + 1) * pool.block_size <= row.start or row.fork_of
                if not is_read or not pool.may_use(row.request_id, block, pool.blocks):
                    raise Violation(f"I3: {node} runs {row.request_id} in block {block}, which is {_whose(owner)}")

    def on_copy(self, node: str, job: Job) -> None:
        """Bytes of a job are about to move: both ends are owned by the job's request, at this moment (I3)."""
        match job:
            case WriteJob():
                self._check_target(
                    node, job, job.target_instance, job.target_incarnation, job.target_rank, job.window_offset < 0
                )
                if job.window_offset >= 0:
                    self._check_window(node, job, job.target_instance, job.target_rank, job.window_offset)
                if self._pool(job.target_instance, job.target_incarnation) is not None:
                    # What is written into a dead life's memory is read by nobody: its source may be anything.
                    self._check_source(node, job, instance_of(node), -1, job.source_block_ids, -1)
            case PullJob():
                instance, incarnation = self._own(node)
                self._check_target(node, job, instance, incarnation, -1, job.window_offset < 0)
                self._check_source(
                    node, job, job.source_instance, job.source_incarnation, job.source_block_ids, job.source_slot
                )
            case MergeJob():
                instance, incarnation = self._own(node)
                self._check_target(node, job, instance, incarnation, -1, True)
            case _:
                pass

    def at_rest(self) -> str:
        """What is not free although nothing is in flight (I4); "" when everything is."""
        cluster = self._cluster
        for node in cluster.simulation.nodes.values():
            if not node.alive:
                continue
            for actor in node.actors.values():
                why = _leftover(actor)
                if why:
                    return f"{actor.address}: {why}"
        return ""

    # -- inside -------------------------------------------------------------------------------------------------------

    def _own(self, node: str) -> tuple[str, int]:
        return instance_of(node), self._cluster.simulation.nodes[node].incarnation

    def _has_changed(self, address: str, pool: CachePool) -> bool:
        """Whether anything was granted or freed since the last look."""
        changes = (pool.blocks.changes, pool.slots.changes, len(pool.blocks._owner), len(pool.holdings))
        if self._changes.get(address) == changes:
            return False
        self._changes[address] = changes
        return True

    def _pool(self, instance: str, incarnation: int) -> CachePool | None:
        """The books of that life of an instance; None when its scheduler is dead or of another life."""
        node, scheduler = self._schedulers.get(instance, (None, None))
        if node is None or scheduler is None or not node.alive or node.incarnation != incarnation >= 0:
            return None
        return scheduler.pool

    def _check_target(
        self,
        node: str,
        job: WriteJob | PullJob | MergeJob,
        instance: str,
        incarnation: int,
        rank: int,
        in_place: bool,
    ) -> None:
        """The attempt's blocks are its own when bytes go straight into them."""
        pool = self._pool(instance, incarnation)
        if pool is None or not in_place:
            return
        attempt = (job.request_id, job.epoch)
        owners = pool.blocks._owner
        for block in job.target_block_ids:
            owner = owners.get(block)
            if owner != attempt:
                kind = type(job).__name__
                raise Violation(f"I3: {kind} of {attempt} on {node}: block {block} of {instance} is {_whose(owner)}")

    def _check_source(
        self,
        node: str,
        job: WriteJob | PullJob,
        instance: str,
        incarnation: int,
        blocks: tuple[int, ...],
        slot: int,
    ) -> None:
        pool = self._pool(instance, incarnation)
        if pool is None:
            return
        name = job.request_id
        read: tuple[tuple[str, tuple[int, ...], Pool], ...] = (
            ("block", blocks, pool.blocks),
            ("slot", (slot,) if slot >= 0 else (), pool.slots),
        )
        for what, indices, ids in read:
            owners = ids._owner
            for index in indices:
                owner = owners.get(index)
                if (owner is None or owner[0] != name) and not pool.may_use(name, index, ids):
                    raise Violation(
                        f"I3: {type(job).__name__} of {name} epoch {job.epoch} on {node} reads {what} {index} of"
                        f" {instance}, which is {_whose(owner)}"
                    )

    def _check_window(self, node: str, job: WriteJob, instance: str, rank: int, offset: int) -> None:
        actor = self._cluster.actor(rank_address(instance, rank, "staging"))
        if actor is None or actor.node.incarnation != job.target_incarnation:
            return
        assert isinstance(actor.machine, StagingMachine)
        lease = actor.machine._leases.get((job.request_id, job.epoch))
        windows = [
            window.offset_bytes
            for source in (lease.granted.sources if lease is not None else ())
            for window in source.windows
        ]
        if offset not in windows:
            raise Violation(
                f"I3: {node} writes chunk {job.chunk_index} of {job.request_id} epoch {job.epoch} to byte {offset} of"
                f" the staging of {instance}.r{rank}, which is not in a lease of that attempt"
            )

    @staticmethod
    def _check_leases(address: str, machine: StagingMachine) -> None:
        taken = sorted(machine._space._taken.items())
        for (first, size), (second, _) in pairwise(taken):
            if first + size > second:
                raise Violation(f"I3: {address} granted bytes {second}… twice")
        if {lease.offset_bytes for lease in machine._leases.values()} != {offset for offset, _ in taken}:
            raise Violation(f"I3: {address}: its leases and its space disagree")


def _is_consistent(pool: CachePool) -> bool:
    """A quick look at what ``CachePool.check`` verifies in full."""
    for ids in (pool.blocks, pool.slots):
        free, owner = ids._free, ids._owner
        if len(free) + len(owner) != ids.count or not owner.keys().isdisjoint(free) or len(set(free)) != len(free):
            return False
    blocks: dict[int, Owner] = {}
    count = slots = 0
    for key, holding in pool.holdings.items():
        base, own = holding.base, holding.blocks
        if base is None:
            slots += holding.slot >= 0
        else:
            if base.freed or key not in base.pins:
                return False
            own = holding.own_blocks
            slots += len(holding.own_slots)
        count += len(own)
        blocks.update(dict.fromkeys(own, key))
    return blocks == pool.blocks._owner and count == len(blocks) and slots == len(pool.slots._owner)


def _whose(owner: Owner | None) -> str:
    return "free" if owner is None else f"owned by {owner[0]} epoch {' '.join(map(str, owner[1:]))}"


def _leftover(actor: SimulatedActor) -> str:
    machine = actor.machine
    if isinstance(machine, SchedulerMachine):
        if machine.pool is not None and machine.pool.holdings:
            owner, holding = next(iter(machine.pool.holdings.items()))
            pins = sorted(map(str, holding.pins))
            return f"{owner} still holds blocks {holding.blocks} (released: {holding.released}, pins: {pins})"
        if machine.side is not None and machine.side.live_count:
            return f"{machine.side.live_count} requests are live: {machine.side.status()[:2]}"
    elif isinstance(machine, StagingMachine):
        if machine._leases:
            return f"leases of {sorted(machine._leases)}"
    elif isinstance(machine, TransferMachine):
        _, requests = machine.status(0)
        if requests:
            return f"attempts {requests[:3]}"
    elif actor.name in ("gateway", "engine"):
        _, requests = machine.status(0)
        if requests:
            return f"requests {requests[:3]}"
    return ""
