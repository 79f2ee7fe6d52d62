"""``fuzz``: generated cases until one fails."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .. import fuzz
from . import Answer, Command
from .run import planting


def add(command: Command) -> None:
    """Name the command."""
    many = command("fuzz", run, "run generated cases until one fails or the time is up")
    many.add_argument("--seed", type=int, default=0)
    many.add_argument("--executions", type=int)
    many.add_argument("--minutes", type=float)
    many.add_argument("--mutant", help="plant this bug")
    many.add_argument("--save", type=Path, help="where a shrunk failing case is written")


def run(options: argparse.Namespace) -> Answer:
    """``ppsim fuzz``."""
    seconds = options.minutes * 60 if options.minutes is not None else None
    count = options.executions or (None if seconds else 2000)
    began = time.monotonic()
    last = [began]

    def hunt() -> tuple[int, fuzz.Finding | None]:
        ran = 0
        for seed, done in fuzz.executions(options.seed, count, seconds):
            ran += 1
            if done.failure is not None:
                found = fuzz.finding(seed)
                if found is not None:
                    print(f"execution {seed} fails ({found.failure.name}); shrinking")
                    return ran, fuzz.shrink(found)
            _progress(last, f"{ran} executions, {ran / (time.monotonic() - began):.0f}/s")
        return ran, None

    ran, found = planting(options.mutant, hunt)
    took = time.monotonic() - began
    answer = {"executions": ran, "failures": int(found is not None), "seconds": round(took, 3)}
    print(f"{ran} executions in {took:.1f} s, {answer['failures']} failing")
    if found is None:
        return 0, answer
    print(fuzz.describe(found))
    path = options.save or Path(f"ppsim-{found.failure.name}-{found.seed}.case")
    path.write_text("# " + found.failure.name + "\n" + _comments(fuzz.describe(found)))
    mutant = f" --mutant {options.mutant}" if options.mutant else ""
    print(f"replay it with: python -m ppsim replay {path}{mutant}")
    return found.failure.code, {**answer, "file": str(path), "failure": str(found.failure)}


def _comments(text: str) -> str:
    """A description whose first paragraph is a comment, so that the file parses as a case."""
    failure, _, rest = text.partition("\n\nstages")
    return "".join(f"# {line}\n" for line in failure.splitlines()) + "stages" + rest


def _progress(last: list[float], text: str) -> None:
    now = time.monotonic()
    if sys.stderr.isatty() and now - last[0] > 0.2:
        last[0] = now
        print(f"\r{text}", end="", file=sys.stderr)
