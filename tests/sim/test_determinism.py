"""A run is a function of its seed: the same hash again, in another process, and in a replay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ppsim import cases, fuzz, generate, world
from ppsim.strategies import RandomWalk, Replay

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(300)
CODE = (
    "from ppsim import fuzz, generate\n"
    f"print(*[fuzz.execute(generate.case(s), fuzz.strategy_of(s)).hash for s in range({len(SEEDS)})])"
)


def test_one_seed_has_one_hash_in_any_process() -> None:
    here = [str(fuzz.execute(generate.case(s), fuzz.strategy_of(s)).hash) for s in SEEDS]
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        there = subprocess.run(
            [sys.executable, "-c", CODE],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.split() == here
    assert len(set(here)) > len(SEEDS) // 2


def test_a_replay_is_the_run() -> None:
    case = generate.case(5)
    run = world.run(case, RandomWalk(3), record=True)
    how = Replay(run.schedule)
    again = world.run(cases.parse(cases.spell(case)), how, record=True)
    assert (again.hash, again.events, again.notes) == (run.hash, run.events, run.notes)
    assert how.divergence is None


def test_a_divergence_names_the_first_event_that_differs() -> None:
    case = generate.case(5)
    run = world.run(case, RandomWalk(3), record=True)
    how = Replay([*run.schedule[:4], "f9.9", *run.schedule[4:]])
    world.run(case, how)
    assert how.divergence is not None
    event, name, can = how.divergence
    assert (event, name) == (4, "f9.9") and run.schedule[4] in can
