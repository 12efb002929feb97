"""``kvferry serve``: start the tree, say once where it listens, and stop it cleanly when asked."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from actors.runtime.config import ConfigError, Options
from actors.supervisor.units import Kind
from scripts.cluster import Cluster, Event
from scripts.start_display import StartDisplay

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


def serve(options: Options, factories: dict[Kind, tuple[str, ...]] | None = None) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP, which drain first (twice: stop at once). Returns the exit status.

    stdout gets exactly one line, when the cluster is ready: its URL and topology. Everything else goes to stderr.
    """
    display = StartDisplay()
    try:
        cluster = Cluster(options, factories=factories, display=display)
    except ConfigError as error:
        display.close()
        click.echo(f"kvferry: {error}", err=True)
        return EXIT_CONFIG

    def on_signal(number: int, frame: FrameType | None) -> None:
        cluster.events.put(Event("signal", signal.Signals(number).name))

    hears_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup asked for the opposite
    numbers = STOP_SIGNALS if hears_hangup else STOP_SIGNALS[:2]
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        cluster.begin()
        return _follow(cluster, display)
    except ConfigError as error:
        click.echo(f"kvferry: {error}", err=True)
        return EXIT_CONFIG
    finally:
        cluster.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _follow(cluster: Cluster, display: StartDisplay) -> int:
    while True:
        event = cluster.events.get()
        if event.kind == "signal":
            cluster.request_stop(event.text)
        elif event.kind == "ready":
            display.close()
            click.echo(f"kvferry ready: {event.text} topology {cluster.topology.describe()}")
            sys.stdout.flush()
        elif event.kind == "ended":
            if event.failed:
                click.echo(f"kvferry: {event.text}", err=True)
            return EXIT_FAILED if event.failed else EXIT_OK
