"""What a scheduler is told at its start, and what it learns when its ranks are ready."""

from __future__ import annotations

from dataclasses import dataclass

from actors.runtime.config import NodeConfig
from actors.scheduler.planning import BatchLimits
from messages.base import control_address
from messages.cluster import InstanceRole
from messages.handoff import TransferMode
from messages.layout import Manifest


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """One instance's scheduler. Defaults are those of ``Options``; names too, units last."""

    instance: str
    incarnation: int
    role: InstanceRole
    tp_size: int = 1
    max_model_len: int = 0  # 0: what the ranks' manifests say
    max_tokens_per_batch: int = 2048
    max_seqs_per_batch: int = 32
    enable_chunked_prefill: bool = True
    max_tokens_per_chunk_for_prefill: int = 512
    enable_async_scheduling: bool = True
    waiting_requests_max: int = 1024
    mode: TransferMode = "PUSH"
    seed: int = 0
    offer_window: int = 4
    offer_attempts_max: int = 200
    offer_backoff_ms: float = 20.0
    offer_backoff_max_ms: float = 1000.0
    offer_timeout_ms: float = 5000.0  # a decode instance that answers no offer for so long is passed over
    release_resend_ms: float = 1000.0  # a release is repeated until it is confirmed
    reservation_timeout_ms: float = 120_000.0
    handoff_timeout_ms: float = 60_000.0
    heartbeat_ms: float = 500.0
    link_retry_ms: float = 1000.0
    link_attempts_max: int = 5

    @classmethod
    def from_node(cls, config: NodeConfig) -> SchedulerSettings:
        """Of the control node ``config``."""
        options = config.options
        if config.role == "":
            raise ValueError(f"node {config.node} has a scheduler but no role")
        return cls(
            instance=config.instance,
            incarnation=config.incarnation,
            role=config.role,
            tp_size=config.tp_size,
            max_model_len=options.max_model_len,
            max_tokens_per_batch=options.max_tokens_per_batch,
            max_seqs_per_batch=options.max_seqs_per_batch,
            enable_chunked_prefill=options.enable_chunked_prefill,
            max_tokens_per_chunk_for_prefill=options.max_tokens_per_chunk_for_prefill,
            enable_async_scheduling=options.enable_async_scheduling,
            waiting_requests_max=options.waiting_requests_max,
            mode=options.kv_cache_transfer_mode,
            seed=options.seed,
            offer_window=options.offer_window,
            offer_attempts_max=options.offer_attempts_max,
            offer_backoff_ms=options.offer_backoff_ms,
            offer_backoff_max_ms=options.offer_backoff_max_ms,
            reservation_timeout_ms=options.reservation_timeout_ms,
            handoff_timeout_ms=options.handoff_timeout_ms,
            heartbeat_ms=options.heartbeat_ms,
        )

    @property
    def engine(self) -> str:
        """Address of this instance's engine."""
        return control_address(self.instance, "engine")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What this instance's ranks agreed on."""

    block_size: int
    block_count: int
    slot_count: int
    speculative_tokens: int
    max_model_len: int

    @classmethod
    def of(cls, settings: SchedulerSettings, manifests: tuple[Manifest, ...]) -> Capacity:
        """From the ranks' manifests, which the engine has compared."""
        first = manifests[0]
        room = first.block_size * first.block_count
        limit = settings.max_model_len or first.max_model_len or room
        return cls(
            block_size=first.block_size,
            block_count=first.block_count,
            slot_count=first.slot_count,
            speculative_tokens=first.speculative_tokens,
            max_model_len=min(limit, first.max_model_len or limit),
        )

    def batch_limits(self, settings: SchedulerSettings) -> BatchLimits:
        """The limits of one step here."""
        return BatchLimits(
            max_tokens_per_batch=settings.max_tokens_per_batch,
            max_seqs_per_batch=settings.max_seqs_per_batch,
            max_tokens_per_chunk=(
                min(settings.max_tokens_per_chunk_for_prefill, settings.max_tokens_per_batch)
                if settings.enable_chunked_prefill
                else 0
            ),
            speculative_tokens=self.speculative_tokens,
            async_scheduling=settings.enable_async_scheduling,
        )

    def refusal(self, settings: SchedulerSettings) -> str:
        """Why this configuration cannot serve; "" when it can."""
        if settings.max_seqs_per_batch < 1 or settings.max_tokens_per_batch < 1:
            return (
                f"max_seqs_per_batch {settings.max_seqs_per_batch} and max_tokens_per_batch"
                f" {settings.max_tokens_per_batch} must both be at least 1"
            )
        if settings.enable_chunked_prefill and settings.max_tokens_per_chunk_for_prefill < 1:
            return (
                f"max_tokens_per_chunk_for_prefill is {settings.max_tokens_per_chunk_for_prefill}, at least 1 is"
                " needed; set enable_chunked_prefill to false to compute prompts whole"
            )
        if not settings.enable_chunked_prefill and self.max_model_len > settings.max_tokens_per_batch:
            return (
                f"enable_chunked_prefill is false, so a prompt of max_model_len {self.max_model_len} tokens must fit"
                f" one step, but max_tokens_per_batch is {settings.max_tokens_per_batch}: raise it, lower"
                " max_model_len or enable chunked prefill"
            )
        step_tokens = 1 + self.speculative_tokens
        if settings.role != "PREFILL" and settings.max_tokens_per_batch < step_tokens:
            return (
                f"a decode step of one request verifies {step_tokens} tokens with num_speculative_tokens"
                f" {self.speculative_tokens}, but max_tokens_per_batch is {settings.max_tokens_per_batch}: raise it or"
                " lower num_speculative_tokens"
            )
        return ""
