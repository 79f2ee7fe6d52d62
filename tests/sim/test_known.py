"""Bugs that the simulator found, as shrunk cases: none of them fails any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppsim import fuzz
from ppsim.strategies import RandomWalk, Switches

CORPUS = Path(__file__).parent / "corpus"


def fails(text: str, schedules: int = 200) -> list[str]:
    """The properties that fail under the saved schedule, or in any of the first random walks."""
    case, switches, _ = fuzz.load(text)
    hows = [Switches(switches), *map(RandomWalk, range(schedules))]
    runs = (fuzz.execute(case, how) for how in hows)
    return sorted({run.failure.name for run in runs if run.failure is not None})


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.case")), ids=lambda path: path.stem)
def test_mended(path: Path) -> None:
    assert fails(path.read_text()) == []
