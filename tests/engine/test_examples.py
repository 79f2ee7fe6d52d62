"""The examples of the pages that need vLLM, as they stand there, on a small checkpoint.

A page's program is run as a file, with the page's excerpts below it, in the block that the guard opens.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.pages import ROOT, Block, excerpts, whole_programs

PROGRAMS = whole_programs()


def run(folder: Path, *words: str) -> str:
    """What a command of Python's writes to its standard output, run in ``folder``."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_excerpt_is_below_a_program() -> None:
    pages = [program.page for program in PROGRAMS]
    assert len(set(pages)) == len(pages)
    assert {excerpt.page for excerpt in excerpts()} <= set(pages)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.page.name)
def test_a_pages_program_runs(program: Block, checkpoint: str, tmp_path: Path) -> None:
    assert '"path-or-repo"' in program.text and program.text.count("__main__") == 1
    # The README says what `timeline=` does; its example has the values to show.
    script = program.text.replace('"path-or-repo"', f'{checkpoint!r}, timeline="out.json"')
    added = [excerpt.text for excerpt in excerpts() if excerpt.page == program.page]
    if "kept" in program.text:
        added.append("print('TOKENS', [int(token) for token in kept])\n")
    for number, text in enumerate(added):
        script += textwrap.indent(f"{text}print('RAN', {number})\n", "    ")
    (tmp_path / "example.py").write_text(script)
    said = run(tmp_path, "example.py").splitlines()
    assert [line for line in said if line.startswith("RAN ")] == [
        f"RAN {number}" for number in range(len(added))
    ]
    for line in said:
        if line.startswith("TOKENS "):
            assert len(line.removeprefix("TOKENS [").split(",")) == 8, line
    if program.page.name == "README.md":
        assert any(line.startswith("TOKENS ") for line in said)
        run(tmp_path, "-m", "ppcore", "timeline", "out.json", "--svg", "out.svg")
        assert (tmp_path / "out.svg").read_text().startswith("<svg")


def test_the_demo_runs(tmp_path: Path) -> None:
    """`nox -s demo -- --random` is this; two of its traces are enough here."""
    words = ("demo", "--random", "--traces", "write_late_to_early,same_name")
    said = run(tmp_path, "-m", "ppcore", *words)
    assert "write_late_to_early" in said and "same_name" in said


def test_the_doctor_looks_at_this_machine() -> None:
    assert "round trip" in run(ROOT, "-m", "ppcore", "doctor", "--ranks", "2")
