"""``python -m fuzz``: the saved corpus, the state machine, then fresh cases until the time is up.

Profiles: ``ci`` (half a minute, the same examples and seeds each time) and ``nightly`` (ten minutes,
seeds from the day). ``--minutes`` overrides a profile's time. A failing case is shrunk, printed with
its token and the command that replays it, and saved in the folder that ``--save`` names; moved to
``tests/sim/corpus`` it runs with every test from then on.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from ppsim import cli, fuzz
from ppsim.strategies import RandomWalk, Switches

from .core_machine import CoreMachine

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


def main() -> int:
    """Run a profile; the exit code is that of `ppsim` for what was found."""
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("--profile", choices=PROFILES, default="ci")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, help="the number of the first execution")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", type=Path, default=Path("."), help="folder for a failing case")
    options = parser.parse_args()
    profile = PROFILES[options.profile]
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
    first = options.seed if options.seed is not None else profile.first
    arguments = ["fuzz", "--seed", str(first), "--minutes", str(options.minutes or profile.minutes)]
    arguments += ["--save", str(options.save / f"fuzz-{first}.case")]
    code = cli.main([*arguments, *(["--json"] if options.json else [])])
    return code or (1 if failing else 0)


if __name__ == "__main__":
    sys.exit(main())
