"""One line per event for people, on stderr: ``HH:MM:SS.mmm level node/actor event key=value …``."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping

LEVELS = ("debug", "info", "warning", "error")

Field = str | int | float
WriteLine = Callable[[str], None]


def write_to_stderr(line: str) -> None:
    """One line in one write, so that lines of several writers do not mix. Never raises."""
    with contextlib.suppress(OSError):  # nobody reads stderr any more; a node does not die of that
        os.write(2, (line + "\n").encode(errors="replace"))


def format_field(value: Field) -> str:
    """A value as one word: numbers short, text quoted when it has spaces or quotes in it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if not text or any(character in text for character in ' "\n\t='):
        return json.dumps(text, ensure_ascii=False)
    return text


def format_line(now_s: float, level: str, address: str, event: str, fields: Mapping[str, Field]) -> str:
    """The line for an event at ``now_s`` seconds since the epoch (local time of day is printed)."""
    clock = time.strftime("%H:%M:%S", time.localtime(now_s))
    head = f"{clock}.{int(now_s * 1000) % 1000:03d} {level} {address} {event}"
    return " ".join([head, *(f"{key}={format_field(value)}" for key, value in fields.items())])


class Log:
    """Writes the lines of one node. Any thread."""

    def __init__(self, node: str, level: str, write_line: WriteLine = write_to_stderr) -> None:
        self._node = node
        self._write_line = write_line
        self._least = LEVELS.index(level)

    def write(self, actor: str, level: str, event: str, fields: Mapping[str, Field]) -> None:
        """Write one event, if its level is high enough. An unknown level counts as "info". Never raises."""
        rank = LEVELS.index(level) if level in LEVELS else 1
        if rank < self._least:
            return
        self._write_line(format_line(time.time(), level, f"{self._node}/{actor}", event, fields))
