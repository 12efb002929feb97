"""``kvferry status`` and ``kvferry stop``: look at, and end, a cluster that runs on this host."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from actors.supervisor.units import unit_of
from messages.base import actor_of, node_of
from messages.lifecycle import StatusReport
from scripts.observe import NoAnswerError, Observer, Visitor, actors_of, find_run_dir, request_stop

EXIT_OK = 0
EXIT_FAILED = 1
ANSWER_TIMEOUT_S = 2.0

Values = Mapping[str, float | int | str]


def take_status(observer: Observer) -> dict[str, Any]:
    """The tree, with what every actor that answered says of itself under ``actors``, and its ``requests``."""
    status = observer.status()
    reports = observer.reports(actors_of(status), ANSWER_TIMEOUT_S)
    status["actors"] = {report.address: dict(report.values) for report in sorted(reports, key=lambda r: r.address)}
    status["requests"] = [row for report in reports for row in _request_rows(report)]
    return status


def _request_rows(report: StatusReport) -> list[dict[str, Any]]:
    names = ("request_id", "epoch", "state", "waits_for", "since_ns")
    return [{"actor": report.address, **dict(zip(names, row, strict=True))} for row in report.requests]


def show_status(run_dir: str = "", as_json: bool = False, watch_s: float = 0.0) -> int:
    """Print the state of a running cluster once, or again every ``watch_s`` seconds until interrupted."""
    with Visitor(find_run_dir(run_dir)) as observer:
        if as_json:
            click.echo(json.dumps(take_status(observer), indent=2))
            return EXIT_OK
        console = Console()
        if watch_s <= 0:
            console.print(render(take_status(observer)))
            return EXIT_OK
        with Live(render(take_status(observer)), console=console, auto_refresh=False, screen=True) as live:
            try:
                while True:
                    time.sleep(watch_s)
                    live.update(render(take_status(observer)), refresh=True)
            except (KeyboardInterrupt, NoAnswerError):
                return EXIT_OK


def stop_cluster(run_dir: str = "", timeout_s: float = 0.0) -> int:
    """Drain and stop a running cluster, and wait until it is gone (0: its own drain deadline and a margin)."""
    path = find_run_dir(run_dir)
    if request_stop(path, timeout_s):
        return EXIT_OK
    click.echo(f"kvferry: the cluster in {path} still runs", err=True)
    return EXIT_FAILED


def render(status: dict[str, Any]) -> RenderableType:
    """The status as three tables: instances, processes, live requests."""
    title = f"{status['topology']} {status['phase']} {status['url']}  restarts {status['restarts']}"
    instances = _table(
        title, "instance", "role", "state", "incarnation", "running", "waiting", "blocks", "slots", "leases"
    )
    for name, unit in status["units"].items():
        scheduler = status["actors"].get(f"{name}.ctl/scheduler", {})
        instances.add_row(
            name,
            str(unit["role"]),
            str(unit["state"]),
            str(unit["incarnation"]),
            str(scheduler.get("running", "")),
            str(scheduler.get("waiting", "")),
            _used(scheduler, "blocks"),
            _used(scheduler, "slots"),
            _sum_of(status["actors"], name, "staging", "leases"),
        )
    processes = _table("", "process", "pid", "MiB", "cpu %", "threads", "heard ms ago")
    for name, node in status["nodes"].items():
        processes.add_row(
            name,
            str(node["pid"]) if node["alive"] else "gone",
            f"{node['rss_bytes'] / 2**20:.0f}",
            f"{node['cpu_percent']:.0f}",
            str(node["threads"]),
            str(node["heard_ms_ago"]),
        )
    requests = _table("", "request", "epoch", "actor", "state", "waits for", "s")
    now_ns = time.monotonic_ns()
    for row in status["requests"]:
        age = f"{(now_ns - row['since_ns']) / 1e9:.1f}"
        requests.add_row(row["request_id"], str(row["epoch"]), row["actor"], row["state"], row["waits_for"], age)
    return Group(instances, processes, *([requests] if status["requests"] else []))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _used(values: Values, what: str) -> str:
    """``3/256``: used of total; empty when the scheduler did not say."""
    free, total = values.get(f"{what}_free"), values.get(f"{what}_total")
    return f"{int(total) - int(free)}/{total}" if free is not None and total is not None else ""


def _sum_of(actors: Mapping[str, Values], unit: str, actor: str, what: str) -> str:
    found = [
        int(values[what])
        for address, values in actors.items()
        if actor_of(address) == actor and unit_of(node_of(address)) == unit and what in values
    ]
    return str(sum(found)) if found else ""
