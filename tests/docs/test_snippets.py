"""Commands shown in the documents exist, and those that end by themselves are run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from scripts.main import main
from scripts.make_docs import DOCS
from scripts.options import build_options, load_config_file

PAGES = sorted([DOCS.parent / "README.md", *DOCS.glob("*.md")])
RUN_HERE = ("plan", "simulate")
"""Commands that need nothing and end by themselves; the investigation in docs/debugging.md is run as a whole."""


def commands(page: Path) -> list[list[str]]:
    """Arguments of every ``$ kvferry …`` line in the page's console blocks, continuation lines joined."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if line.startswith("$ kvferry "):
                found.append(shlex.split(line[len("$ kvferry ") :], comments=True))
    return found


ALL = [(page.name, arguments) for page in PAGES for arguments in commands(page)]


def resolve(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these arguments name, and what is left for it."""
    command: click.Command = main
    while isinstance(command, click.Group):
        context = click.Context(command)
        name, *arguments = arguments
        found = command.get_command(context, name)
        assert found is not None, f"no such command: {name}"
        command = found
    return command, arguments


def test_the_documents_show_commands() -> None:
    assert len(ALL) > 8


@pytest.mark.parametrize(("page", "arguments"), ALL, ids=lambda value: value if isinstance(value, str) else value[0])
def test_every_command_shown_has_the_options_shown(page: str, arguments: list[str]) -> None:
    command, rest = resolve(arguments)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    shown = {word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)}
    assert shown <= known, f"{page}: {sorted(shown - known)}"


@pytest.mark.parametrize("arguments", [found for _, found in ALL if found[0] in RUN_HERE], ids=lambda found: found[0])
def test_commands_that_end_by_themselves_run(arguments: list[str], tmp_path: Path) -> None:
    extra = ["--trace-dir", str(tmp_path)] if arguments[0] == "simulate" else []
    result = CliRunner().invoke(main, [*arguments, *extra], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_the_config_file_shown_is_accepted(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (DOCS / "operations.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    path = tmp_path / "cluster.toml"
    path.write_text(shown)
    options = build_options(load_config_file(path))
    assert (options.max_seqs_per_batch, options.kv_cache_transfer_mode) == (16, "PULL")


@pytest.mark.slow
def test_the_investigation_can_be_followed(tmp_path: Path) -> None:
    """docs/debugging.md from its first command to its last, on a real cluster."""
    shown = commands(DOCS / "debugging.md")
    assert [found[0] for found in shown][:2] == ["generate", "trace"]
    for arguments in shown:
        mine = [word.replace("/tmp/slow", str(tmp_path)) for word in arguments]
        mine += ["--port", "0", "--log-level", "error"] if mine[0] == "generate" else []
        result = CliRunner().invoke(main, mine, catch_exceptions=False)
        assert result.exit_code == 0, (arguments, result.output)
        if arguments[:2] == ["trace", "path"]:
            assert "arrival → last token" in result.output
        if arguments[:2] == ["trace", "sequence"]:
            assert "HandoffComplete" in result.output
        if arguments[:2] == ["trace", "replay"]:
            assert "every message sent is as recorded" in result.output
