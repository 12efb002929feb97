"""Fills the generated parts of ``docs/``: what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

``python -m scripts.make_docs`` rewrites them; ``--check`` only says whether they are current (a test runs that).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from actors.runtime.config import Options
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


PARTS: dict[str, Callable[[], str]] = {"options": options_table}
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
