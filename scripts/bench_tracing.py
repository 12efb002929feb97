"""What tracing costs: messaging and decoding without a ring, with the ring that is always on, and with a full trace.

The three modes take turns in one run, so that a busy machine is busy for all of them. Decode is the rate of a whole
cluster, as its client sees it.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from actors.runtime.config import Options
from scripts.bench_messaging import run_actors
from scripts.served_rates import ServedRates

MODES: Final = ("off", "ring", "full")
PROMPT: Final = tuple(range(5, 37))


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


def measure_decode(options: Options, repeats: int, sequences: int, output_tokens: int) -> list[dict[str, float]]:
    """Per turn: mode → tokens per second while decoding ``sequences`` at once. Each turn begins with another mode."""
    turns: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder, ExitStack() as stack:
        clusters = {
            mode: stack.enter_context(ServedRates(_options(mode, folder, msgspec.structs.replace(options, port=0))))
            for mode in MODES
        }
        prompts = [[(token + index) % 1000 + 1 for token in PROMPT] for index in range(sequences)]
        for cluster in clusters.values():
            cluster.measure(prompts, 8)
        for turn in range(repeats):
            order = MODES[turn % len(MODES) :] + MODES[: turn % len(MODES)]
            turns.append({mode: clusters[mode].measure(prompts, output_tokens).decode for mode in order})
    return turns


def run(
    model: str = "demo",
    topology: str = "TP1",
    *,
    repeats: int = 15,
    round_trips: int = 3000,
    one_way: int = 100_000,
    sequences: int = 4,
    output_tokens: int = 128,
) -> dict[str, Any]:
    """Both measurements; ``*_cost_percent`` is what ring and full cost relative to off (more is worse): for decode the
    median over the turns of each turn's own ratio, with the quartiles beside it."""
    options = Options(model=model, topology=topology, log_level="error", cache_memory_mb=64, threads_per_rank=1)
    messaging = measure_messaging(max(1, repeats // 3), round_trips, one_way)
    turns = measure_decode(options, repeats, sequences, output_tokens)
    decode = {mode: round(statistics.median(turn[mode] for turn in turns), 1) for mode in MODES}
    result: dict[str, Any] = {"messaging": messaging, "decode_tokens_per_s": decode}
    for mode in ("ring", "full"):
        costs = sorted(100 * (turn["off"] / turn[mode] - 1) for turn in turns)
        result[f"{mode}_decode_cost_percent"] = round(statistics.median(costs), 2)
        result[f"{mode}_decode_cost_quartiles"] = [round(costs[len(costs) * part // 4], 2) for part in (1, 3)]
        slower = messaging["off"]["one_way_per_s"] / messaging[mode]["one_way_per_s"]
        result[f"{mode}_one_way_cost_percent"] = round(100 * (slower - 1), 2)
        longer = messaging[mode]["round_trip_us_median"] / messaging["off"]["round_trip_us_median"]
        result[f"{mode}_round_trip_cost_percent"] = round(100 * (longer - 1), 2)
    return result
