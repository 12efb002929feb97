"""``kvferry trace``: questions to a recorded message trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from actors.runtime.trace_file import TraceError


class _Questions(click.Group):
    """Turns a trace that cannot answer into one line and exit status 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except TraceError as error:
            click.echo(f"kvferry trace: {error}", err=True)
            context.exit(1)


@click.group(cls=_Questions)
def trace() -> None:
    """Ask a trace written with --trace-dir: what happened, what took the time, and what hangs.

    REQUEST is a request id or the beginning of one.
    """


def _trace_dir(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--trace-dir",
        required=True,
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="The directory given to serve, demo or simulate as --trace-dir.",
    )(command)


@trace.command()
@_trace_dir
@click.argument("request")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a self-contained page instead.")
@click.option("--mermaid", is_flag=True, help="Print a Mermaid sequence diagram instead.")
@click.option("--internal", is_flag=True, help="Also messages between actors of one node, timers and job results.")
@click.option("--steps", is_flag=True, help="Also every step of a long uneventful decode.")
def sequence(trace_dir: Path, request: str, html: Path | None, mermaid: bool, internal: bool, steps: bool) -> None:
    """The messages of one request in order: who told whom what, and when."""
    from scripts.trace_commands import sequence_html, sequence_mermaid, sequence_text

    if html is not None:
        html.write_text(sequence_html(trace_dir, request), encoding="utf-8")
        click.echo(f"written: {html}")
    elif mermaid:
        click.echo(sequence_mermaid(trace_dir, request))
    else:
        click.echo(sequence_text(trace_dir, request, internal=internal, steps=steps))


@trace.command()
@_trace_dir
@click.argument("request")
def path(trace_dir: Path, request: str) -> None:
    """The critical path: which waits made up the time to the first and to the last token, in ms and percent."""
    from scripts.trace_commands import path_text

    click.echo(path_text(trace_dir, request))


@trace.command()
@_trace_dir
def stuck(trace_dir: Path) -> None:
    """Every unfinished request: where it stands, what it waits for, since when, and who should answer."""
    from scripts.trace_commands import stuck_text

    click.echo(stuck_text(trace_dir))


@trace.command()
@_trace_dir
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON file to write.")
def perfetto(trace_dir: Path, output: Path) -> None:
    """Chrome trace JSON for ui.perfetto.dev: one track per actor, arrows along causes."""
    from scripts.trace_commands import write_perfetto

    with output.open("wb") as target:
        count = write_perfetto(trace_dir, target)
    click.echo(f"written: {output} ({count} events)")


@trace.command()
@_trace_dir
@click.option("--type", "types", multiple=True, help="Message type (pattern with * and ?); may be repeated.")
@click.option("--actor", default="", help="Address of sender or receiver (pattern), for example 'd0.*'.")
@click.option("--request", default="", help="Request id (pattern).")
@click.option("--text", default="", help="Text in the message's fields.")
@click.option("--after-ms", type=float, default=None, help="Not before this time since the trace began.")
@click.option("--before-ms", type=float, default=None, help="Not after this time since the trace began.")
@click.option("--limit", default=0, help="Stop after this many lines; 0 prints all.")
def grep(trace_dir: Path, **filters: Any) -> None:
    """Messages by type, actor, request, text and time, one per line."""
    from scripts.trace_commands import grep as run

    for line in run(trace_dir, **filters):
        sys.stdout.write(line + "\n")


@trace.command()
@_trace_dir
@click.argument("address", metavar="NODE/ACTOR")
@click.option("--until", default=0, help="Stop after this many messages; 0 replays all.")
@click.option("--incarnation", default=0, help="Which life of the node; 0 takes its last.")
def replay(trace_dir: Path, address: str, until: int, incarnation: int) -> None:
    """Feed an actor's recorded inbox to a fresh machine, step by step.

    Prints each message, the state changes and effects it caused, and the first effect that is not what was recorded.
    """
    from scripts.trace_commands import replay_text

    for line in replay_text(trace_dir, address, until=until, incarnation=incarnation):
        sys.stdout.write(line + "\n")


@trace.command()
@click.option("--run-dir", default="", help="Run directory of the cluster (default: the only one running).")
def rings(run_dir: str) -> None:
    """Have every node of a running cluster write the newest messages it remembers, for the commands above."""
    from scripts.observe import find_run_dir
    from scripts.trace_rings import collect_rings

    paths = collect_rings(Path(find_run_dir(run_dir)))
    click.echo(f"{len(paths)} rings: kvferry trace stuck --trace-dir {paths[0].parent}")
