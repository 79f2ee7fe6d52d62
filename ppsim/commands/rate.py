"""``rate``: how fast the simulator is, alone and beside others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .. import cases, compiled, world
from ..cases import Case
from ..strategies import RandomWalk
from . import Answer, Command
from .against import HOSTS, hosted, measure


def add(command: Command) -> None:
    """Name the command."""
    speed = command("rate", run, "how fast the simulator is")
    speed.add_argument("--stages", type=int, default=4)
    speed.add_argument("--rounds", type=int, default=4)
    speed.add_argument("--seconds", type=float, default=5.0)
    speed.add_argument(
        "--against",
        default=",".join(HOSTS),
        help="other simulators to run the same protocol on; those not installed are skipped",
    )


def run(options: argparse.Namespace) -> Answer:
    """``ppsim rate``."""
    case = rate_case(options.stages, options.rounds)

    def own(seed: int) -> int:
        done = world.run(case, RandomWalk(seed))
        if done.failure is not None:
            raise done.failure
        return done.events

    runs: dict[str, Callable[[int], int]] = {"ppsim": own}
    skipped: dict[str, str] = {}
    for name in filter(None, options.against.split(",")):
        found = hosted(case, name)
        if isinstance(found, str):
            skipped[name] = found
            print(f"skipped: {found}")
        else:
            runs[name] = found
    rates = measure(runs, options.seconds)
    mine = rates["ppsim"][0]
    how = "compiled" if compiled.active() else "not compiled"
    against: dict[str, Any] = {}
    for name, (events, executions) in rates.items():
        beside = "" if name == "ppsim" else f", ppsim is {mine / events:.1f} times as fast"
        print(
            f"{name}: {events:,.0f} events/s, {executions:,.0f} executions/s (one core, {how}){beside}"
        )
        if name != "ppsim":
            against[name] = {"events_per_s": round(events), "ratio": round(mine / events, 2)}
    return 0, {
        "events_per_s": round(mine), "executions_per_s": round(rates["ppsim"][1], 1),
        "stages": options.stages, "rounds": options.rounds, "compiled": compiled.active(),
        "against": against, "skipped": skipped,
    }  # fmt: skip


def rate_case(stages: int, rounds: int) -> Case:
    """What ``rate`` runs: a loop that reads on every stage, edits, forces and keeps."""
    last = stages - 1
    return cases.parse(
        f"stages {stages} columns 1 layers 1 shared 0 batching 0\n"
        f"request A tokens {rounds}\n"
        "  for :\n    a = read L0.out\n    edit a 3\n"
        f"    b = read L{last}.out\n    c = mix a b\n    append out c\n"
        "    if c\n      d = read logits\n"
        f"request B tokens {rounds}\n"
        f"  for :\n    a = read L{last}.in\n    b = derive a 2\n    save x b\n"
    )
