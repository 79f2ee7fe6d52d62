"""``fuzz``: generated cases until one fails; the failure comes shrunk, with what replays it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from .. import fuzz, tokens
from ..compiled import needs_sources
from ..marks import Marks
from ..progress import Bar
from ..shrink import length, shrink
from . import Answer, Command
from .run import planting


def add(command: Command) -> None:
    """Name the command."""
    many = command("fuzz", run, "run generated cases until one fails or the time is up")
    many.add_argument("--seed", type=int, default=0, help="the number of the first execution")
    many.add_argument("--executions", type=int)
    many.add_argument("--minutes", type=float)
    many.add_argument("--mode", choices=fuzz.MODES, default="core", help="what is run")
    many.add_argument("--mutant", help="plant this bug")
    many.add_argument("--save", type=Path, help="where a shrunk failing case is written")
    many.add_argument("--marks", action="store_true", help="tell lines of the core never run")


def run(options: argparse.Namespace) -> Answer:
    """``ppsim fuzz``."""
    with fuzz.in_mode(options.mode):
        return _run(options)


def _run(options: argparse.Namespace) -> Answer:
    seconds = options.minutes * 60 if options.minutes is not None else None
    count = options.executions or (None if seconds else 2000)
    began = time.monotonic()
    bar = Bar(count or seconds)
    if options.marks:
        needs_sources("marks")
    marks = Marks() if options.marks else None

    def hunt() -> tuple[int, fuzz.Finding | None]:
        ran = 0
        for number, done in fuzz.executions(options.seed, count, seconds):
            ran += 1
            if done.failure is not None:
                found = fuzz.finding(number)
                if found is not None:
                    bar.clear()
                    print(f"execution {number} fails ({found.failure.name}); shrinking")
                    return ran, shrink(found, progress=lambda text: bar.show(0, text))
            took = time.monotonic() - began
            bar.show(ran if count else took, f"{ran} executions, {ran / took:.0f}/s")
        return ran, None

    if marks is not None:
        with marks:
            ran, found = planting(options.mutant, hunt)
    else:
        ran, found = planting(options.mutant, hunt)
    bar.clear()
    took = time.monotonic() - began
    answer: dict[str, Any] = {
        "executions": ran,
        "failures": int(found is not None),
        "seconds": round(took, 3),
    }
    print(f"{ran} executions in {took:.1f} s, {answer['failures']} failing")
    if marks is not None:
        missed = marks.missed()
        print(f"{len(missed)} lines of the core never ran", *missed, sep="\n  ")
        answer["missed"] = missed
    if found is None:
        return 0, answer
    text = fuzz.describe(found)
    print(f"\n{text}")
    mode = ""
    if options.mode == "real":
        from .. import real

        mode = " --mode real"
        print(f"{real.source(found.case)}")
    path = options.save or Path(f"ppsim-{found.failure.name}-{options.seed + ran - 1}.case")
    path.write_text(text)
    token = tokens.encode(found.case, found.switches)
    mutant = f" --mutant {options.mutant}" if options.mutant else ""
    print(f"length {length(found)}; saved as {path}; replay it with")
    print(f"  python -m ppsim replay {token}{mode}{mutant}")
    return found.failure.code, {
        **answer, "file": str(path), "failure": str(found.failure), "token": token,
        "length": length(found),
    }  # fmt: skip
