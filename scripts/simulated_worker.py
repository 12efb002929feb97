"""The jobs of a simulated worker: a rank of tagged caches that meets its group in every step, as a collective does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from actors.runtime.config import NodeConfig
from actors.runtime.context import Done, Emit
from actors.runtime.machine import Job
from actors.runtime.simulated_nodes import SimulatedContext
from actors.worker.jobs import ExecuteStep, LoadModel
from actors.worker.layout import build_layout
from messages.base import rank_address
from messages.batch import BatchResult, BatchRow, ExecuteBatch, RowResult, StepFailed
from messages.layout import Manifest, Namespace
from messages.lifecycle import ModelLoaded
from messages.transfer import LayerReady
from scripts.simulated_jobs import Speed
from scripts.simulated_memory import NodeMemory
from scripts.simulated_model import GEOMETRY, TagRunner

LOAD_MS = (5.0, 30.0)


class Group:
    """The ranks of one life of an instance, as their collectives see each other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[int, tuple[int, Callable[[str], None]]] = {}  # rank → (step, go on)

    def meet(self, rank: int, step: int, go_on: Callable[[str], None]) -> None:
        """Rank ``rank`` begins ``step``; ``go_on("")`` when all are there, ``go_on(reason)`` when they disagree."""
        self._waiting[rank] = (step, go_on)
        steps = {number for number, _ in self._waiting.values()}
        if len(steps) > 1:
            self._release(f"ranks are at steps {sorted(steps)}")
        elif len(self._waiting) == self._size:
            self._release("")

    def is_waiting(self, rank: int, step: int) -> bool:
        """Whether this rank still waits for others in this step."""
        return rank in self._waiting and self._waiting[rank][0] == step

    def _release(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for rank in sorted(waiting):
            waiting[rank][1](reason)


class SimulatedWorkerExecutor:
    """Loads at once and executes steps one after another, each in a seeded time; tells of layers on the way."""

    def __init__(
        self,
        context: SimulatedContext,
        memory: NodeMemory,
        speed: Speed,
        group: Group,
        check: Callable[[str, ExecuteBatch], None] | None,
    ) -> None:
        self._context = context
        self._config: NodeConfig = context.config
        self._memory = memory
        self._speed = speed
        self._group = group
        self._check = check
        self._random = context.simulation.random
        self._jobs: deque[tuple[ExecuteBatch, Emit, Done]] = deque()
        self._busy = False
        self._layers: tuple[tuple[Namespace, int], ...] = ()
        self.runner: TagRunner | None = None

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Queue a step, or load."""
        if isinstance(job, LoadModel):
            self._context.call_later(self._speed.draw(self._random, LOAD_MS), lambda: done(self._load()))
            return
        assert isinstance(job, ExecuteStep)
        self._jobs.append((job.batch, emit, done))
        if not self._busy:
            self._next()

    def close(self) -> None:
        """Nothing outlives a node's life here."""

    def _load(self) -> ModelLoaded:
        config = self._config
        options = config.options
        region_id = f"{config.node}.{config.incarnation}.caches"
        slots = options.max_seqs_per_batch
        speculative_tokens = options.speculative_tokens_of(config.role)
        tensors, region_bytes = build_layout(
            GEOMETRY,
            config.tp_size,
            config.rank,
            block_size=options.block_size,
            block_count=options.block_count,
            slot_count=slots,
            speculative_tokens=speculative_tokens,
            draft_replicated=options.enable_mtp_draft_body_tp1,
            region_id=region_id,
        )
        region = self._memory.create_region(region_id, region_bytes)
        self.runner = TagRunner(config.node, tensors, self._memory.view(region_id))
        kv = [(t.namespace, t.layer) for t in tensors if t.role == "KEY"]
        self._layers = tuple(kv)
        manifest = Manifest(
            instance=config.instance,
            incarnation=config.incarnation,
            rank=config.rank,
            tp_size=config.tp_size,
            model_fingerprint=GEOMETRY.model_fingerprint,
            block_size=options.block_size,
            block_count=options.block_count,
            slot_count=slots,
            speculative_tokens=speculative_tokens,
            regions=(region,),
            tensors=tensors,
            max_tokens_per_chunk=min(options.max_tokens_per_batch, options.max_tokens_per_chunk_for_prefill),
            max_model_len=options.max_model_len or GEOMETRY.max_model_len,
        )
        return ModelLoaded(manifest=manifest)

    def _next(self) -> None:
        if not self._jobs:
            self._busy = False
            return
        self._busy = True
        batch, emit, done = self._jobs.popleft()
        rank = self._config.rank
        self._group.meet(rank, batch.step, lambda reason: self._go_on(reason, batch, emit, done))
        if self._group.is_waiting(rank, batch.step):
            timeout_ms = float(self._config.options.collective_timeout_ms)
            self._context.call_later(timeout_ms, lambda: self._time_out(batch, done))

    def _time_out(self, batch: ExecuteBatch, done: Done) -> None:
        if self._group.is_waiting(self._config.rank, batch.step):
            self._failed(batch, done, f"peers did not reach step {batch.step}")

    def _failed(self, batch: ExecuteBatch, done: Done, reason: str) -> None:
        done(StepFailed(step=batch.step, incarnation=batch.incarnation, rank=self._config.rank, reason=reason))

    def _go_on(self, reason: str, batch: ExecuteBatch, emit: Emit, done: Done) -> None:
        if not self._context.node.alive:
            return
        if reason:
            self._failed(batch, done, reason)
            return
        if self._check is not None:
            self._check(self._config.node, batch)
        assert self.runner is not None
        rows = self.runner.execute(batch)
        take_ms = self._speed.draw(self._random, self._speed.step_ms)
        pushing = [row for row in batch.rows if row.push_chunk >= 0]
        if pushing:
            part_ms = take_ms / (len(self._layers) + 1)
            for index in range(len(self._layers)):
                self._context.call_later(part_ms * (index + 1), lambda index=index: self._tell(pushing, index, emit))  # type: ignore[misc]
        self._context.call_later(take_ms, lambda: self._end(batch, rows, take_ms, done))

    def _tell(self, rows: list[BatchRow], index: int, emit: Emit) -> None:
        config = self._config
        namespace, layer = self._layers[index]
        transfer = rank_address(config.instance, config.rank, "transfer")
        for row in rows:
            message = LayerReady(
                request_id=row.request_id,
                epoch=row.epoch,
                chunk_index=row.push_chunk,
                layer=layer,
                token_start=row.start,
                token_count=len(row.token_ids),
                is_last_layer=index + 1 == len(self._layers),
                is_last_chunk=row.ends_prefill,
                namespace=namespace,
            )
            emit(transfer, message)

    def _end(self, batch: ExecuteBatch, rows: list[RowResult], take_ms: float, done: Done) -> None:
        if self._check is not None:
            self._check(self._config.node, batch)  # a real step writes until its end
        done(
            BatchResult(
                step=batch.step,
                incarnation=batch.incarnation,
                rank=self._config.rank,
                rows=tuple(rows),
                forward_ms=take_ms,
            )
        )
        self._next()
