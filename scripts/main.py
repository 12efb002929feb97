"""The ``kvferry`` command line. Every command imports what it needs when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from actors.runtime.config import CommandFailed, ConfigError, Options
from actors.runtime.option_ranges import SPECULATIVE_TOKENS_MAX
from scripts.options import cluster_options
from scripts.trace import trace

CONFIGURATION_REFUSED = 2


class _Commands(click.Group):
    """Turns what went wrong into one line, for every command below it: exit status 2 for a refused configuration, 1 for
    a failure or a file that cannot be read or written."""

    def invoke(self, context: click.Context) -> Any:
        heard = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a command made is removed then, too
        try:
            return super().invoke(context)
        except ConfigError as error:
            click.echo(f"kvferry: refused: {error}", err=True)
            context.exit(CONFIGURATION_REFUSED)
        except CommandFailed as error:
            click.echo(f"kvferry: {error}", err=True)
            context.exit(1)
        except OSError as error:
            if error.filename is None:  # not about a path that a person gave
                raise
            click.echo(f"kvferry: {error.filename}: {error.strerror}", err=True)
            context.exit(1)
        finally:
            signal.signal(signal.SIGTERM, heard)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kvferry", prog_name="kvferry")
def main() -> None:
    """Serve Qwen3.5-class models with prefill and decode on rank processes of different tensor-parallel sizes.

    \b
    kvferry demo                                 see a hand-off from TP2 to TP1
    kvferry serve --model DIR --topology P2/D1   an OpenAI-compatible server
    kvferry plan --from TP2 --to TP1             who would send which slice to whom
    """


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value))


@main.command()
@cluster_options({"block_size": 16, "max_tokens_per_chunk_for_prefill": 64})
@click.option("--max-tokens", default=48, show_default=True, help="Tokens to generate per completion.")
def demo(options: Options, max_tokens: int) -> None:
    """The story of a hand-off: four streamed completions, where their time and bytes went, and the proof.

    Exits non-zero unless tokens equal an undisaggregated TP1 run and restored caches are bit-identical to their source.
    """
    from scripts.demo import run

    sys.exit(run(options, max_tokens))


@main.command()
@cluster_options()
def serve(options: Options) -> None:
    """Start the whole tree and serve the OpenAI API until SIGINT or SIGTERM, which drain first.

    \b
    kvferry serve --topology P2/D1 --port 8000
    curl localhost:8000/v1/completions -d '{"model": "demo", "prompt": "def add(a, b):", "max_tokens": 32}' \\
         -H 'content-type: application/json'
    """
    from scripts.serve import serve as run

    sys.exit(run(options))


@main.command()
@click.option("--run-dir", default="", help="Run directory of the cluster (default: the only one running).")
@click.option("--watch", default=0.0, metavar="SECONDS", help="Show again every so many seconds until interrupted.")
@click.option("--json", "as_json", is_flag=True)
def status(run_dir: str, watch: float, as_json: bool) -> None:
    """Nodes, roles, incarnations, requests, blocks, slots, leases and memory of a running cluster."""
    from scripts.status import show_status

    sys.exit(show_status(run_dir, as_json, watch))


@main.command()
@click.option("--run-dir", default="", help="Run directory of the cluster (default: the only one running).")
@click.option(
    "--timeout", default=0.0, metavar="SECONDS", help="Give up waiting after this long; 0 takes its options'."
)
def stop(run_dir: str, timeout: float) -> None:
    """Drain and stop a running cluster, and wait until nothing of it is left."""
    from scripts.status import stop_cluster

    sys.exit(stop_cluster(run_dir, timeout))


@main.command()
@cluster_options({"port": 0})
@click.option("--prompt", "prompts", multiple=True, help="A prompt; may be given several times.")
@click.option("--prompt-token-ids", multiple=True, help="A prompt as a JSON list of token ids.")
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with 'prompt' or 'prompt_token_ids' and optionally 'max_tokens'.",
)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True)
@click.option("--request-seed", type=int, default=None, help="Seed of every request (default: one each from --seed).")
@click.option("--ignore-eos", is_flag=True, help="Run to --max-tokens.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per request on stdout: prompts, token ids, the file."
)
def generate(
    options: Options,
    prompts: tuple[str, ...],
    prompt_token_ids: tuple[str, ...],
    prompts_file: Path | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    request_seed: int | None,
    ignore_eos: bool,
    as_json: bool,
) -> None:
    """Run prompts offline on a fresh cluster. Everything but the results goes to stderr."""
    from scripts.generate import generate as run
    from scripts.generate import parse_token_ids, read_prompts_file

    requests: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    requests += [{"prompt_token_ids": parse_token_ids(text)} for text in prompt_token_ids]
    if prompts_file is not None:
        requests += read_prompts_file(prompts_file)
    if not requests:
        raise ConfigError("nothing to generate: give --prompt, --prompt-token-ids or --prompts-file")
    defaults: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "ignore_eos": ignore_eos,
    }
    if request_seed is not None:
        defaults["seed"] = request_seed
    failed = False
    for result in run(options, requests, defaults):
        failed |= "error" in result
        if as_json:
            _print_json(result)
        elif "error" in result:
            click.echo(f"[{result['index']}] {result['error']['message']}", err=True)
        else:
            click.echo(result["text"])
    sys.exit(1 if failed else 0)


@main.command()
@click.option("--model", default="demo", show_default=True, help="Hugging Face directory, or 'demo'.")
@click.option("--from", "source", required=True, metavar="TPn", help="Tensor-parallel size of the prefill instance.")
@click.option("--to", "target", required=True, metavar="TPn", help="Tensor-parallel size of the decode instance.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Prompt length of the per-request figures.",
)
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--num-speculative-tokens", type=click.IntRange(0, SPECULATIVE_TOKENS_MAX), default=0, show_default=True)
@click.option("--enable-mtp-draft-body-tp1", is_flag=True)
@click.option("--json", "as_json", is_flag=True)
def plan(as_json: bool, **values: Any) -> None:
    """The transfer plan between two tensor-parallel sizes: who sends which slice of which cache to whom."""
    from scripts.plan import describe, render

    description = describe(**values)
    if as_json:
        _print_json(description)
    else:
        click.echo(render(description))


@main.group(cls=_Commands)
def bench() -> None:
    """Benchmarks. Each reports a ratio to something measured in the same run."""


@bench.command("handoff")
@click.option(
    "--geometry", default="qwen3.5-2b", show_default=True, help="A known model's, or a checkpoint directory's."
)
@click.option("--topology", default="P2/D1", show_default=True)
@click.option("--prompt-tokens", default=18592, show_default=True)
@click.option("--kv-cache-transfer-mode", type=click.Choice(["PUSH", "PULL"]), default="PUSH", show_default=True)
@click.option("--data-plane", type=click.Choice(["shm", "tcp"]), default="shm", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def bench_handoff(as_json: bool, **values: Any) -> None:
    """Move caches of real size between real rank processes, without a model; next to memcpy of the same bytes."""
    from scripts.bench_handoff import run

    _report(run(**values), as_json)


@bench.command("messaging")
@click.option("--json", "as_json", is_flag=True)
def bench_messaging(as_json: bool) -> None:
    """Actor-to-actor round trip and one-way rate across processes, next to bare pyzmq in the same run."""
    from scripts.bench_messaging import run

    _report(run(), as_json)


@bench.command("generate")
@click.option("--model", default="demo", show_default=True)
@click.option("--topology", default="TP1", show_default=True)
@click.option("--against", type=click.Choice(["transformers", "none"]), default="transformers", show_default=True)
@click.option("--prompt-tokens", default=512, show_default=True)
@click.option("--output-tokens", default=64, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--in-process", is_flag=True, help="The model runner alone, without actors and HTTP (TP1 only).")
@click.option("--stream-interval", default=16, show_default=True, help="Tokens that come to the client together.")
@click.option("--json", "as_json", is_flag=True)
def bench_generate(as_json: bool, **values: Any) -> None:
    """Prefill and decode tokens/s, alone and with 8 sequences, next to transformers on the same threads."""
    from scripts.bench_generate import run

    _report(run(**values), as_json)


@bench.command("speculation")
@click.option("--model", default="demo", show_default=True)
@click.option("--depths", default="0,1,3,5", show_default=True, help="Draft depths to measure, separated by commas.")
@click.option("--prompt-tokens", default=128, show_default=True)
@click.option("--output-tokens", default=64, show_default=True)
@click.option("--sequences", default=8, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def bench_speculation(as_json: bool, depths: str, **values: Any) -> None:
    """Decode tokens/s and accepted length at several draft depths, and the cost of a verify pass in plain steps."""
    from scripts.bench_speculation import run

    try:
        wanted = [int(depth) for depth in depths.split(",")]
    except ValueError as error:
        raise ConfigError(f"--depths {depths!r}: expected numbers separated by commas, as in 0,1,3") from error
    _report(run(depths=wanted, **values), as_json)


@bench.command("tracing")
@click.option("--model", default="demo", show_default=True)
@click.option("--topology", default="TP1", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def bench_tracing(as_json: bool, **values: Any) -> None:
    """What the ring that is always on, and a full trace, cost messaging and decoding."""
    from scripts.bench_tracing import run

    _report(run(**values), as_json)


@bench.command("accuracy")
@cluster_options({"port": 0})
@click.option("--against", default="TP1", show_default=True, help="Topology of the reference run.")
@click.option("--prompt-count", default=600, show_default=True)
@click.option("--max-tokens", default=25, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def bench_accuracy(options: Options, against: str, prompt_count: int, max_tokens: int, as_json: bool) -> None:
    """Run a prompt set on two topologies: equal outputs, first differences, and perplexity of both."""
    from scripts.bench_accuracy import run
    from scripts.demo_prompts import accuracy_prompts, perplexity_text

    result = run(options, against, accuracy_prompts(prompt_count), max_tokens, perplexity_text())
    _report(result, as_json)
    sys.exit(0 if result["equal_by_tie_rule"] == result["prompts"] else 1)


main.add_command(trace)


@main.command()
@click.option("--seed", default=0, show_default=True, help="First seed.")
@click.option(
    "--seeds", "seed_count", type=click.IntRange(min=1), default=1, show_default=True, help="How many seeds to run."
)
@click.option(
    "--requests", "request_count", type=click.IntRange(min=1), default=20, show_default=True, help="Requests per seed."
)
@click.option("--faults", default="all", show_default=True, help="all, none, or kinds separated by commas.")
@click.option("--topology", default="", help="Fixed topology (default: drawn from the seed).")
@click.option("--time-limit", "time_limit_s", default=0.0, metavar="SECONDS", help="Begin no seed after this long.")
@click.option(
    "--trace-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("kvferry-simulation"),
    show_default=True,
    help="Where the trace of a run that broke an invariant goes.",
)
def simulate(
    seed: int,
    seed_count: int,
    request_count: int,
    faults: str,
    topology: str,
    time_limit_s: float,
    trace_dir: Path,
) -> None:
    """A whole cluster with faults in one thread and virtual time; invariants I1 to I7 are checked at every step.

    The same seed gives the same run. A failure prints the command that repeats it and leaves a trace.
    """
    from scripts.simulate import explain
    from scripts.simulate import simulate as run_seeds

    seeds = range(seed, seed + seed_count)
    summary = run_seeds(seeds, request_count, faults, topology=topology, time_limit_s=time_limit_s)
    click.echo(summary.text)
    for line in explain(summary, request_count, faults, topology=topology, trace_dir=trace_dir):
        click.echo(line)
    sys.exit(1 if summary.failures else 0)


def _report(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(result)
    else:
        _print_table(result)


def _print_table(result: dict[str, Any], indent: str = "") -> None:
    """One value per line; a table within it, or a list of tables, is indented below its name."""
    for name, value in result.items():
        rows = value if isinstance(value, list) else [value]
        if rows and all(isinstance(row, dict) for row in rows):
            click.echo(f"{indent}{name}")
            for row in rows:
                _print_table(row, indent + "  ")
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            click.echo(f"{indent}{name:{32 - len(indent)}} {shown}")


if __name__ == "__main__":
    main()
