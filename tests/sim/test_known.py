"""Bugs that the simulator found, as shrunk cases: none of them fails any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppsim import cases, world
from ppsim.strategies import RandomWalk

CORPUS = Path(__file__).parent / "corpus"


def fails(text: str, schedules: int = 200) -> list[str]:
    """The properties that fail in any of the first schedules of a random walk."""
    case = cases.parse(text)
    runs = (world.run(case, RandomWalk(seed)) for seed in range(schedules))
    return sorted({run.failure.name for run in runs if run.failure is not None})


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.case")), ids=lambda path: path.stem)
def test_mended(path: Path) -> None:
    assert fails(path.read_text()) == []
