"""``run``, ``replay``, ``draw`` and ``export``: one case under one schedule."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .. import cases, draw, export, fuzz, mutants, terms, tokens
from ..compiled import needs_sources
from ..strategies import RandomWalk, Replay, Switches
from ..world import Strategy, World
from . import Answer, Command


def add(command: Command) -> None:
    """Name the commands."""
    one = command("run", run, "run one case under one schedule")
    one.add_argument("--seed", type=int, default=0, help="the number of the execution")
    one.add_argument("--case", type=Path, help="a file; without it the seed's case is run")
    one.add_argument("--mutant", help="plant this bug")
    again = command("replay", replay, "run a failure again")
    picture = command("draw", draw_run, "draw a run as a space-time diagram (SVG)")
    picture.add_argument("--out", type=Path, default=Path("run.svg"))
    trace = command("export", export_run, "write a run as a Chrome trace (JSON)")
    trace.add_argument("--out", type=Path, default=Path("run.json"))
    for parser in (again, picture, trace):
        parser.add_argument("what", help="a saved case, or a token")
        parser.add_argument("--mutant", help="plant this bug")
    for parser in (one, again, picture, trace):
        parser.add_argument("--mode", choices=fuzz.MODES, default="core", help="what is run")


Found = TypeVar("Found")


def planting(name: str | None, act: Callable[[], Found]) -> Found:
    """``act``, with this bug planted if there is one."""
    if name is None:
        return act()
    needs_sources("planting a bug")
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
    seed = options.seed
    case = cases.parse(options.case.read_text()) if options.case else fuzz.case_of(seed)
    print(cases.spell(case))

    def act() -> World:
        how = RandomWalk(seed) if options.case else fuzz.strategy_of(seed)
        return fuzz.execute(case, how, record=True)

    with terms.recording(), fuzz.in_mode(options.mode):
        return told(planting(options.mutant, act))


def _again(options: argparse.Namespace) -> World:
    """Run a case file or a token again; says where a file's schedule does not fit any more."""
    path = Path(options.what)
    if path.is_file():
        case, switches, schedule = fuzz.load(path.read_text())
    else:
        case, switches = tokens.decode(options.what)
        schedule = ()

    def act(how: Strategy) -> World:
        with terms.recording(), fuzz.in_mode(options.mode):
            return planting(options.mutant, lambda: fuzz.execute(case, how, record=True))

    if not schedule:
        print(cases.spell(case))
        return act(Switches(switches))
    how = Replay(schedule)
    done = act(how)
    if how.divergence is not None:
        print(f"{how.divergence}; by its switches instead")
        done = act(Switches(switches))
    return done


def replay(options: argparse.Namespace) -> Answer:
    """``ppsim replay``."""
    return told(_again(options))


def draw_run(options: argparse.Namespace) -> Answer:
    """``ppsim draw``."""
    done = _again(options)
    options.out.write_text(draw.svg(done))
    print(f"wrote {options.out}")
    return 0, {"file": str(options.out), "events": done.events}


def export_run(options: argparse.Namespace) -> Answer:
    """``ppsim export``."""
    done = _again(options)
    options.out.write_text(export.chrome(done))
    print(f"wrote {options.out}")
    return 0, {"file": str(options.out), "events": done.events}
