"""``explore``: every schedule of small cases."""

from __future__ import annotations

import argparse
from typing import Any

from ..compiled import needs_sources
from ..strategies.exhaustive import CONFIGURATIONS, Verdict, explore
from . import Answer, Command

CUT = 8


def add(command: Command) -> None:
    """Name the command."""
    all_of = command("explore", run, "run every schedule of small cases")
    all_of.add_argument("--only", help="one configuration, by name")
    all_of.add_argument("--seconds", type=float, default=60.0, help="the most for each")


def run(options: argparse.Namespace) -> Answer:
    """``ppsim explore``."""
    needs_sources("exploring")
    code = 0
    found: list[dict[str, Any]] = []
    for name, case in CONFIGURATIONS.items():
        if options.only in (None, name):
            result = explore(name, case, seconds=options.seconds)
            found.append(result.summary())
            print(
                f"{name}: {result.verdict.value} {result.states} states, {result.edges} edges, "
                f"diameter {result.diameter}, {result.interleavings} interleavings, "
                f"{result.seconds:.1f} s {result.reason}"
            )
            if result.verdict is Verdict.REFUTED and result.failure is not None:
                code = result.failure.code
            elif result.verdict is Verdict.UNDETERMINED and not code:
                code = CUT
    return code, {"configurations": found}
