"""What tracing costs: messaging and decoding without a ring, with the ring that is always on, and with a full trace.

The three modes take turns in one run, so that a busy machine is busy for all of them. A whole cluster decodes in short
turns; each mode's turn is compared with that of ``off`` next to it, in several rounds of fresh clusters. Tokens per
second (``wall``) vary with whatever else the machine does; CPU time per token of all node processes (``cpu``, from the
kernel's own account in nanoseconds) varies much less, and it is what tracing spends.

A second way to the same figure needs no comparison of noisy turns: how many records a token makes (counted in the full
trace) times what one record costs, its memory and the collector's work on it included (``account``).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from actors.runtime.config import NodeConfig, Options
from actors.runtime.trace import NoRing, RingRecorder
from actors.runtime.trace_file import FAULT, Trace
from messages.codec import decode, encode
from messages.envelope import Envelope
from messages.requests import Generation
from scripts.bench_messaging import run_actors
from scripts.paired import cost, statement
from scripts.served_rates import ServedRates

MODES: Final = ("off", "ring", "full")
PROMPT: Final = tuple(range(5, 37))
RING_COST_MAX_PERCENT: Final = 3.0
"""What the ring, which nobody can turn off by mistake, may cost decoding."""


def _options(mode: str, folder: str, options: Options) -> Options:
    match mode:
        case "off":
            return msgspec.structs.replace(options, trace_ring=0)
        case "ring":
            return options
        case _:
            return msgspec.structs.replace(options, trace_dir=str(Path(folder) / "trace"))


def measure_messaging(repeats: int, round_trips: int, one_way: int) -> dict[str, dict[str, float]]:
    """Mode → round trip in µs and one-way rate per second, medians over ``repeats`` turns."""
    figures: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode in MODES:
            with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
                options = _options(mode, folder, Options(log_level="error"))
                figures[mode].append(run_actors(round_trips, one_way, options))
    return {
        mode: {name: statistics.median(one[name] for one in runs) for name in runs[0]} for mode, runs in figures.items()
    }


@dataclass
class Turns:
    """Decode figures, one value per turn and mode, and how many records a token made in the full trace."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    cpu_us_per_token: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    records_per_token: float = 0.0


def process_cpu_ns(pids: Sequence[int]) -> int:
    """CPU time that these processes have used, all their threads together: their kernel clocks (Linux)."""
    return sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in pids)  # CPUCLOCK_SCHED, as clock_getcpuclockid(3) says


def measure_decode(turns: Turns, options: Options, repeats: int, sequences: int, output_tokens: int) -> None:
    """Add ``repeats`` turns of fresh clusters: ``sequences`` at once, ``output_tokens`` each. Each turn begins with
    another mode."""
    token_count = sequences * output_tokens
    prompts = [[(token + index) % 1000 + 1 for token in PROMPT] for index in range(sequences)]
    spans: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        with ExitStack() as stack:
            clusters = {
                mode: stack.enter_context(ServedRates(_options(mode, folder, msgspec.structs.replace(options, port=0))))
                for mode in MODES
            }
            pids = {mode: cluster.pids() for mode, cluster in clusters.items()}
            for cluster in clusters.values():
                cluster.measure(prompts, 8)
            for turn in range(repeats):
                for mode in MODES[turn % len(MODES) :] + MODES[: turn % len(MODES)]:
                    began_ns, cpu_ns = time.monotonic_ns(), process_cpu_ns(pids[mode])
                    turns.tokens_per_s[mode].append(clusters[mode].measure(prompts, output_tokens).decode)
                    cpu_us = (process_cpu_ns(pids[mode]) - cpu_ns) / 1e3
                    turns.cpu_us_per_token[mode].append(cpu_us / token_count)
                    if mode == "full":
                        spans.append((began_ns, time.monotonic_ns()))
        times = [one.now_ns for one in Trace(Path(folder) / "trace").records() if one.kind != FAULT]
    count = sum(1 for now_ns in times if any(began <= now_ns <= ended for began, ended in spans))
    turns.records_per_token = count / (repeats * token_count)


def measure_record_ns(repeats: int = 15, count: int = 4000) -> float:
    """CPU time that a full ring adds to one envelope's life: its record, and that the envelope is kept and freed later.

    Envelopes are decoded, recorded and dropped, as in a node, with a ring and without, in turns; the median difference.
    """
    config = NodeConfig(node="d0.ctl", incarnation=1, run_id="", run_dir="", options=Options(), factories=())
    frames = [encode(_envelope(number)) for number in range(count)]

    def run(record: Callable[[int, Envelope], None]) -> int:
        began_ns = time.thread_time_ns()
        for frame in frames:
            record(1, decode(frame))
        return time.thread_time_ns() - began_ns

    ring, none = RingRecorder(config).handled, NoRing(config).handled
    for _ in range(1 + config.options.trace_ring // count):
        run(ring)
    return statistics.median((run(ring) - run(none)) / count for _ in range(repeats))


def _envelope(number: int) -> Envelope:
    request_id = f"cmpl-bench.1-{number % 8}"
    return Envelope(
        message_id=f"d0.ctl#1.{number}",
        sender="d0.ctl/scheduler",
        to="front/gateway",
        sent_ns=10**12 + number,
        message=Generation(request_id=request_id, epoch=1, first_index=number, token_ids=(number % 1000,)),
        parent_id=f"d0.ctl#1.{number - 3}",
        trace_id=request_id,
        epoch=1,
        incarnation=1,
    )


def _medians(figures: dict[str, list[float]]) -> dict[str, float]:
    return {mode: round(statistics.median(values), 1) for mode, values in figures.items()}


def run(
    model: str = "demo",
    topology: str = "TP1",
    *,
    rounds: int = 3,
    repeats: int = 8,
    round_trips: int = 3000,
    one_way: int = 100_000,
    sequences: int = 4,
    output_tokens: int = 64,
) -> dict[str, Any]:
    """Both measurements. ``ring`` and ``full`` say by how many percent each is worse than ``off``: for decode see
    ``paired.cost``, for messaging the medians compared. ``account`` derives the ring's share of decode's CPU time."""
    options = Options(model=model, topology=topology, log_level="error", cache_memory_mb=64, threads_per_rank=1)
    messaging = measure_messaging(rounds, round_trips, one_way)
    turns = Turns()
    for _ in range(rounds):
        measure_decode(turns, options, repeats, sequences, output_tokens)
    record_ns = measure_record_ns()
    cpu = turns.cpu_us_per_token
    result: dict[str, Any] = {
        "messaging": messaging,
        "decode": {
            "turns": rounds * repeats,
            "tokens_per_turn": sequences * output_tokens,
            "tokens_per_s": _medians(turns.tokens_per_s),
            "cpu_us_per_token": _medians(cpu),
        },
    }
    for mode in ("ring", "full"):
        seconds = {name: [1 / rate for rate in turns.tokens_per_s[name]] for name in ("off", mode)}
        slower = messaging["off"]["one_way_per_s"] / messaging[mode]["one_way_per_s"]
        longer = messaging[mode]["round_trip_us_median"] / messaging["off"]["round_trip_us_median"]
        result[mode] = {
            "decode_cpu_percent": cost(cpu["off"], cpu[mode], rounds),
            "decode_wall_percent": cost(seconds["off"], seconds[mode], rounds),
            "one_way_percent": round(100 * (slower - 1), 2),
            "round_trip_percent": round(100 * (longer - 1), 2),
        }
    result["account"] = {
        "records_per_token": round(turns.records_per_token, 1),
        "record_ns": round(record_ns),
        "ring_percent": round(turns.records_per_token * record_ns / statistics.median(cpu["off"]) / 10, 2),
    }
    said = statement("the ring", result["ring"]["decode_cpu_percent"], RING_COST_MAX_PERCENT)
    result["statement"] = f"{said}; by its records {result['account']['ring_percent']} %"
    return result
