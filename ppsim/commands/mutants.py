"""``mutants``: plant every bug of the catalogue and look for it.

Interrupted (Ctrl-C), it ends with the mutants at hand and tells what it has so far.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .. import cases, fuzz, hunts, mutants, shortest, shrink, tested, tokens
from ..compiled import needs_sources
from ..progress import Bar
from ..strategies import Switches
from . import Answer, Command, rates

SURVIVORS, CUT = 7, 8


def add(command: Command) -> None:
    """Name the command."""
    bugs = command("mutants", run, "plant every bug of the catalogue and look for it")
    bugs.add_argument(
        "--executions", type=int, default=2000, help="a bug survives no fewer than these ..."
    )
    bugs.add_argument(
        "--seconds", type=float, default=10.0, help="... and no less time than this of a processor"
    )
    bugs.add_argument("--seed", type=int, default=0, help="the number of the first execution")
    bugs.add_argument("--only", action="append", help="one mutant, by name; may be repeated")
    bugs.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    bugs.add_argument(
        "--rates", type=int, default=100, help="runs of each strategy for its hit rate; 0 for none"
    )
    bugs.add_argument(
        "--real-rates", type=int, default=10, help="the same, over the real runtime, which is slow"
    )
    bugs.add_argument("--page", type=Path, help="put the table of hit rates into this page")
    bugs.add_argument(
        "--shrink", action="store_true", help="shrink what is found, and look for the shortest"
    )
    bugs.add_argument(
        "--shortest-seconds", type=float, default=20.0, help="the most for each search"
    )


def run(options: argparse.Namespace) -> Answer:
    """``ppsim mutants``."""
    needs_sources("planting bugs")
    everything = (*mutants.CATALOGUE, *tested.TESTED)
    chosen = [mutant for mutant in everything if not options.only or mutant.name in options.only]
    if not chosen:
        print(f"no mutant is named {', '.join(options.only)}")
        return 2, {}
    bar = Bar(len(chosen))
    answers: list[dict[str, Any]] = []
    for answer in _until_interrupted(_all(options, chosen)):
        bar.clear()
        answers.append(answer)
        word = f"killed by {answer['property']}" if answer["killed"] else "SURVIVES"
        print(
            f"{answer['layer']:8} {answer['mutant']:42} {word}"
            + (f" after {answer['executions']}" if answer["executions"] else "")
            + (f", shrunk to {answer['length']}" if "length" in answer else ""),
            flush=True,
        )
        bar.show(len(answers), f"{len(answers)} of {len(chosen)} mutants")
    bar.clear()
    survivors = [answer["mutant"] for answer in answers if not answer["killed"]]
    killed = len(answers) - len(survivors)
    stopped = len(answers) < len(chosen)
    print(f"{killed} of {len(answers)} killed")
    if stopped:
        print(f"interrupted: {len(chosen) - len(answers)} were not looked for")
    if survivors:
        print("survivors:", ", ".join(survivors))
    summary: dict[str, Any] = {
        "killed": killed, "total": len(answers), "survivors": survivors, "hunts": answers,
        "executions": _executions(answers), "interrupted": stopped,
    }  # fmt: skip
    if options.rates:
        summary["rates"] = rows = rates.pooled(answers)
        print(*map(rates.told, rows), sep="\n")
        if options.page is not None:
            rates.fill(options.page, rows, options.seed)
    if options.shrink:
        summary["shrinking"] = _shrinking(answers)
    return (SURVIVORS if survivors else CUT if stopped else 0), summary


def _until_interrupted(answers: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    try:
        yield from answers
    except KeyboardInterrupt:
        pass


def _interrupts_are_the_parents() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _all(options: argparse.Namespace, chosen: list[mutants.Mutant]) -> Iterator[dict[str, Any]]:
    names = [mutant.name for mutant in chosen]
    one = partial(
        _one, executions=options.executions, seconds=options.seconds, first=options.seed,
        runs={"core": options.rates, "real": options.rates and options.real_rates},
        shrinks=options.shrink, shortest_s=options.shortest_seconds,
    )  # fmt: skip
    if options.jobs == 1 or len(names) == 1:
        yield from map(one, names)
        return
    with ProcessPoolExecutor(options.jobs, initializer=_interrupts_are_the_parents) as pool:
        yield from pool.map(one, names)


def _one(
    name: str, *, executions: int, seconds: float, first: int, runs: dict[str, int],
    shrinks: bool, shortest_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Everything about one mutant."""
    mutant = mutants.named(name)
    try:
        if mutant.test:
            return {"layer": mutant.layer, "test": mutant.test, **asdict(tested.tried(mutant))}
        found = hunts.hunt(mutant, executions=executions, seconds=seconds, first=first)
    except mutants.Misplaced as error:
        # The code has changed: nothing was planted, so nothing was found. The others are looked for.
        found = hunts.Hunt(name, False, 0, 0.0, f"misplaced: {error}")
        runs = dict.fromkeys(runs, 0)
    answer: dict[str, Any] = {"layer": mutant.layer, "mode": mutant.mode, **asdict(found)}
    if count := runs[mutant.mode]:
        start = rates.cases_of(name, first, count)
        answer["rates"] = {
            how: asdict(hunts.rate(mutant, how, runs=count, first=start)) for how in fuzz.STRATEGIES
        }
    if shrinks and found.killed:
        with mutants.planted(mutant), fuzz.in_mode(mutant.mode):
            whole = fuzz.finding(found.number)
            assert whole is not None
            small = shrink.shrink(whole)
            least = shortest.shortest(small, seconds=shortest_s)
        with fuzz.in_mode(mutant.mode):
            sound = fuzz.execute(small.case, Switches(small.switches)).failure is None
        answer |= {
            "length": shrink.length(small), "token": tokens.encode(small.case, small.switches),
            "case": cases.spell(small.case), "switches": [str(s) for s in small.switches],
            "shortest": least.length, "exhausted": least.exhausted, "fails_only_with_it": sound,
        }  # fmt: skip
    return answer


def _executions(answers: list[dict[str, Any]]) -> dict[str, float]:
    """How many executions it takes to find what is found."""
    counts = sorted(answer["executions"] for answer in answers if answer["number"] >= 0)
    if not counts:
        return {}
    found = {
        "median": statistics.median(counts), "p90": counts[math.ceil(0.9 * len(counts)) - 1],
        "max": counts[-1],
    }  # fmt: skip
    print(
        f"found after {found['median']:.0f} executions in the median, after at most {found['p90']} "
        f"in nine of ten hunts, after {found['max']} at the latest"
    )
    return found


def _shrinking(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """How short shrunk failures are, and how much shorter they could be."""
    shrunk = [answer for answer in answers if "length" in answer]
    if not shrunk:
        return {}
    lengths = [answer["length"] for answer in shrunk]
    ratios = [answer["length"] / max(1, answer["shortest"]) for answer in shrunk]
    longest = max(len(answer["token"]) for answer in shrunk)
    cut = sum(not answer["exhausted"] for answer in shrunk)
    print(
        f"median length {statistics.median(lengths)}, "
        f"{statistics.median(ratios):.2f} times the shortest (search cut for {cut}); "
        f"longest token {longest} characters"
    )
    for answer in shrunk:
        if not answer["fails_only_with_it"]:
            print(f"{answer['mutant']}: shrunk to what fails without it too: {answer['token']}")
    return {
        "median_length": statistics.median(lengths), "median_ratio": statistics.median(ratios),
        "longest_token": longest, "searches_cut": cut,
    }  # fmt: skip
