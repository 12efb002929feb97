"""What a person may configure, and what one node is told at its start. Data only; checked when it is built.

Option names follow the systems this project learns from (``kv_cache_transfer_mode``, ``max_tokens_per_batch``, …); on
the command line they are spelled with dashes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DEFAULT_MODEL = "demo"


class ConfigError(ValueError):
    """A configuration that cannot work; its text says the value seen, the value allowed and the option to change."""


class CommandFailed(RuntimeError):
    """What a person asked for did not come about; the text says why. No traceback would tell them more."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a person may set for a cluster. Field names are the option names."""

    model: str = DEFAULT_MODEL
    topology: str = "P2/D1"
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    threads_per_rank: int = 0  # 0: the host's cores shared evenly among the ranks
    seed: int = 0
    stream_interval: int = 1  # tokens per event of a stream, after its first

    # scheduling
    block_size: int = 16
    block_count: int = 0  # 0: from cache_memory_mb
    cache_memory_mb: int = 512  # per rank, when block_count is 0
    max_model_len: int = 0  # 0: from the checkpoint
    max_tokens_per_batch: int = 2048
    max_seqs_per_batch: int = 32  # also the number of state slots per rank
    enable_chunked_prefill: bool = True
    enable_async_scheduling: bool = True
    max_tokens_per_chunk_for_prefill: int = 512
    offer_window: int = 4  # requests a prefill instance offers ahead of its queue's head
    offer_attempts_max: int = 200
    offer_backoff_ms: float = 20.0
    offer_backoff_max_ms: float = 1000.0
    reservation_timeout_ms: int = 120_000  # acceptance to FirstGeneration, on D
    handoff_timeout_ms: int = 60_000  # FirstGeneration to HandoffComplete, on P
    request_attempts_max: int = 4  # gateway attempts of one request
    request_timeout_ms: int = 600_000
    waiting_requests_max: int = 1024  # per scheduler; more are refused with 503

    # hand-off
    kv_cache_transfer_mode: Literal["PUSH", "PULL"] = "PUSH"
    enable_pd_parallel_shard_pull: bool = True
    verify_handoffs: bool = False  # read every source again and compare byte by byte before decoding
    staging_mb: int = 0  # per decode rank; 0: room for staging_leases leases
    staging_leases: int = 4
    lease_windows: int = 2
    data_plane: Literal["shm", "tcp"] = "shm"
    keys_file: str = ""  # CURVE keys and the tcp data plane's secret; "": <run_dir>/keys.json

    # speculation
    num_speculative_tokens: int = 0
    prefill_num_speculative_tokens: int = -1  # of prefill instances; -1: as num_speculative_tokens
    enable_mtp_draft_body_tp1: bool = False

    # runtime
    run_dir: str = ""  # "": a private directory under the system's temporary directory
    trace_dir: str = ""
    trace_payloads: bool = True
    trace_ring: int = 4096
    faults: str = ""  # path of a fault plan
    heartbeat_ms: int = 500
    hang_timeout_ms: int = 30_000
    collective_timeout_ms: int = 60_000
    start_timeout_ms: int = 300_000
    drain_timeout_ms: int = 10_000
    restarts_max: int = 5  # per instance and restart_window_ms
    restart_window_ms: int = 60_000
    restart_backoff_ms: float = 200.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def speculative_tokens_of(self, role: Literal["", "MIX", "PREFILL", "DECODE"]) -> int:
        """Draft depth of an instance in this role."""
        apart = role == "PREFILL" and self.prefill_num_speculative_tokens >= 0
        return self.prefill_num_speculative_tokens if apart else self.num_speculative_tokens


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is told: who it is, where the others are, and the options.

    ``factories`` names the functions ``module:function`` that build this node's actors from a ``NodeContext``.
    ``endpoints`` overrides the default ``ipc://<run_dir>/<node>.sock`` of a node (for tcp).
    """

    node: str
    incarnation: int
    run_id: str
    run_dir: str
    options: Options
    factories: tuple[str, ...]
    instance: str = ""
    role: Literal["", "MIX", "PREFILL", "DECODE"] = ""
    rank: int = 0
    tp_size: int = 1
    threads: int = 1
    incarnations: tuple[tuple[str, int], ...] = ()  # node → incarnation, of nodes known when this one started
    endpoints: tuple[tuple[str, str], ...] = ()
    parent_pid: int = 0  # the process without which this one ends; 0: the one that started it
