"""The examples of README, CONTRIBUTING and docs/, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page; ``kind`` is the word after the fence."""

    page: Path
    kind: str
    text: str


class Command(NamedTuple):
    """A command of a `console` block, and what the page shows below it."""

    page: Path
    words: str
    shown: str


def blocks(kind: str | None = None) -> list[Block]:
    """Every block of the pages, or those of a kind."""
    return [
        Block(page, found, text)
        for page in PAGES
        for found, text in _BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind in (None, found)
    ]


def commands() -> list[Command]:
    """Every command of the pages, without the remark after it."""
    found = []
    for block in blocks("console"):
        parts = re.split(r"^\$ (.*)$", block.text, flags=re.MULTILINE)[1:]
        for command, shown in zip(parts[::2], parts[1::2], strict=True):
            words = command.partition(" #")[0].strip()
            found.append(Command(block.page, words, shown.removeprefix("\n")))
    return found


def whole_programs() -> list[Block]:
    """The Python examples that start an engine, each a file as it stands."""
    return [block for block in blocks("python") if "VLLM(" in block.text]


def excerpts() -> list[Block]:
    """The Python examples that go on from a program with its ``model``."""
    return [block for block in blocks("python") if "VLLM(" not in block.text]
