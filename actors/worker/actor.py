"""The worker's shell: loads the model and executes steps on one thread of its own, away from the mailbox.

Messages in: ``ExecuteBatch`` from the engine, and the results of its own jobs. Out: ``WorkerReady`` (by way of this
node's transfer actor), ``BatchResult`` and ``StepFailed`` to the engine, ``LayerReady`` to this node's transfer actor
while a step runs, ``NodeProgress`` to the supervisor while weights load.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from functools import partial
from typing import Protocol

import msgspec
import torch

from actors.runtime.config import ConfigError, NodeConfig
from actors.runtime.context import ActorSpec, Done, Emit, NodeContext
from actors.runtime.machine import Job
from actors.worker.collectives import Collective, CollectiveError, SingleRank
from actors.worker.device import Device
from actors.worker.jobs import ExecuteStep, LoadModel
from actors.worker.machine import WorkerMachine
from actors.worker.runner import ModelRunner
from actors.worker.settings import RankPlan, WorkerSettings, plan_rank
from actors.worker.shm_collectives import ShmCollective
from actors.worker.torch_collectives import TorchCollective
from messages.base import SUPERVISOR, rank_address
from messages.batch import BatchResult, BatchRow, ExecuteBatch, StepFailed
from messages.layout import Manifest, Namespace, RegionDescriptor
from messages.lifecycle import LoadFailed, ModelLoaded, NodeProgress
from messages.transfer import LayerReady
from transport.dataplane import DataPlane, DataPlaneError
from transport.shm_dataplane import run_prefix

THREAD_END_S = 5.0


class Log(Protocol):
    """Writes one line about the worker."""

    def __call__(self, level: str, event: str, **fields: str | int | float) -> None:
        """See ``NodeContext.log``."""
        ...


class RankContext(NodeContext, Protocol):
    """A rank node also has the data plane its worker, transfer and staging actors share."""

    @property
    def data_plane(self) -> DataPlane:
        """One per process."""
        ...


def build(context: RankContext) -> tuple[ActorSpec, ...]:
    """The worker of one rank node."""
    config = context.config
    machine = WorkerMachine(config.instance, config.rank, config.incarnation)
    return (ActorSpec("worker", machine, WorkerExecutor(config, context.data_plane, partial(context.log, "worker"))),)


class WorkerExecutor:
    """Runs the worker's jobs one after another on a thread of its own; a failure becomes the job's result."""

    def __init__(self, config: NodeConfig, data_plane: DataPlane, log: Log) -> None:
        self._config = config
        self._log = log
        self._data_plane = data_plane
        self._runner: ModelRunner | None = None
        self._jobs: queue.SimpleQueue[tuple[Job, Emit, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def submit(self, job: Job, emit: Emit, done: Done) -> None:
        """Queue the job; ``done`` gets its result on the worker's thread."""
        self._jobs.put((job, emit, done))

    def close(self) -> None:
        """Let the running step finish (it may wait for peers that are gone: not longer than a few seconds)."""
        self._jobs.put(None)
        self._thread.join(THREAD_END_S)

    # -- on the worker's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.set_num_threads(max(1, self._config.threads))
        broken: StepFailed | None = None  # no step runs after one that did
        while (item := self._jobs.get()) is not None:
            job, emit, done = item
            match job:
                case LoadModel():
                    done(self._load(emit))
                case ExecuteStep(batch=batch):
                    result = (
                        self._execute(batch, emit)
                        if broken is None
                        else msgspec.structs.replace(broken, step=batch.step)
                    )
                    broken = result if isinstance(result, StepFailed) else None
                    done(result)
        if self._runner is not None:
            self._runner.close()

    def _load(self, emit: Emit) -> ModelLoaded | LoadFailed:
        config = self._config
        region_id = f"{config.node}.{config.incarnation}.caches"
        try:
            plan = plan_rank(WorkerSettings.from_node(config), region_id)
            region = self._data_plane.create_region(region_id, plan.region_bytes)
            device = Device(plan.settings.device, plan.settings.rank)

            def progress(done: int, total: int) -> None:
                what = f"loading {plan.config.model_dir}"
                note = NodeProgress(node=config.node, incarnation=config.incarnation, what=what, done=done, total=total)
                emit(SUPERVISOR, note)

            collective = join_group(config, device)
            self._runner = ModelRunner(plan, self._data_plane.view(region_id), collective, device, progress)
            self._log("info", "loaded", decode=f"{self._runner.decode_path} kernels", threads=torch.get_num_threads())
        except (ConfigError, DataPlaneError) as error:
            return LoadFailed(reason=str(error), fatal=True)
        except Exception as error:  # whatever it is, the supervisor hears of it and decides
            return LoadFailed(reason=self._reason("load_failed", error))
        return ModelLoaded(manifest=manifest_of(config, plan, region))

    def _execute(self, batch: ExecuteBatch, emit: Emit) -> BatchResult | StepFailed:
        config = self._config
        transfer = rank_address(config.instance, config.rank, "transfer")

        def layer_ready(row: BatchRow, namespace: Namespace, layer: int, is_last_layer: bool) -> None:
            message = LayerReady(
                request_id=row.request_id,
                epoch=row.epoch,
                chunk_index=row.push_chunk,
                layer=layer,
                token_start=row.start,
                token_count=len(row.token_ids),
                is_last_layer=is_last_layer,
                is_last_chunk=row.ends_prefill,
                namespace=namespace,
            )
            emit(transfer, message)

        started_ns = time.perf_counter_ns()
        try:
            assert self._runner is not None
            result = self._runner.execute(batch, layer_ready)
        except Exception as error:  # the step is lost as a whole: the instance restarts
            reason = str(error)
            if not isinstance(error, CollectiveError):
                reason = self._reason("step_failed", error)
            return StepFailed(step=batch.step, incarnation=batch.incarnation, rank=config.rank, reason=reason)
        return msgspec.structs.replace(result, forward_ms=(time.perf_counter_ns() - started_ns) / 1e6)

    def _reason(self, event: str, error: Exception) -> str:
        """One line that may travel as far as a client; where it happened is for this node's log."""
        self._log("error", event, trace="".join(traceback.format_exception(error)))
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def join_group(config: NodeConfig, device: Device) -> Collective:
    """This rank's end of its TP group: shared memory between CPU ranks of a host, torch.distributed otherwise."""
    options = config.options
    if config.tp_size == 1:
        return SingleRank()
    if device.kind == "cpu":
        name = f"{run_prefix(config.run_id)}{config.instance}.{config.incarnation}.collective"
        return ShmCollective(
            name,
            rank=config.rank,
            size=config.tp_size,
            timeout_ms=options.collective_timeout_ms,
            join_timeout_ms=options.start_timeout_ms,
        )
    return TorchCollective(
        f"file://{config.run_dir}/{config.instance}.{config.incarnation}.group",
        rank=config.rank,
        size=config.tp_size,
        device=device.torch_device,
        timeout_ms=options.collective_timeout_ms,
    )


def manifest_of(config: NodeConfig, plan: RankPlan, region: RegionDescriptor) -> Manifest:
    """What this rank publishes; a decode rank's transfer actor adds its staging region."""
    options = config.options
    chunk = options.max_tokens_per_batch
    if options.enable_chunked_prefill:
        chunk = min(chunk, options.max_tokens_per_chunk_for_prefill)
    return Manifest(
        instance=config.instance,
        incarnation=config.incarnation,
        rank=config.rank,
        tp_size=config.tp_size,
        model_fingerprint=plan.config.fingerprint,
        block_size=plan.settings.block_size,
        block_count=plan.block_count,
        slot_count=plan.settings.slot_count,
        speculative_tokens=plan.settings.speculative_tokens,
        regions=(region,),
        tensors=plan.tensors,
        max_tokens_per_chunk=chunk,
        max_model_len=plan.max_model_len,
    )
