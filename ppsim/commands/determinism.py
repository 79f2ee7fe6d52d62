"""``determinism``: the same executions in two processes that hash strings otherwise."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import fuzz
from ..compiled import WANTED, build
from ..progress import Bar
from . import Answer, Command

DIFFERENT = 5
_CHUNK = 500


def add(command: Command) -> None:
    """Name the commands."""
    twice = command("determinism", run, "run executions twice, in processes of other hash seeds")
    twice.add_argument("--seeds", type=int, default=1000, help="how many executions")
    twice.add_argument("--seed", type=int, default=0, help="the number of the first execution")
    twice.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    twice.add_argument(
        "--compiled", action="store_true", help="the second time on compiled modules"
    )
    one = command("hashes", hashes, "print the event hash of each of some executions")
    one.add_argument("--seed", type=int, default=0, help="the number of the first execution")
    one.add_argument("--executions", type=int, default=100)


def hashes(options: argparse.Namespace) -> Answer:
    """``ppsim hashes``."""
    found = []
    for number, done in fuzz.executions(options.seed, options.executions):
        found.append(f"{done.hash & (1 << 64) - 1:016x}")
        print(f"{number} {found[-1]} {done.events}")
    return 0, {"hashes": found}


def _elsewhere(first: int, count: int, hash_seed: int, compiled: bool) -> list[str]:
    """The hashes of executions in a process of its own."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "ppsim", "hashes", "--seed", str(first), "--executions", str(count)],
        env={
            **os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path,
            WANTED: str(int(compiled)),
        },
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def run(options: argparse.Namespace) -> Answer:
    """``ppsim determinism``."""
    if options.compiled:
        build()
    began = time.monotonic()
    bar = Bar(options.seeds)
    last = options.seed + options.seeds
    starts = range(options.seed, last, _CHUNK)
    different: list[str] = []
    compared = 0

    def both(first: int) -> list[tuple[str, str]]:
        count = min(_CHUNK, last - first)
        one = _elsewhere(first, count, 1, False)
        other = _elsewhere(first, count, 2, options.compiled)
        return list(zip(one, other, strict=True))

    with ThreadPoolExecutor(options.jobs) as pool:
        for pairs in pool.map(both, starts):
            compared += len(pairs)
            different += [f"{one} | {other}" for one, other in pairs if one != other]
            bar.show(compared, f"{compared} executions, {len(different)} different")
    bar.clear()
    took = time.monotonic() - began
    print(
        f"{compared} executions, {len(different)} different, {took:.0f} s",
        *different[:10],
        sep="\n",
    )
    return (DIFFERENT if different else 0), {
        "seeds": compared, "different": len(different), "seconds": round(took, 3),
    }  # fmt: skip
