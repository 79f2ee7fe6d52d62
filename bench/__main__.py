"""``python -m bench [untraced | pulls] [--json FILE]``: run a benchmark and print its ratios.

The rest of the table in issue 6 is not built yet.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", nargs="?", default="untraced", choices=["untraced", "pulls"])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--pairs", type=int, default=15, help="untraced: pairs of runs to compare")
    parser.add_argument("--tokens", type=int, default=64, help="untraced: tokens of each run")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    if args.what == "untraced":
        from . import untraced

        found = result["untraced"] = untraced.run(pairs=args.pairs, tokens=args.tokens)
        print(
            f"untraced, {found['stages']} stages: {found['ratio']:.3f} x vLLM's own worker "
            f"(quartiles {found['quartiles'][0]:.3f}-{found['quartiles'][1]:.3f}, "
            f"same tokens: {found['same_tokens']})"
        )
    else:
        from . import pulls

        result["pulls"] = pulls.run()
        print(pulls.table(result["pulls"]))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
