"""``python -m fuzz``: the saved corpus, the state machine, then fresh cases until the time is up.

Profiles: ``ci`` (half a minute, the same examples and seeds each time) and ``nightly`` (ten minutes,
seeds from the day). ``--minutes`` overrides a profile's time. A failing case is shrunk, printed with
its token and the command that replays it, and saved in the folder that ``--save`` names; moved to
``tests/sim/corpus`` it runs with every test from then on. ``--mode real`` puts the real runtime in the
core's place (see `ppsim.real`), and ``both`` shares the time.

``--executors reference,sim,real,gloo,vllm`` runs each program on these instead, and compares;
``all`` is all of them. ``vllm`` is real engines, kept warm: one for each of ``--layouts``, and those of
one stage that they are compared with.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from ppsim import cases, cli, fuzz
from ppsim.failures import Sameness
from ppsim.strategies import RandomWalk, Switches

from .core_machine import CoreMachine

#: The layouts of engines that a comparison runs on, unless told otherwise.
LAYOUTS = "pp2,pp3,tp2pp2"

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "sim" / "corpus"


@dataclass(frozen=True)
class Profile:
    """How much is run, and from where.

    Attributes:
        minutes: of fresh cases.
        first: the number of the first execution.
        examples: of the state machine; drawn anew each time unless ``fixed``.
    """

    minutes: float
    first: int
    examples: int
    fixed: bool


PROFILES = {
    "ci": Profile(0.5, 0, 50, True),
    "nightly": Profile(10.0, datetime.date.today().toordinal() * 1_000_000, 1000, False),
}


def corpus(schedules: int = 300) -> list[str]:
    """Run every saved case under its own and many other schedules; what fails."""
    failing: list[str] = []
    for path in sorted(CORPUS.glob("*.case")):
        case, switches, _ = fuzz.load(path.read_text())
        hows = [Switches(switches), *map(RandomWalk, range(schedules))]
        failures = (fuzz.execute(case, how).failure for how in hows)
        first = next((failure for failure in failures if failure is not None), None)
        if first is not None:
            failing.append(f"{path.name}: {first}")
    return failing


def compare(options: argparse.Namespace, first: int, minutes: float) -> int:
    """Run programs on several executors until one differs or the time is up; the exit code."""
    from ppsim import real  # these need torch and nnsight

    from . import executors

    every = [*executors.EXECUTORS, executors.ENGINES]
    names = every if options.executors == "all" else options.executors.split(",")
    found: executors.Found | None = None
    with executors.started(names, options.layouts.split(",")) as comparison:
        end = time.monotonic() + 60 * minutes
        for seed, case in comparison.cases(itertools.count(first)):
            found = comparison.run(seed, case)
            if found is not None or time.monotonic() >= end:
                break
    for name, tally in comparison.tallies.items():
        print(f"{name:10} {tally.programs} programs, {tally.per_minute:.0f} a minute")
    if found is not None:
        path = options.save / f"fuzz-{found.executor}-{found.seed}.case"
        path.write_text(cases.spell(found.case))
        print(
            f"{found.executor} differs on {found.seed}: {found.text}\n\n{cases.spell(found.case)}"
        )
        print(f"{real.source(found.case)}\nsaved as {path}")
    if options.json:
        tallies = {
            name: {**asdict(tally), "per_minute": round(tally.per_minute, 1)}
            for name, tally in comparison.tallies.items()
        }
        print(json.dumps({"executors": tallies, "failure": found.text if found else None}))
    return Sameness.code if found is not None else 0


def main() -> int:
    """Run a profile; the exit code is that of `ppsim` for what was found."""
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("--profile", choices=PROFILES, default="ci")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, help="the number of the first execution")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", type=Path, default=Path("."), help="folder for a failing case")
    parser.add_argument("--mode", choices=(*fuzz.MODES, "both"), default="core")
    parser.add_argument("--executors", help="names with commas between, or all")
    parser.add_argument("--layouts", default=LAYOUTS, help="of the engines (%(default)s)")
    options = parser.parse_args()
    profile = PROFILES[options.profile]
    first = options.seed if options.seed is not None else profile.first
    minutes = options.minutes or profile.minutes
    if options.executors:
        return compare(options, first, minutes)
    began = time.monotonic()
    failing = corpus()
    print(f"corpus: {len(failing)} failing, {time.monotonic() - began:.1f} s", *failing, sep="\n")
    began = time.monotonic()
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=profile.examples, deadline=None, derandomize=profile.fixed, database=None
        ),
    )
    took = time.monotonic() - began
    print(f"state machine: {profile.examples} examples, {took:.1f} s", flush=True)
    modes = fuzz.MODES if options.mode == "both" else (options.mode,)
    code = 0
    for mode in modes:
        arguments = ["fuzz", "--mode", mode, "--seed", str(first)]
        arguments += ["--minutes", str(minutes / len(modes))]
        arguments += ["--save", str(options.save / f"fuzz-{mode}-{first}.case")]
        code = cli.main([*arguments, *(["--json"] if options.json else [])]) or code
    return code or (1 if failing else 0)


if __name__ == "__main__":
    sys.exit(main())
