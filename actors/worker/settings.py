"""What one rank computes and with how much memory: resolved from options and checkpoint, nothing allocated."""

from __future__ import annotations

from dataclasses import dataclass

from actors.runtime.config import ConfigError, NodeConfig
from actors.runtime.option_ranges import SPECULATIVE_TOKENS_MAX
from actors.worker.layout import block_count_for, build_layout
from actors.worker.model.config import ModelConfig, check_tp, load_config, resolve_dtype
from messages.layout import ModelGeometry, TensorLayout


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The wishes. ``block_count`` 0: from ``cache_memory_mb``; ``max_model_len`` 0: the checkpoint's."""

    model_dir: str
    tp_size: int = 1
    rank: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    block_count: int = 0
    cache_memory_mb: int = 512
    slot_count: int = 32
    max_model_len: int = 0
    speculative_tokens: int = 0
    draft_replicated: bool = False

    @classmethod
    def from_node(cls, config: NodeConfig) -> WorkerSettings:
        """The settings of this node's rank; its option ``model`` is a directory by now."""
        options = config.options
        return cls(
            model_dir=options.model,
            tp_size=config.tp_size,
            rank=config.rank,
            dtype=options.dtype,
            device=options.device,
            block_size=options.block_size,
            block_count=options.block_count,
            cache_memory_mb=options.cache_memory_mb,
            slot_count=options.max_seqs_per_batch,
            max_model_len=options.max_model_len,
            speculative_tokens=options.speculative_tokens_of(config.role),
            draft_replicated=options.enable_mtp_draft_body_tp1,
        )


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The facts: model, dtype and where every cache tensor will lie in a region of ``region_bytes``."""

    settings: WorkerSettings
    config: ModelConfig
    geometry: ModelGeometry
    block_count: int
    max_model_len: int
    tensors: tuple[TensorLayout, ...]
    region_bytes: int

    @property
    def last_kv_layer(self) -> int:
        """Index of the last target layer that has KEY and VALUE, -1 if none has."""
        kinds = self.config.layer_kinds
        return max((index for index, kind in enumerate(kinds) if kind == "attention"), default=-1)


def plan_rank(settings: WorkerSettings, region_id: str = "") -> RankPlan:
    """Read the checkpoint's configuration and lay out the caches. Raises ``ConfigError`` for what cannot work."""
    config = load_config(settings.model_dir)
    check_tp(config, settings.tp_size)
    speculative = settings.speculative_tokens
    if not 0 <= speculative <= SPECULATIVE_TOKENS_MAX:
        raise ConfigError(
            f"num_speculative_tokens {speculative} is out of range; allowed: 0 to {SPECULATIVE_TOKENS_MAX}"
        )
    if speculative and not config.draft_layers:
        raise ConfigError(
            f"num_speculative_tokens {speculative} needs MTP weights (mtp.*), which {settings.model_dir} "
            f"does not hold; set num_speculative_tokens to 0"
        )
    limit = settings.max_model_len or config.max_model_len
    if limit > config.max_model_len:
        raise ConfigError(
            f"max_model_len {limit} is more than the {config.max_model_len} positions that {settings.model_dir} allows"
        )
    geometry = config.geometry(dtype=resolve_dtype(settings.dtype, config, settings.device), max_model_len=limit)
    block_count = settings.block_count or block_count_for(
        geometry,
        settings.tp_size,
        block_size=settings.block_size,
        slot_count=settings.slot_count,
        cache_memory_mb=settings.cache_memory_mb,
        speculative_tokens=speculative,
        draft_replicated=settings.draft_replicated,
    )
    tensors, region_bytes = build_layout(
        geometry,
        settings.tp_size,
        settings.rank,
        block_size=settings.block_size,
        block_count=block_count,
        slot_count=settings.slot_count,
        speculative_tokens=speculative,
        draft_replicated=settings.draft_replicated,
        region_id=region_id,
    )
    return RankPlan(
        settings=settings,
        config=config,
        geometry=geometry,
        block_count=block_count,
        max_model_len=limit,
        tensors=tensors,
        region_bytes=region_bytes,
    )
