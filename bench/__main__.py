"""``python -m bench [core | untraced | pulls | traces] [--json FILE]``: run one benchmark, or all of them.

All results are ratios within one run. With all, the pulls come before the traces, since a round trip over the
direct transport bounds what a step of some traces may cost.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["core", "untraced", "pulls", "traces"])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs, or repetitions")
    parser.add_argument("--tokens", type=int, default=64, help="untraced: tokens of each run")
    parser.add_argument("--plot", type=Path, help="traces: measure series, and draw them here")
    parser.add_argument("--only", nargs="+", default=(), help="traces: the names of some")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    if args.what in (None, "core"):
        from . import core

        result["core"] = core.run()
        print(core.table(result["core"]))
    if args.what in (None, "untraced"):
        from . import untraced

        found = result["untraced"] = untraced.run(pairs=args.pairs, tokens=args.tokens)
        print(
            f"untraced, {found['stages']} stages: {found['ratio']:.3f} x vLLM's own worker "
            f"(quartiles {found['quartiles'][0]:.3f}-{found['quartiles'][1]:.3f}, "
            f"same tokens: {found['same_tokens']})"
        )
    if args.what in (None, "pulls"):
        from . import pulls

        result["pulls"] = pulls.run()
        print(pulls.table(result["pulls"]))
    if args.what in (None, "traces"):
        from . import plot, traces, workloads

        names = list(workloads.WORKLOADS) if args.plot else args.only
        cells = result.get("pulls", {}).get("cells", ())
        small = [c["median_us"] / 1e3 for c in cells if (c["way"], c["bytes"]) == ("direct", 16)]
        result["traces"] = traces.run(
            repetitions=args.pairs, names=names, round_trip_ms=small[0] if small else None
        )
        print(traces.table(result["traces"]))
        if args.plot:
            plot.draw(result["traces"]["cells"], args.plot)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
