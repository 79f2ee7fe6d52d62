"""``python -m bench [core | accesses | untraced | pulls | deaths | traces | steps | timeline]``: one, or all.

All results are ratios within one run. The pulls come before the traces, since a round trip over the direct
transport bounds what a step of some traces may cost. ``--page FILE`` measures nothing: it makes the
measured part of `docs/performance.md` anew from such a file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

#: Before anything was measured.
LOAD = os.getloadavg()[0]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def stamped(part: dict[str, Any]) -> dict[str, Any]:
    """A benchmark's results with the day and the machine."""
    return (
        {"load": LOAD} | part | {"date": datetime.date.today().isoformat(), "cores": os.cpu_count()}
    )


def keep(path: Path | None, result: dict[str, Any]) -> None:
    """Write the results, if they are to be written."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "what",
        nargs="?",
        choices="core accesses untraced pulls deaths traces steps timeline".split(),
    )
    parser.add_argument(
        "--json", type=Path, help="also put the results here, beside those of other benchmarks"
    )
    parser.add_argument("--page", type=Path, help="make the page from this file, measure nothing")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs, or repetitions")
    parser.add_argument("--tokens", type=int, default=16, help="untraced: tokens of each run")
    parser.add_argument("--plot", type=Path, help="traces: measure series, and draw them here")
    parser.add_argument("--only", nargs="+", default=(), help="traces: the names of some")
    args = parser.parse_args()
    if args.page is not None:
        from . import page

        page.fill(PAGE, json.loads(args.page.read_text()))
        return
    before: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        before = json.loads(args.json.read_text())
    result: dict[str, Any] = {}

    def measured(name: str, part: dict[str, Any]) -> dict[str, Any]:
        """Keep a part as soon as it is there: all of them take many minutes."""
        result[name] = stamped(part)
        keep(args.json, before | result)
        return part

    if args.what in (None, "core"):
        from . import core

        print(core.table(measured("core", core.run())))
    if args.what in (None, "accesses"):
        from . import accesses

        print(accesses.table(measured("accesses", accesses.run())))
    if args.what in (None, "untraced"):
        from . import untraced

        found = measured("untraced", untraced.run(pairs=3 * args.pairs, tokens=args.tokens))
        print(
            f"untraced, {found['stages']} stages: {found['ratio']:.3f} x vLLM's own worker "
            f"(quartiles {found['quartiles'][0]:.3f}-{found['quartiles'][1]:.3f}, "
            f"same tokens: {found['same_tokens']})"
        )
    if args.what in (None, "pulls"):
        from . import pulls

        print(pulls.table(measured("pulls", pulls.run())))
    if args.what in (None, "deaths"):
        from . import deaths

        print(deaths.table(measured("deaths", deaths.run())))
    if args.what in (None, "traces"):
        from . import plot, traces, workloads

        names = list(workloads.WORKLOADS) if args.plot else args.only
        cells = (before | result).get("pulls", {}).get("cells", ())
        small = [c["median_us"] / 1e3 for c in cells if (c["way"], c["bytes"]) == ("direct", 16)]

        def so_far(found: dict[str, Any]) -> None:
            print(f"{measured('traces', found)['cells'][-1]['name']}: measured", flush=True)

        found = traces.run(
            repetitions=args.pairs,
            names=names,
            round_trip_ms=small[0] if small else None,
            so_far=so_far,
        )
        print(traces.table(measured("traces", found)))
        if args.plot:
            plot.draw(found["cells"], args.plot)
    if args.what in (None, "steps"):
        from . import steps

        print(steps.table(measured("steps", steps.run())))
    if args.what in (None, "timeline"):
        from . import timeline

        print(timeline.table(measured("timeline", timeline.run(repetitions=args.pairs))))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
