"""How fast caches move: caches of real size between real rank processes, without a model, next to memcpy.

The rank nodes are real: their transfer and staging actors, executors and data plane are those of a served cluster. Only
the worker is a stand-in that fills its caches with noise and publishes their layout. This process plays schedulers and
engines. Two things are measured:

* **throughput**: the whole prompt is ready at once (as when a prefilled request is offered to a second decode instance)
  and the pull is asked for at once. ``total_ms`` is the time until every decode rank has restored, ``ratio`` compares
  it with one thread's memcpy of the same bytes;
* **restore time**: layers become ready at the pace of a prefill (``prefill_tokens_per_s``), and the time counts from
  ``FirstGeneration`` (here: ``PullKVCache``) to the last ``Restored``. Measured at ``prompt_tokens`` and at one chunk.

memcpy runs between regions like those of the caches. Once, every restored byte is compared with its source.
"""

from __future__ import annotations

import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from actors.runtime.config import ConfigError, NodeConfig, Options
from actors.runtime.context import ActorSpec, NodeContext
from actors.runtime.machine import Effect, Send
from actors.runtime.node import Node
from actors.transfer.executor import RegionReader
from actors.transfer.verify import verify_restored
from actors.worker.layout import build_layout
from messages.base import SUPERVISOR, Message, rank_address
from messages.cluster import InstanceInfo, LinkFailed, LinkPeer, PeerLinked
from messages.envelope import Envelope
from messages.handoff import TransferMode
from messages.layout import Manifest, ModelGeometry, Namespace, TensorLayout
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
from scripts.plan import find_geometry
from transport.dataplane import COPY_ENVIRONMENT, DataPlane

CHUNK_TOKENS = 2048
BLOCK_SIZE = 128
PREFILL_TOKENS_PER_S = 40_000.0
"""Pace of the prefill that the restore time is measured behind: a fast accelerator."""
TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
NAMES = {"p0": "PREFILL", "d0": "DECODE"}

Kind = TypeVar("Kind", bound=Message)


class Sizes(NamedTuple):
    """Tensor-parallel sizes of the two instances."""

    prefill: int
    decode: int


def run(
    geometry: str = "qwen3.5-2b",
    topology: str = "P2/D1",
    prompt_tokens: int = 18592,
    kv_cache_transfer_mode: TransferMode = "PUSH",
    data_plane: Literal["shm", "tcp"] = "shm",
    *,
    repeats: int = 5,
    chunk_tokens: int = CHUNK_TOKENS,
    block_size: int = BLOCK_SIZE,
    speculative_tokens: int = 3,
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S,
    scattered: bool = False,
) -> dict[str, Any]:
    """Measure hand-offs (see the module); medians of ``repeats``. Times in ms, rates in 1e9 bytes per second.

    ``geometry`` is a name of ``scripts/geometries.py`` or a checkpoint; ``scattered`` shuffles the blocks on both
    sides, as after hours of serving, instead of what a fresh allocator gives. Raises ``ConfigError`` for what cannot
    be run.
    """
    sizes = parse_topology(topology)
    short_tokens = min(prompt_tokens, chunk_tokens)
    options = Options(
        model=geometry,
        topology=topology,
        data_plane=data_plane,
        block_size=block_size,
        block_count=-(-prompt_tokens // block_size) + 8,
        max_seqs_per_batch=2,
        max_tokens_per_chunk_for_prefill=chunk_tokens,
        num_speculative_tokens=speculative_tokens,
        staging_leases=1,
        log_level="error",
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        ferry = Ferry(Path(folder), options, sizes, scattered)
        try:
            ferry.start()
            warm = ferry.carry(prompt_tokens, kv_cache_transfer_mode)
            verified = ferry.verify(prompt_tokens)
            moved = warm.bytes_moved
            memcpy = Memcpy(ferry.data_plane, moved)
            rounds, memcpy_ms = [], []
            for _ in range(repeats):
                rounds.append(ferry.carry(prompt_tokens, kv_cache_transfer_mode))
                memcpy_ms.append(memcpy.measure())
            paced = [ferry.carry(prompt_tokens, kv_cache_transfer_mode, prefill_tokens_per_s) for _ in range(repeats)]
            short = [ferry.carry(short_tokens, kv_cache_transfer_mode, prefill_tokens_per_s) for _ in range(repeats)]
        finally:
            ferry.stop()
    total_ms, copy_ms = statistics.median(r.total_ms for r in rounds), statistics.median(memcpy_ms)
    restore_ms = statistics.median(r.restore_ms for r in paced)
    restore_short_ms = statistics.median(r.restore_ms for r in short)
    return {
        "geometry": geometry,
        "topology": topology,
        "prompt_tokens": prompt_tokens,
        "mode": kv_cache_transfer_mode,
        "bytes": moved,
        "push_ms": statistics.median(r.push_ms for r in rounds),
        "pull_ms": statistics.median(r.pull_ms for r in rounds),
        "merge_ms": statistics.median(r.merge_ms for r in rounds),
        "total_ms": total_ms,
        "restore_ms": restore_ms,
        f"restore_{short_tokens}_ms": restore_short_ms,
        "restore_ratio": restore_ms / restore_short_ms,
        "gb_per_s": moved / total_ms / 1e6,
        "memcpy_gb_per_s": moved / copy_ms / 1e6,
        "ratio": total_ms / copy_ms,
        "verified_bytes": verified,
    }


def parse_topology(text: str) -> Sizes:
    """``P2/D1`` → sizes 2 and 1; one instance of each."""
    match = re.fullmatch(r"P([1-9]\d*)/D([1-9]\d*)", text)
    if match is None:
        raise ConfigError(f"topology {text!r}: the hand-off benchmark takes one instance of each, written like P2/D1")
    return Sizes(int(match[1]), int(match[2]))


class Memcpy:
    """One thread's copy between two buffers of the kind that caches lie in (regions), whose pages exist already."""

    def __init__(self, plane: DataPlane, size_bytes: int) -> None:
        buffers = []
        for name in ("source", "target"):
            plane.create_region(f"bench.memcpy.{name}", size_bytes)
            buffers.append(np.frombuffer(plane.view(f"bench.memcpy.{name}"), dtype=np.uint8))
        self._source, self._target = buffers
        self._source[:] = self._target[:] = 1
        self.measure()

    def measure(self) -> float:
        """Milliseconds of one copy."""
        began = time.perf_counter()
        np.copyto(self._target, self._source)
        return (time.perf_counter() - began) * 1e3


# -- in a rank's process: the stand-in for a worker -----------------------------------------------------------------


class ShardMachine:
    """Publishes the rank's caches, and rests."""

    def __init__(self, transfer: str, ready: WorkerReady) -> None:
        self._transfer = transfer
        self._ready = ready

    def start(self, now_ns: int) -> list[Effect]:
        """The caches exist: say so."""
        return [Send(self._transfer, self._ready)]

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """Nothing is asked of it."""
        return []

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        """Nothing of interest."""
        return (), ()


def build_shard(context: NodeContext) -> tuple[ActorSpec, ...]:
    """The rank's ``worker``: caches of the right layout, full of noise on a prefill rank."""
    config, options = context.config, context.config.options
    geometry = find_geometry(options.model)
    region_id = f"{config.node}.{config.incarnation}.caches"
    tensors, size = build_layout(
        geometry,
        config.tp_size,
        config.rank,
        block_size=options.block_size,
        block_count=options.block_count,
        slot_count=options.max_seqs_per_batch,
        speculative_tokens=options.num_speculative_tokens,
        region_id=region_id,
    )
    region = context.data_plane.create_region(region_id, size)
    if config.role == "PREFILL":
        fill_with_noise(np.frombuffer(context.data_plane.view(region_id), dtype=np.uint8), tensors)
    manifest = Manifest(
        instance=config.instance,
        incarnation=config.incarnation,
        rank=config.rank,
        tp_size=config.tp_size,
        model_fingerprint=geometry.model_fingerprint,
        block_size=options.block_size,
        block_count=options.block_count,
        slot_count=options.max_seqs_per_batch,
        speculative_tokens=options.num_speculative_tokens,
        regions=(region,),
        tensors=tensors,
        max_tokens_per_chunk=options.max_tokens_per_chunk_for_prefill,
    )
    ready = WorkerReady(rank=config.rank, incarnation=config.incarnation, manifest=manifest)
    return (ActorSpec("worker", ShardMachine(f"{config.node}/transfer", ready)),)


def fill_with_noise(region: npt.NDArray[np.uint8], tensors: Sequence[TensorLayout]) -> None:
    """Noise that is equal where ranks hold the same heads, and nowhere else."""
    for index, layout in enumerate(tensors):
        noise = np.random.default_rng((index, layout.spans[0].start))
        size = layout.resource_count * layout.resource_stride_bytes
        region[layout.base_bytes : layout.base_bytes + size] = np.frombuffer(noise.bytes(size), dtype=np.uint8)


def pushed_layers(geometry: ModelGeometry, speculative_tokens: int) -> list[tuple[Namespace, int]]:
    """The layers with KEY and VALUE, in the order in which a worker computes them."""
    layers: list[tuple[Namespace, int]] = [
        ("target", index) for index, kind in enumerate(geometry.layer_kinds) if kind == "attention"
    ]
    return layers + [("draft", index) for index in range(geometry.draft_layers if speculative_tokens else 0)]


# -- in this process: schedulers and engines ------------------------------------------------------------------------


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
        rank_factories = ("actors.transfer.actor:build", "scripts.bench_handoff:build_shard")
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
