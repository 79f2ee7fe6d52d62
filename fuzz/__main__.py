"""``python -m fuzz``: the saved corpus first, then fresh cases until the time is up.

Profiles: ``ci`` (half a minute, the same seeds each time) and ``nightly`` (ten minutes, seeds from the
day). ``--minutes`` overrides a profile's time. A failing case is shrunk, printed, and saved into the
corpus folder that ``--save`` names, with the command that replays it.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from pathlib import Path

from ppsim import cases, cli, fuzz
from ppsim.strategies import RandomWalk

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "sim" / "corpus"

#: profile -> (minutes, first seed).
PROFILES = {"ci": (0.5, 0), "nightly": (10.0, datetime.date.today().toordinal() * 1_000_000)}


def corpus(schedules: int = 300) -> int:
    """Run every saved case under many schedules; how many fail."""
    failing = 0
    for path in sorted(CORPUS.glob("*.case")):
        case = cases.parse(path.read_text())
        for seed in range(schedules):
            failure = fuzz.execute(case, RandomWalk(seed)).failure
            if failure is not None:
                print(f"{path.name}: {failure}")
                failing += 1
                break
    return failing


def main() -> int:
    """Run a profile; the exit code is that of `ppsim` for what was found."""
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("--profile", choices=PROFILES, default="ci")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, default=Path("."), help="folder for a failing case")
    options = parser.parse_args()
    minutes, seed = PROFILES[options.profile]
    began = time.monotonic()
    failing = corpus()
    print(f"corpus: {failing} failing, {time.monotonic() - began:.1f} s", flush=True)
    seed = options.seed if options.seed is not None else seed
    arguments = ["fuzz", "--seed", str(seed), "--minutes", str(options.minutes or minutes)]
    arguments += ["--save", str(options.save / f"fuzz-{seed}.case")]
    code = cli.main([*arguments, *(["--json"] if options.json else [])])
    return code or (1 if failing else 0)


if __name__ == "__main__":
    sys.exit(main())
