"""Cluster options on the command line: one flag per field of ``Options``, an optional config file underneath."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
import msgspec

from actors.runtime.config import ConfigError, Options
from actors.runtime.option_ranges import flag_of

HELP: dict[str, str] = {
    "model": "Hugging Face directory of a Qwen3.5 dense text model, or 'demo' for the shipped one.",
    "topology": "TP2 (one mixed instance), P2/D1, P2x2/D2 (two prefill instances of TP2, one decode of TP2), …",
    "host": "Address the HTTP server listens on.",
    "port": "Port the HTTP server listens on; 0 picks a free one.",
    "served_model_name": "Name of the model in the API (default: the model directory's name).",
    "dtype": "Weights, activations and KV. 'auto': float32 on CPUs without fast bfloat16, else the checkpoint's.",
    "device": "Where ranks compute.",
    "threads_per_rank": "Compute threads per rank; 0 shares the host's cores evenly.",
    "seed": "Seeds the seeds of requests that bring none.",
    "stream_interval": "Tokens per event of a stream, after the first; more cost less per token, but come in bursts.",
    "block_size": "Tokens per KV block.",
    "block_count": "KV blocks per rank; 0 derives it from --cache-memory-mb.",
    "cache_memory_mb": "Cache memory per rank when --block-count is 0.",
    "max_model_len": "Longest prompt plus output; 0 takes the checkpoint's.",
    "max_tokens_per_batch": "Tokens one step may compute.",
    "max_seqs_per_batch": "Sequences that run at once; also the recurrent-state slots of a rank.",
    "enable_chunked_prefill": "Split long prompts into chunks that share steps with decode rows.",
    "enable_async_scheduling": "Send a plain decode step while the one before it runs: ranks never wait for it.",
    "max_tokens_per_chunk_for_prefill": "Longest prefill chunk; also sizes the staging windows.",
    "offer_window": "Requests near the head of a prefill queue that are offered to decode instances ahead of time.",
    "offer_attempts_max": "Offers of one request before it fails for want of room.",
    "offer_backoff_ms": "First wait after every decode instance refused; doubles up to --offer-backoff-max-ms.",
    "offer_backoff_max_ms": "Longest wait between two offers of one request.",
    "reservation_timeout_ms": "How long a decode instance holds a reservation without hearing of its first token.",
    "handoff_timeout_ms": "How long a prefill instance waits for a hand-off to complete before it offers elsewhere.",
    "request_attempts_max": "Times the gateway submits one request before its client gets an error.",
    "request_timeout_ms": "Longest life of a request.",
    "waiting_requests_max": "Requests that may wait in one scheduler; more are refused with 503.",
    "kv_cache_transfer_mode": "PUSH: target KV layer by layer during prefill, the rest is pulled. PULL: all of it.",
    "enable_pd_parallel_shard_pull": "Pull the shards of all source ranks at once (false: one after another).",
    "verify_handoffs": "Read every restored cache's source again and compare byte by byte before decoding (slow).",
    "staging_mb": "Staging memory per decode rank; 0 makes room for --staging-leases requests.",
    "staging_leases": "Hand-offs that can be staged at once when --staging-mb is 0.",
    "lease_windows": "Windows of one prefill chunk each per source rank and lease.",
    "data_plane": "How cache bytes move between ranks: shm within a host, tcp between hosts.",
    "keys_file": "CURVE keys for links over tcp (see docs/operations.md); made in the run directory when empty.",
    "num_speculative_tokens": "MTP draft depth, 0 to 8; 0 is off.",
    "prefill_num_speculative_tokens": "Draft depth prefill instances lay their caches out for; -1: the same.",
    "enable_mtp_draft_body_tp1": "Replicate the draft body on every rank (its lm_head stays sharded).",
    "run_dir": "Private directory for sockets and keys (default: a new one under the temporary directory).",
    "trace_dir": "Write a full message trace here (see 'kvferry trace').",
    "trace_payloads": "Keep message bodies in the trace, not only their headers.",
    "trace_ring": "Envelopes every node remembers even without --trace-dir.",
    "faults": "Fault plan to inject: a YAML or TOML file, or rules as one line; see docs/faults.md.",
    "heartbeat_ms": "Interval of node health reports and instance heartbeats.",
    "hang_timeout_ms": "A node that is silent for this long is restarted; an actor stuck in a message silences it.",
    "collective_timeout_ms": "A rank that waits this long for its peers fails the step.",
    "start_timeout_ms": "Longest time from start to ready of one node.",
    "drain_timeout_ms": "On stop: how long running requests may take to finish.",
    "restarts_max": "Restarts of one instance within --restart-window-ms before the cluster gives up.",
    "restart_window_ms": "Window of --restarts-max.",
    "restart_backoff_ms": "Wait before the first restart; doubles with each one in the window.",
    "log_level": "Least important event that is printed.",
}
"""One sentence per field of ``Options``; the command line and docs/operations.md are made from it."""


def _click_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(list(get_args(hint)))
    return {bool: click.BOOL, int: click.INT, float: click.FLOAT, str: click.STRING}[hint]


def _show_default(value: Any) -> str | bool:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value not in ("", None) else False


def load_config_file(path: Path) -> dict[str, Any]:
    """Options from a JSON or TOML file; keys are option names, with dashes or underscores."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected a table of options, found {type(values).__name__}")
    return {key.replace("-", "_"): value for key, value in values.items()}


def build_options(values: dict[str, Any]) -> Options:
    """``Options`` from plain values; raises ``ConfigError`` that names the option."""
    try:
        return msgspec.convert(values, Options)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", "`--").replace("object contains", "there is an")
        named = re.search(r"`--(\w+)`", text)
        hint = get_type_hints(Options).get(named[1]) if named else None
        allowed = f"; allowed: {', '.join(get_args(hint))}" if get_origin(hint) is Literal else ""
        raise ConfigError(f"{text}{allowed}") from error


def cluster_options(defaults: dict[str, Any] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: adds a flag per option and ``--config``; the command gets one ``options: Options`` argument.

    ``defaults`` replaces defaults for one command (they still lose to the config file and to flags).
    """
    hints = get_type_hints(Options)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(config: Path | None, **values: Any) -> Any:
            flags = {name: values.pop(name) for name in hints}
            merged = dict(defaults or {})
            if config is not None:
                merged |= load_config_file(config)
            merged |= {name: value for name, value in flags.items() if value is not None}
            try:
                options = build_options(merged)
            except ConfigError as error:  # flags have types: it is the file's
                raise ConfigError(f"--config {config}: {error}") from error
            return command(options=options, **values)

        decorated: Callable[..., Any] = with_options
        for field in reversed(msgspec.structs.fields(Options)):
            hint = hints[field.name]
            default = (defaults or {}).get(field.name, field.default)
            extra: dict[str, Any] = {"is_flag": False, "flag_value": True, "metavar": "BOOLEAN"} if hint is bool else {}
            shown = _show_default(default)
            text = HELP[field.name] + (f"  [default: {shown}]" if shown else "")
            option = click.option(
                flag_of(field.name), field.name, type=_click_type(hint), default=None, help=text, **extra
            )
            decorated = option(decorated)
        return click.option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            default=None,
            help="JSON or TOML file of options; flags win over it.",
        )(decorated)

    return decorate
