"""The documents say what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.make_docs import DOCS, regenerate

ROOT = DOCS.parent
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert regenerate(text) == text, f"{page.name} is stale: run python -m scripts.make_docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_into_the_tree_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
