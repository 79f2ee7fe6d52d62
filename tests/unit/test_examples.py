"""The examples of the pages: what they show is what happens.

Every command of a `console` block is in one of the tables below, and every Python block is run by
`tests/engine/test_examples.py`: an example that nothing runs fails here.
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

import noxfile
from ppcore import cli
from tests.pages import PAGES, ROOT, Block, Command, blocks, commands, excerpts, whole_programs

CORPUS = ROOT / "tests" / "sim" / "corpus"

#: Commands that end within seconds and print the same everywhere: they have to print what is shown.
EXACT = ("ppcore plan ", "python -m ppsim predict ")

#: Command -> what is run in its place, in which less is asked for: as they stand they run for minutes.
SHORTER = {
    "python -m ppsim fuzz --minutes 1": "python -m ppsim fuzz --executions 20",
    "python -m ppsim replay TOKEN": "python -m ppsim replay TOKEN",
    "python -m ppsim draw TOKEN --out x.svg": "python -m ppsim draw TOKEN --out x.svg",
    "python -m ppsim explore": "python -m ppsim explore --only 2x8",
    "python -m ppsim mutants": "python -m ppsim mutants --only no-gate --rates 0 --jobs 1",
    "python -m ppsim determinism": "python -m ppsim determinism --seeds 2 --jobs 1",
    "python -m ppsim rate": "python -m ppsim rate --seconds 0.1 --rounds 2",
    "python -m ppsim fuzz --mode real --minutes 1": (
        "python -m ppsim fuzz --mode real --executions 1"
    ),
    "python -m fuzz --executors reference,sim,real,gloo --minutes 10": (
        "python -m fuzz --executors reference,sim --minutes 0.01"
    ),
    "python -m nox -s fuzz -- --executors all --minutes 20": (
        "python -m fuzz --executors reference,real --minutes 0.01"
    ),
}

#: Command -> a file that runs it, and the words with which. Here it would install gigabytes, or start
#: engines.
ELSEWHERE = {
    "python -m pip install nox && python -m nox -s demo": (
        "tests/engine/test_examples.py",
        '"demo", "--random"',
    ),
    "python -m pip install nox && python -m nox -s tests": (".ci/run", "-m nox -s tests"),
    'pip install uv && uv pip install --torch-backend cpu "torch==2.13.0"': (
        "noxfile.py",
        '("--torch-backend", "cpu", TORCH)',
    ),
    'pip install ".[cpu]"': ("noxfile.py", '"install", "--editable", f".[{name},dev]"'),
    "pip uninstall -y torchvision torchaudio torchcodec": (
        "noxfile.py",
        'env.pip("uninstall", "--yes", *TRAPS)',
    ),
    # With a pretended engine; on real ones it is the session itself.
    "python -m nox -s fuzz -- --executors vllm --layouts pp3,tp2pp2 --minutes 10": (
        "tests/harness/test_engine_programs.py",
        'executors.started(["vllm"], ["pp2"])',
    ),
    "python -m ppsim compile": ("tests/sim/test_compiled.py", "compiled.build(optimize=0)"),
    "ppcore doctor --ranks 2": ("tests/engine/test_examples.py", '"doctor", "--ranks", "2"'),
}

COMMANDS = commands()
SHOWN = [command for command in COMMANDS if command.words.startswith(EXACT)]


def test_every_example_is_run_by_a_test() -> None:
    words = {command.words for command in COMMANDS}
    exact = {command.words for command in SHOWN}
    assert words == exact | SHORTER.keys() | ELSEWHERE.keys()
    assert {block.kind for block in blocks()} <= {"console", "python", "text"}
    assert whole_programs() and excerpts()
    for page in PAGES:
        # A command that is set off in another way would be seen by nothing here.
        assert page.read_text().count("```") == 2 * sum(b.page == page for b in blocks()), page.name
        loose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^(?: {4}|\t)\S", loose, re.MULTILINE), page.name


@pytest.mark.parametrize("words", ELSEWHERE)
def test_what_is_run_elsewhere_is(words: str) -> None:
    file, how = ELSEWHERE[words]
    assert how in (ROOT / file).read_text(encoding="utf-8")


def test_the_install_lines_are_those_of_the_sessions() -> None:
    said = " ".join(ELSEWHERE)
    assert f'"{noxfile.TORCH.removesuffix("+cpu")}"' in said
    assert f"uninstall -y {' '.join(noxfile.TRAPS)}" in said


def run(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *rest = shlex.split(words)
    if program == "python":
        assert rest.pop(0) == "-m"
        program = rest.pop(0)
    return subprocess.run(
        [sys.executable, "-m", program, *rest],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PPSIM_COMPILED": "0"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", SHOWN, ids=lambda command: command.words)
def test_a_command_prints_what_its_page_shows(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    shutil.copytree(command.page.parent, folder, ignore=shutil.ignore_patterns(".*", "*.svg"))
    done = run(command.words, folder)
    assert done.stderr == ""
    assert done.stdout == command.shown
    for made in folder.glob("*.svg"):
        shown = command.page.parent / made.name
        assert made.read_text() == shown.read_text(), f"draw {made.name} again"


@pytest.mark.parametrize("words", SHORTER)
def test_a_command_runs(words: str, tmp_path: Path) -> None:
    from ppsim import fuzz, tokens

    if "real" in words or "gloo" in words:
        pytest.importorskip("nnsight")
    case, switches, _ = fuzz.load((CORPUS / "own-turn.case").read_text())
    shorter = SHORTER[words].replace("TOKEN", tokens.encode(case, switches))
    done = run(shorter, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    if "--out" in shorter:
        assert (tmp_path / "x.svg").read_text().startswith("<svg")


def sessions() -> set[str]:
    return {
        node.name
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any("nox.session" in ast.unparse(line) for line in node.decorator_list)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for names in re.findall(r"nox -s ((?:[a-z_]+ ?)+)", text):
        assert set(names.split()) <= sessions(), names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r'pip install "\.\[(\w+)\]"', text):
        assert extra in project["optional-dependencies"]
    for name in re.findall(r"`(?:\$ )?ppcore ([a-z]+)|^\$ ppcore ([a-z]+)", text, re.MULTILINE):
        assert "".join(name) in cli.COMMANDS
    for name in re.findall(r"(?:python -m |`)ppsim ([a-z]+)", text):
        assert run(f"ppsim {name} --help", ROOT).returncode == 0, name


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page.name)
def test_python_examples_are_python(block: Block) -> None:
    compile(block.text, str(block.page), "exec")
