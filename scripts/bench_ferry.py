"""The rank processes of the hand-off benchmark, driven from one process that plays schedulers and engines."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

import msgspec

from actors.runtime.config import ConfigError, NodeConfig, Options
from actors.runtime.node import Node
from actors.transfer.executor import RegionReader
from actors.transfer.verify import verify_restored
from messages.base import SUPERVISOR, Message, rank_address
from messages.cluster import InstanceInfo, LinkFailed, LinkPeer, PeerLinked
from messages.envelope import Envelope
from messages.handoff import TransferMode
from messages.layout import Manifest, ModelGeometry
from messages.lifecycle import NodeFailed, Stop, WorkerReady
from messages.transfer import (
    ClosePush,
    LayerReady,
    OpenPush,
    OpenReceive,
    PullKVCache,
    PushFailed,
    ReceiveOpened,
    ReceiveRefused,
    Restored,
    RestoreFailed,
)
from scripts.bench_shard import pushed_layers
from scripts.plan import find_geometry
from transport.dataplane import COPY_ENVIRONMENT, DataPlane

TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
NAMES = {"p0": "PREFILL", "d0": "DECODE"}

Kind = TypeVar("Kind", bound=Message)


class Sizes(NamedTuple):
    """Tensor-parallel sizes of the two instances."""

    prefill: int
    decode: int


class Carried(NamedTuple):
    """One hand-off: what every decode rank reported, the slowest rank's times, and the clock of this process."""

    bytes_moved: int
    push_ms: float
    pull_ms: float
    merge_ms: float
    total_ms: float
    restore_ms: float


class Ferry:
    """Rank processes of one prefill and one decode instance, driven from here."""

    def __init__(self, run_dir: Path, options: Options, sizes: Sizes, scattered: bool) -> None:
        self._run_dir = run_dir
        self._options = options
        self._sizes = {"p0": sizes.prefill, "d0": sizes.decode}
        self._geometry: ModelGeometry = find_geometry(options.model)
        self._mail: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._nodes: dict[str, Node] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._manifests: dict[str, list[Manifest]] = {}
        self._count = 0
        orders = [list(range(options.block_count)) for _ in range(2)]
        if scattered:
            for seed, order in enumerate(orders):
                Random(seed).shuffle(order)
        self._source_blocks, self._target_blocks = (tuple(order) for order in orders)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every rank, link both instances."""
        if self._options.data_plane == "tcp":
            from transport.keys import FILE_NAME, make_keys, write_keys

            write_keys(self._run_dir / FILE_NAME, make_keys())
        for name, actor in ((SUPERVISOR.partition("/")[0], "root"), ("p0.ctl", "engine"), ("d0.ctl", "engine")):
            node = self._nodes[name] = Node(self._config(name, "", "", 0))
            node.office.register(actor, self._accept(node))
            node.start()
        for instance, role in NAMES.items():
            for rank in range(self._sizes[instance]):
                config = self._config(f"{instance}.r{rank}", instance, role, rank)
                path = self._run_dir / f"{config.node}.json"
                path.write_bytes(msgspec.json.encode(config))
                command = [sys.executable, "-m", "actors.runtime.node", str(path)]
                self._processes.append(subprocess.Popen(command, env={**os.environ, **dict(COPY_ENVIRONMENT)}))
        ready = self._expect(WorkerReady, sum(self._sizes.values()))
        for instance in NAMES:
            mine = [message.manifest for message in ready if message.manifest.instance == instance]
            self._manifests[instance] = sorted(mine, key=lambda manifest: manifest.rank)
        self._link()

    def _config(self, node: str, instance: str, role: str, rank: int) -> NodeConfig:
        rank_factories = ("actors.transfer.actor:build", "scripts.bench_shard:build_shard")
        return NodeConfig(
            node=node,
            incarnation=1,
            run_id=f"bench{os.getpid()}",
            run_dir=str(self._run_dir),
            options=self._options,
            factories=rank_factories if role else (),
            instance=instance,
            role=role,  # type: ignore[arg-type]
            rank=rank,
            tp_size=self._sizes.get(instance, 1),
        )

    def _accept(self, node: Node) -> Callable[[int, Sequence[Envelope]], None]:
        def accept(session: int, envelopes: Sequence[Envelope]) -> None:
            for envelope in envelopes:
                self._mail.put(envelope.message)
            node.office.consumed(session, len(envelopes))

        return accept

    def _link(self) -> None:
        for instance, peer in (("p0", "d0"), ("d0", "p0")):
            info = InstanceInfo(
                instance=peer,
                incarnation=1,
                role=NAMES[peer],  # type: ignore[arg-type]
                tp_size=self._sizes[peer],
                max_model_len=0,
                block_count=self._options.block_count,
                slot_count=self._options.max_seqs_per_batch,
                manifests=tuple(self._manifests[peer]),
            )
            self._tell(instance, LinkPeer(peer=info, own_manifests=tuple(self._manifests[instance])))
        self._expect(PeerLinked, sum(self._sizes.values()))

    def stop(self) -> None:
        """End every process and give back every region."""
        root = self._nodes.get("supervisor")
        for instance, size in self._sizes.items():
            for rank in range(size):
                if root is not None:
                    root.post("root", f"{instance}.r{rank}/node", Stop(reason="the benchmark is over"))
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for node in self._nodes.values():
            node.close()

    # -- talking --------------------------------------------------------------------------------------------------

    def _tell(self, instance: str, message: Message) -> None:
        """As the engine of an instance, to the transfers of all its ranks."""
        node = self._nodes[f"{instance}.ctl"]
        for rank in range(self._sizes[instance]):
            node.post("engine", rank_address(instance, rank, "transfer"), message)

    def _expect(self, kind: type[Kind], count: int) -> list[Kind]:
        """The next ``count`` messages of one kind; a refusal or silence ends the run with its reason."""
        found: list[Kind] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(found) < count:
            try:
                message = self._mail.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"{len(found)} of {count} {kind.__name__} within {TIMEOUT_S} s") from None
            if isinstance(message, kind):
                found.append(message)
            elif isinstance(message, LinkFailed | ReceiveRefused | RestoreFailed | PushFailed | NodeFailed):
                raise ConfigError(f"{type(message).__name__}: {message.reason}")
        return found

    # -- hand-offs ------------------------------------------------------------------------------------------------

    def carry(self, tokens: int, mode: TransferMode, tokens_per_s: float = 0.0) -> Carried:
        """One hand-off of a prompt of ``tokens``; layers get ready at once, or at the pace of ``tokens_per_s``."""
        self._count += 1
        request = f"request-{self._count}"
        leases = self._reserve(request, tokens, mode)
        began = time.perf_counter()
        self._tell(
            "p0",
            OpenPush(
                request_id=request,
                epoch=0,
                target_instance="d0",
                target_incarnation=1,
                mode=mode,
                source_block_ids=self._source_blocks,
                source_slot=0,
                target_block_ids=self._target_blocks,
                target_slot=1,
                leases=leases,
                ready_tokens=0 if tokens_per_s else tokens,
            ),
        )
        if tokens_per_s:
            self._compute(request, tokens, tokens_per_s)
        asked = time.perf_counter()
        self._tell(
            "d0",
            PullKVCache(
                request_id=request,
                epoch=0,
                source_instance="p0",
                source_incarnation=1,
                source_block_ids=self._source_blocks,
                source_slot=0,
                chunk_count=-(-tokens // self._options.max_tokens_per_chunk_for_prefill),
                computed_tokens=tokens,
            ),
        )
        restored = self._expect(Restored, self._sizes["d0"])
        ended = time.perf_counter()
        self._tell("p0", ClosePush(request_id=request, epoch=0))
        return Carried(
            bytes_moved=sum(message.bytes_moved for message in restored),
            push_ms=max(message.push_ms for message in restored),
            pull_ms=max(message.pull_ms for message in restored),
            merge_ms=max(message.merge_ms for message in restored),
            total_ms=(ended - began) * 1e3,
            restore_ms=(ended - asked) * 1e3,
        )

    def _reserve(self, request: str, tokens: int, mode: TransferMode) -> tuple[Any, ...]:
        self._tell(
            "d0",
            OpenReceive(
                request_id=request,
                epoch=0,
                source_instance="p0",
                source_incarnation=1,
                mode=mode,
                target_block_ids=self._target_blocks,
                target_slot=1,
                prompt_tokens=tokens,
            ),
        )
        return tuple(message.lease for message in self._expect(ReceiveOpened, self._sizes["d0"]))

    def _compute(self, request: str, tokens: int, tokens_per_s: float) -> None:
        """Say ``LayerReady`` as the workers would, evenly over the time that a prefill takes."""
        step = self._options.max_tokens_per_chunk_for_prefill
        layers = pushed_layers(self._geometry, self._options.num_speculative_tokens)
        due = time.perf_counter()
        for index, start in enumerate(range(0, tokens, step)):
            count = min(step, tokens - start)
            for namespace, layer in layers:
                due += count / len(layers) / tokens_per_s
                time.sleep(max(0.0, due - time.perf_counter()))
                ready = LayerReady(
                    request_id=request,
                    epoch=0,
                    chunk_index=index,
                    layer=layer,
                    token_start=start,
                    token_count=count,
                    is_last_layer=(namespace, layer) == layers[-1],
                    is_last_chunk=start + count == tokens,
                    namespace=namespace,
                )
                self._tell("p0", ready)

    @property
    def data_plane(self) -> DataPlane:
        """This process's own."""
        return self._nodes["d0.ctl"].data_plane

    def verify(self, tokens: int) -> int:
        """Compare every restored byte with every source; returns the bytes compared."""
        plane = self.data_plane
        for manifest in (*self._manifests["p0"], *self._manifests["d0"]):
            plane.attach(manifest.regions[0])
        reader = RegionReader(plane, "bench.verify")
        compared = 0
        for target in self._manifests["d0"]:
            compared += verify_restored(
                reader,
                self._manifests["p0"],
                target,
                source_block_ids=self._source_blocks,
                source_slot=0,
                target_block_ids=self._target_blocks,
                target_slot=1,
                token_count=tokens,
            )
        return compared
