"""A rank without a model, for the hand-off benchmark: caches of the right layout and size, full of noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.runtime.context import ActorSpec, NodeContext
from actors.runtime.machine import Effect, Send
from actors.worker.layout import build_layout
from messages.base import Message
from messages.layout import Manifest, ModelGeometry, Namespace, TensorLayout
from messages.lifecycle import WorkerReady
from scripts.plan import find_geometry


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
