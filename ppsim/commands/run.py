"""``run``, ``replay``, ``draw`` and ``export``: one case under one schedule."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import cases, draw, export, fuzz, generate, mutants, terms
from ..cases import Case
from ..strategies import RandomWalk, Replay
from ..world import World
from . import Answer, Command


def add(command: Command) -> None:
    """Name the commands."""
    one = command("run", run, "run one case under one schedule")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--case", type=Path, help="a file; without it the seed's case is run")
    one.add_argument("--mutant", help="plant this bug")
    again = command("replay", replay, "run a saved case under its saved schedule")
    again.add_argument("file", type=Path)
    again.add_argument("--mutant", help="plant this bug")
    picture = command("draw", draw_run, "draw a saved case's run as a space-time diagram (SVG)")
    picture.add_argument("file", type=Path)
    picture.add_argument("--out", type=Path, default=Path("run.svg"))
    trace = command("export", export_run, "write a saved case's run as a Chrome trace (JSON)")
    trace.add_argument("file", type=Path)
    trace.add_argument("--out", type=Path, default=Path("run.json"))


def planting(name: str | None, act: Callable[[], Any]) -> Any:
    """``act``, with this bug planted if there is one."""
    if name is None:
        return act()
    with mutants.planted(mutants.named(name)):
        return act()


def told(done: World) -> Answer:
    """Print how a run ended."""
    failure = done.failure
    print(f"{done.events} events, hash {done.hash & (1 << 64) - 1:016x}")
    if failure is not None:
        print(failure)
    return (failure.code if failure else 0), {
        "hash": f"{done.hash & (1 << 64) - 1:016x}",
        "events": done.events,
        "failure": str(failure) if failure else None,
    }


def run(options: argparse.Namespace) -> Answer:
    """``ppsim run``."""
    case = cases.parse(options.case.read_text()) if options.case else generate.case(options.seed)
    print(cases.spell(case))
    how = RandomWalk(options.seed) if options.case else fuzz.strategy_of(options.seed)
    with terms.recording():
        done = planting(options.mutant, lambda: fuzz.execute(case, how, record=True))
    return told(done)


def load(path: Path) -> tuple[Case, list[str]]:
    """A saved case and its schedule."""
    text = path.read_text()
    schedule: list[str] = []
    for line in text.splitlines():
        if line.startswith("# schedule"):
            schedule += line.partition(": ")[2].split()
    return cases.parse(text), schedule


def _again(options: argparse.Namespace) -> tuple[World, Replay]:
    case, schedule = load(options.file)
    how = Replay(schedule)
    with terms.recording():
        name = getattr(options, "mutant", None)
        done = planting(name, lambda: fuzz.execute(case, how, record=True))
    return done, how


def replay(options: argparse.Namespace) -> Answer:
    """``ppsim replay``."""
    done, how = _again(options)
    if how.divergence is not None:
        event, name, can = how.divergence
        print(f"diverged at event {event}: {name} cannot move; {', '.join(can)} can")
    return told(done)


def draw_run(options: argparse.Namespace) -> Answer:
    """``ppsim draw``."""
    done, _ = _again(options)
    options.out.write_text(draw.svg(done))
    print(f"wrote {options.out}")
    return 0, {"file": str(options.out), "events": done.events}


def export_run(options: argparse.Namespace) -> Answer:
    """``ppsim export``."""
    done, _ = _again(options)
    options.out.write_text(export.chrome(done))
    print(f"wrote {options.out}")
    return 0, {"file": str(options.out), "events": done.events}
