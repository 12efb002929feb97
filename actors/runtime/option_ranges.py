"""Which numbers make sense for each option: what is outside is refused before anything starts."""

from __future__ import annotations

from math import inf
from typing import Final

from actors.runtime.config import ConfigError, Options

SPECULATIVE_TOKENS_MAX: Final = 8

RANGES: Final[dict[str, tuple[float, float]]] = {
    "port": (0, 65_535),
    "threads_per_rank": (0, 4096),
    "seed": (-(2**63), 2**63 - 1),
    "stream_interval": (1, inf),
    "block_size": (1, 4096),
    "block_count": (0, inf),
    "cache_memory_mb": (0, inf),
    "max_model_len": (0, inf),
    "max_tokens_per_batch": (1, inf),
    "max_seqs_per_batch": (1, 4096),
    "max_tokens_per_chunk_for_prefill": (1, inf),
    "offer_window": (1, inf),
    "offer_attempts_max": (1, inf),
    "offer_backoff_ms": (1, inf),
    "offer_backoff_max_ms": (1, inf),
    "reservation_timeout_ms": (1, inf),
    "handoff_timeout_ms": (1, inf),
    "request_attempts_max": (1, 2**31),
    "request_timeout_ms": (1, inf),
    "waiting_requests_max": (1, inf),
    "staging_mb": (0, inf),
    "staging_leases": (0, inf),
    "lease_windows": (1, inf),
    "num_speculative_tokens": (0, SPECULATIVE_TOKENS_MAX),
    "prefill_num_speculative_tokens": (-1, SPECULATIVE_TOKENS_MAX),
    "trace_ring": (0, inf),
    "heartbeat_ms": (10, inf),
    "hang_timeout_ms": (20, inf),
    "collective_timeout_ms": (1, inf),
    "start_timeout_ms": (1, inf),
    "drain_timeout_ms": (0, inf),
    "restarts_max": (0, inf),
    "restart_window_ms": (1, inf),
    "restart_backoff_ms": (0, inf),
}
"""Option → (least, most), both allowed."""

HEARTBEATS_PER_HANG_MIN: Final = 2
"""A node that may be silent for less than this many heartbeats would be restarted for nothing."""


def check_ranges(options: Options) -> None:
    """Raise ``ConfigError`` for the first option whose number makes no sense."""
    for name, (least, most) in RANGES.items():
        value = getattr(options, name)
        if not least <= value <= most:
            allowed = f"{least} to {most}" if most != inf else f"at least {least}"
            raise ConfigError(f"{flag_of(name)} {value} is out of range; allowed: {allowed}")
    for size, count in (("staging_mb", "staging_leases"), ("cache_memory_mb", "block_count")):
        if not getattr(options, size) and not getattr(options, count):
            raise ConfigError(f"{flag_of(size)} and {flag_of(count)} are both 0; set one of them to at least 1")
    least_ms = HEARTBEATS_PER_HANG_MIN * options.heartbeat_ms
    if options.hang_timeout_ms < least_ms:
        raise ConfigError(
            f"--hang-timeout-ms {options.hang_timeout_ms} is too short for --heartbeat-ms {options.heartbeat_ms}; "
            f"allowed: at least {least_ms}"
        )


def flag_of(name: str) -> str:
    """``block_size`` → ``--block-size``."""
    return "--" + name.replace("_", "-")
