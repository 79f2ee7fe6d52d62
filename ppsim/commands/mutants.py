"""``mutants``: plant every bug of the catalogue and look for it."""

from __future__ import annotations

import argparse
from typing import Any

from .. import mutants
from . import Answer, Command

SURVIVORS = 7


def add(command: Command) -> None:
    """Name the command."""
    bugs = command("mutants", run, "plant every bug of the catalogue and look for it")
    bugs.add_argument("--executions", type=int, default=2000)
    bugs.add_argument("--seconds", type=float, default=10.0, help="the most for each")
    bugs.add_argument("--only", help="one mutant, by name")


def run(options: argparse.Namespace) -> Answer:
    """``ppsim mutants``."""
    survivors: list[str] = []
    chosen = [m for m in mutants.CATALOGUE if options.only in (None, m.name)]
    hunts: list[dict[str, Any]] = []
    for mutant in chosen:
        found = mutants.hunt(mutant, executions=options.executions, seconds=options.seconds)
        word = f"killed by {found.property}" if found.killed else "SURVIVES"
        print(f"{mutant.layer:8} {mutant.name:40} {word} after {found.executions}", flush=True)
        hunts.append(
            {"mutant": mutant.name, "layer": mutant.layer, "killed": found.killed,
             "executions": found.executions, "property": found.property, "seed": found.seed}
        )  # fmt: skip
        if not found.killed:
            survivors.append(mutant.name)
    killed = len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} killed")
    answer = {"killed": killed, "total": len(chosen), "survivors": survivors, "hunts": hunts}
    return (SURVIVORS if survivors else 0), answer
