"""The examples of the pages: what they show is what happens.

A block marked `console` whose commands are ours and need no engine is run in the folder of its page,
and has to print what the block shows. Commands that install or start engines are checked for what they
name: a session, an extra, a subcommand.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ppcore import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: Commands that end within seconds and print the same everywhere.
RUN = ("ppcore plan ",)


def blocks(kind: str) -> list[tuple[Path, str]]:
    """(page, text) of the blocks of a kind."""
    return [
        (page, text)
        for page in PAGES
        for found, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if found == kind
    ]


def commands(text: str) -> list[tuple[str, str]]:
    """(command, what is shown below it) of a console block."""
    parts = re.split(r"^\$ (.*)$", text, flags=re.MULTILINE)[1:]
    return [
        (command.partition(" #")[0].strip(), shown.removeprefix("\n"))
        for command, shown in zip(parts[::2], parts[1::2], strict=True)
    ]


SHOWN = [(page, *example) for page, text in blocks("console") for example in commands(text)]
RUNNABLE = [example for example in SHOWN if example[1].startswith(RUN)]


def test_there_are_examples() -> None:
    assert len(SHOWN) > len(RUNNABLE) >= 2
    assert blocks("python")


@pytest.mark.parametrize(("page", "command", "shown"), RUNNABLE, ids=[e[1] for e in RUNNABLE])
def test_a_command_prints_what_its_page_shows(
    page: Path, command: str, shown: str, tmp_path: Path
) -> None:
    folder = tmp_path / "page"
    shutil.copytree(page.parent, folder, ignore=shutil.ignore_patterns(".*", "*.svg"))
    program, *words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout == shown
    for made in folder.glob("*.svg"):
        assert made.read_text() == (page.parent / made.name).read_text(), f"draw {made.name} again"


def sessions() -> set[str]:
    return {
        node.name
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any("nox.session" in ast.unparse(line) for line in node.decorator_list)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_run_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for names in re.findall(r"nox -s ((?:[a-z_]+ ?)+)", text):
        assert set(names.split()) <= sessions(), names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r'pip install "\.\[(\w+)\]"', text):
        assert extra in project["optional-dependencies"]
    for name in re.findall(r"`(?:\$ )?ppcore ([a-z]+)|^\$ ppcore ([a-z]+)", text, re.MULTILINE):
        assert "".join(name) in cli.COMMANDS
    for name in re.findall(r"python -m ppsim ([a-z]+)", text):
        helped = [sys.executable, "-m", "ppsim", name, "--help"]
        assert subprocess.run(helped, cwd=ROOT, capture_output=True).returncode == 0, name


@pytest.mark.parametrize(("page", "text"), blocks("python"), ids=lambda item: str(item)[-20:])
def test_python_examples_are_python(page: Path, text: str) -> None:
    compile(text, str(page), "exec")
