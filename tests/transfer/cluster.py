"""Real transfer and staging machines of two instances in one thread, with real executors over the oracle's world.

Messages travel per (sender, receiver) in order; which pair goes next is the first in line, or chosen by a seeded
generator. Jobs run when ``run`` comes to them, or are held back until a test lets them go. Messages to addresses that
have no machine (engines) are kept in ``inbox``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy as np

from actors.runtime.config import Options
from actors.runtime.machine import Effect, Fail, Job, Machine, Note, Run, Send, StartTimer, StopTimer
from actors.transfer.executor import LinkBook, MergeExecutor, TransferExecutor
from actors.transfer.machine import TransferMachine
from actors.transfer.staging_machine import StagingMachine
from messages.base import Message, control_address, rank_address
from messages.cluster import InstanceInfo, LinkPeer, PeerLinked
from messages.handoff import TransferMode
from messages.layout import Manifest, ModelGeometry
from messages.lifecycle import WorkerReady
from messages.transfer import (
    ClosePush,
    LayerReady,
    OpenPush,
    OpenReceive,
    PullKVCache,
    ReceiveOpened,
    ReleaseReceive,
    Restored,
)
from tests.oracle.world import NaivePlane, Request, expected, fill_instance, instance

Kind = TypeVar("Kind", bound=Message)
P_ENGINE, D_ENGINE = control_address("p0", "engine"), control_address("d0", "engine")


class Cluster:
    """One prefill instance ``p0`` and one decode instance ``d0``."""

    def __init__(
        self,
        model: ModelGeometry,
        source_tp: int,
        target_tp: int,
        *,
        seed: int | None = None,
        options: Options | None = None,
        link: bool = True,
        source_incarnation: int = 1,
        **layout: Any,
    ) -> None:
        self.model, self.layout = model, layout
        self.options = options or Options(staging_mb=64)
        self.plane = NaivePlane()
        self.random = Random(seed) if seed is not None else None
        self.now_ns = 1
        self.machines: dict[str, Machine] = {}
        self.executors: dict[str, TransferExecutor | MergeExecutor] = {}
        self.channels: dict[tuple[str, str], deque[Message]] = defaultdict(deque)
        self.jobs: deque[tuple[str, Job]] = deque()
        self.hold: Callable[[str, Job], bool] = lambda address, job: False
        self.spoil: Callable[[str, Job], str] = lambda address, job: ""
        self.mangle: Callable[[str, str, Message], Sequence[Message]] = lambda sender, to, message: (message,)
        self.timers: dict[tuple[str, tuple[str | int, ...]], Message] = {}
        self.inbox: dict[str, list[Message]] = defaultdict(list)
        self.failures: list[Fail] = []
        self.delivered: list[tuple[str, str, Message]] = []
        self.sources = self._start("p0", "PREFILL", source_tp, source_incarnation)
        self.targets = self._start("d0", "DECODE", target_tp, 1)
        if link:
            self.link()

    def _start(self, name: str, role: str, tp: int, incarnation: int) -> list[Manifest]:
        manifests = instance(self.plane, self.model, name, tp, incarnation=incarnation, **self.layout)
        for manifest in manifests:
            book = LinkBook()
            self.machines[rank_address(name, manifest.rank, "transfer")] = TransferMachine(
                name, manifest.rank, incarnation, role, self.options
            )
            self.machines[rank_address(name, manifest.rank, "staging")] = StagingMachine(manifest.rank)
            self.executors[rank_address(name, manifest.rank, "transfer")] = TransferExecutor(
                self.plane, book, manifest.rank, threads=0, scratch_region=f"{name}{manifest.rank}{incarnation}.scratch"
            )
            self.executors[rank_address(name, manifest.rank, "staging")] = MergeExecutor(
                self.plane, book, manifest.rank, threads=0
            )
            ready = WorkerReady(rank=manifest.rank, incarnation=incarnation, manifest=manifest)
            self.post(rank_address(name, manifest.rank, "worker"), rank_address(name, manifest.rank, "transfer"), ready)
        self.run()
        forwarded = self.take(control_address(name, "engine"), WorkerReady)
        return sorted((message.manifest for message in forwarded), key=lambda manifest: manifest.rank)

    def link(self) -> None:
        """Link both instances with each other and demand that it works."""
        for engine, own, peer, role in (
            (P_ENGINE, self.sources, self.targets, "DECODE"),
            (D_ENGINE, self.targets, self.sources, "PREFILL"),
        ):
            for manifest in own:
                message = LinkPeer(peer=info(peer, role), own_manifests=tuple(own))
                self.post(engine, rank_address(manifest.instance, manifest.rank, "transfer"), message)
        self.run()
        linked = len(self.take(P_ENGINE, PeerLinked)) + len(self.take(D_ENGINE, PeerLinked))
        assert linked == len(self.sources) + len(self.targets), self.inbox

    # -- running --------------------------------------------------------------------------------------------------

    def post(self, sender: str, to: str, message: Message) -> None:
        """Put a message on its way."""
        self.channels[sender, to].extend(self.mangle(sender, to, message))

    def run(self) -> None:
        """Deliver messages and run jobs until nothing is left that may go on."""
        while self.step():
            self.now_ns += 1000

    def step(self) -> bool:
        """Deliver one message or run one job."""
        ready = [pair for pair, queue in self.channels.items() if queue]
        jobs = [index for index, (address, job) in enumerate(self.jobs) if not self.hold(address, job)]
        choices = len(ready) + len(jobs)
        if not choices:
            return False
        choice = self.random.randrange(choices) if self.random else 0
        if choice < len(ready):
            sender, to = ready[choice]
            self._deliver(sender, to, self.channels[sender, to].popleft())
        else:
            self.finish(jobs[choice - len(ready)])
        return True

    def finish(self, index: int = 0) -> None:
        """Run the job at ``index`` of those that are waiting, held or not."""
        address, job = self.jobs[index]
        del self.jobs[index]
        results: list[Message] = []
        self.executors[address].submit(job, lambda to, message: None, results.append)
        error = self.spoil(address, job)
        result = msgspec.structs.replace(results[0], error=error) if error else results[0]
        self.post(address, address, result)

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        self.delivered.append((sender, to, message))
        machine = self.machines.get(to)
        if machine is None:
            self.inbox[to].append(message)
            return
        for effect in machine.handle(self.now_ns, sender, message):
            self._carry_out(to, effect)

    def _carry_out(self, address: str, effect: Effect) -> None:
        match effect:
            case Send():
                self.post(address, effect.to, effect.message)
            case Run():
                self.jobs.append((address, effect.job))
            case StartTimer():
                self.timers[address, effect.key] = effect.message
            case StopTimer():
                self.timers.pop((address, effect.key), None)
            case Fail():
                self.failures.append(effect)
            case Note():
                pass

    def fire_timers(self) -> None:
        """Let every running timer be due."""
        for (address, key), message in list(self.timers.items()):
            del self.timers[address, key]
            self._deliver(address, address, message)

    # -- looking --------------------------------------------------------------------------------------------------

    def take(self, address: str, kind: type[Kind]) -> list[Kind]:
        """Remove and return messages of one type that somebody without a machine received."""
        found = [message for message in self.inbox[address] if isinstance(message, kind)]
        self.inbox[address] = [message for message in self.inbox[address] if not isinstance(message, kind)]
        return found

    def transfer(self, name: str, rank: int) -> TransferMachine:
        machine = self.machines[rank_address(name, rank, "transfer")]
        assert isinstance(machine, TransferMachine)
        return machine

    def staging(self, rank: int) -> StagingMachine:
        machine = self.machines[rank_address("d0", rank, "staging")]
        assert isinstance(machine, StagingMachine)
        return machine

    def nothing_is_left(self) -> bool:
        """Whether no push, receive, lease, job or timer is left anywhere."""
        busy = [
            dict(machine.status(self.now_ns)[0]).get(name, 0)
            for machine in self.machines.values()
            for name in ("pushes", "receives", "leases", "merges_waiting", "staging_used_bytes")
        ]
        return not any(busy) and not self.jobs and not self.timers

    def snapshot(self) -> str:
        """The state of every machine as text, without counters of late messages."""
        parts = []
        for address, machine in sorted(self.machines.items()):
            if isinstance(machine, TransferMachine):
                parts.append(f"{address} {machine.source.pushes} {machine.target.receives}")
            elif isinstance(machine, StagingMachine):
                values = [value for value in machine.status(0)[0] if value[0] != "late_messages"]
                parts.append(f"{address} {values} {machine.status(0)[1]}")
        return "\n".join(parts)

    def assert_restored(self, requests: Sequence[Request]) -> None:
        """Every byte of every target region is what the oracle says."""
        for target in self.targets:
            region = self.plane.regions[target.regions[0].region_id]
            assert np.array_equal(region, expected(self.plane, target, requests)), f"rank {target.rank} differs"


def info(manifests: Sequence[Manifest], role: str) -> InstanceInfo:
    """What the registry would say of these ranks."""
    first = manifests[0]
    return InstanceInfo(
        instance=first.instance,
        incarnation=first.incarnation,
        role=role,  # type: ignore[arg-type]
        tp_size=first.tp_size,
        max_model_len=1024,
        block_count=first.block_count,
        slot_count=first.slot_count,
        manifests=tuple(manifests),
    )


class Handoff:
    """Plays scheduler, engine and worker for one request attempt, step by step."""

    def __init__(self, cluster: Cluster, request: Request, *, epoch: int = 0, mode: TransferMode = "PUSH") -> None:
        self.cluster, self.request, self.epoch, self.mode = cluster, request, epoch, mode
        self.leases: list[ReceiveOpened] = []

    @property
    def ids(self) -> dict[str, Any]:
        return {"request_id": self.request.name, "epoch": self.epoch}

    def to_targets(self, message: Message) -> None:
        for target in self.cluster.targets:
            self.cluster.post(D_ENGINE, rank_address("d0", target.rank, "transfer"), message)

    def to_sources(self, message: Message, sender: str = P_ENGINE) -> None:
        for source in self.cluster.sources:
            self.cluster.post(sender, rank_address("p0", source.rank, "transfer"), message)

    def reserve(self) -> None:
        self.to_targets(
            OpenReceive(
                **self.ids,
                source_instance="p0",
                source_incarnation=self.cluster.sources[0].incarnation,
                mode=self.mode,
                target_block_ids=self.request.target_block_ids,
                target_slot=self.request.target_slot,
                prompt_tokens=self.request.tokens,
            )
        )

    def opened(self) -> bool:
        """Whether every target rank has granted."""
        mine = [m for m in self.cluster.inbox[D_ENGINE] if isinstance(m, ReceiveOpened)]
        mine = [m for m in mine if (m.request_id, m.epoch) == (self.request.name, self.epoch)]
        self.leases = list({m.rank: m for m in mine}.values())
        return len(self.leases) == len(self.cluster.targets)

    def open_push(self, ready_tokens: int = 0) -> None:
        assert self.opened(), self.cluster.inbox[D_ENGINE]
        self.to_sources(
            OpenPush(
                **self.ids,
                target_instance="d0",
                target_incarnation=self.cluster.targets[0].incarnation,
                mode=self.mode,
                source_block_ids=self.request.source_block_ids,
                source_slot=self.request.source_slot,
                target_block_ids=self.request.target_block_ids,
                target_slot=self.request.target_slot,
                leases=tuple(message.lease for message in self.leases),
                ready_tokens=ready_tokens,
            )
        )

    def chunks(self, chunk_tokens: int) -> list[tuple[int, int, int]]:
        starts = range(0, self.request.tokens, chunk_tokens)
        return [(i, start, min(chunk_tokens, self.request.tokens - start)) for i, start in enumerate(starts)]

    def layers_of(self, chunk: tuple[int, int, int], *, with_draft: bool = True) -> list[LayerReady]:
        """What the workers say while they compute one chunk."""
        index, start, count = chunk
        kinds = self.cluster.model.layer_kinds
        names: list[tuple[str, int]] = [("target", layer) for layer in range(len(kinds))]
        has_draft = any(layout.namespace == "draft" for layout in self.cluster.sources[0].tensors)
        if with_draft and has_draft:
            names.append(("draft", 0))
        return [
            LayerReady(
                **self.ids,
                chunk_index=index,
                layer=layer,
                token_start=start,
                token_count=count,
                is_last_layer=(namespace, layer) == names[-1],
                is_last_chunk=start + count == self.request.tokens,
                namespace=namespace,  # type: ignore[arg-type]
            )
            for namespace, layer in names
        ]

    def compute(self, chunk_tokens: int, *, with_draft: bool = True) -> None:
        """Announce every layer of every chunk on every source rank."""
        for chunk in self.chunks(chunk_tokens):
            for message in self.layers_of(chunk, with_draft=with_draft):
                for source in self.cluster.sources:
                    address = rank_address("p0", source.rank, "transfer")
                    self.cluster.post(rank_address("p0", source.rank, "worker"), address, message)

    def pull(self) -> None:
        self.to_targets(
            PullKVCache(
                **self.ids,
                source_instance="p0",
                source_incarnation=self.cluster.sources[0].incarnation,
                source_block_ids=self.request.source_block_ids,
                source_slot=self.request.source_slot,
                chunk_count=0,
                computed_tokens=self.request.tokens,
            )
        )

    def release(self) -> None:
        self.to_targets(ReleaseReceive(**self.ids))

    def close(self) -> None:
        self.to_sources(ClosePush(**self.ids))

    def restored(self) -> list[Restored]:
        return [m for m in self.of(Restored) if m.request_id == self.request.name and m.epoch == self.epoch]

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self.cluster.inbox[D_ENGINE] if isinstance(message, kind)]

    def whole(self, chunk_tokens: int, *, with_draft: bool = True) -> None:
        """The whole hand-off without incident."""
        self.reserve()
        self.cluster.run()
        self.open_push()
        if self.mode == "PUSH":
            self.compute(chunk_tokens, with_draft=with_draft)
        self.pull()
        self.cluster.run()
        self.close()
        self.cluster.run()


def filled(cluster: Cluster, requests: Sequence[Request]) -> Cluster:
    """Give the source ranks their shards of the requests."""
    fill_instance(cluster.plane, cluster.sources, requests)
    return cluster
