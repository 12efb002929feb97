"""Fills the generated parts of ``docs/``: what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

``python -m scripts.make_docs`` rewrites them; ``--check`` only says whether they are current (a test runs that).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.config import Options
from actors.scheduler import transitions as scheduler
from actors.transfer import push, receive, staging_machine
from scripts.options import HELP

DOCS = Path(__file__).resolve().parent.parent / "docs"


def options_table() -> str:
    """Every option, its default and its sentence, as a Markdown table."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    for field in msgspec.structs.fields(Options):
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        shown = f"`{default}`" if default else ""
        rows.append(f"| `--{field.name.replace('_', '-')}` | {shown} | {HELP[field.name]} |")
    return "\n".join(rows)


COMMON_SOURCES_MIN = 6
"""An event that leads from this many states to the same one is a note, not that many arrows."""


def state_diagram(table: Mapping[Any, Enum]) -> str:
    """A machine's table, (state, event) → state, as a Mermaid diagram; events between two states share an arrow."""
    sources = Counter((event, after) for (_, event), after in table.items())
    common = [pair for pair, count in sources.items() if count >= COMMON_SOURCES_MIN]
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in table.items():
        if (event, after) not in common:
            arrows.setdefault((state.name, after.name), []).append(str(event.value))
    states = {state.name: state.value for (before, _), after in table.items() for state in (before, after)}
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f'    state "{value}" as {name}' for name, value in sorted(states.items())]
    lines += [f"    [*] --> {next(iter(table))[0].name}"]
    lines += [f"    {before} --> {after}: {' / '.join(events)}" for (before, after), events in arrows.items()]
    lines += [f"    note right of {after.name}: from any state: {event.value}" for event, after in common]
    return "\n".join([*lines, "```"])


PARTS: dict[str, Callable[[], str]] = {
    "options": options_table,
    "prefill_states": partial(state_diagram, scheduler.PREFILL),
    "decode_states": partial(state_diagram, scheduler.DECODE),
    "push_states": partial(state_diagram, push.TRANSITIONS.rows),
    "receive_states": partial(state_diagram, receive.TRANSITIONS.rows),
    "lease_states": partial(state_diagram, staging_machine.TRANSITIONS.rows),
}
"""Name of a generated part → what makes it."""


def regenerate(text: str) -> str:
    """``text`` with every generated part made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- begin {name} -->\n{PARTS[name]()}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", fill, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Rewrite (or with ``--check`` only compare) every Markdown file under ``docs/``."""
    stale = []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        fresh = regenerate(text)
        if fresh != text:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(fresh, encoding="utf-8")
    if stale:
        print(f"{'stale' if '--check' in arguments else 'rewritten'}: {', '.join(stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
