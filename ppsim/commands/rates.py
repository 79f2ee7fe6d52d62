"""How often each strategy finds a planted bug: pooled over the catalogue, and as a table for a page.

A mutant's runs have cases of their own, so that no case counts twice.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import fuzz, mutants, pages
from ..hunts import Rate

#: Between these the page has the table.
BEGIN, END = "<!-- measured: python -m ppsim mutants --page FILE -->", "<!-- /measured -->"
_HEAD = ("mode", "strategy", "mutants", "runs", "that fail", "share", "95% interval", "never hit")


def cases_of(name: str, first: int, runs: int) -> int:
    """The number of a mutant's first case."""
    names = [mutant.name for mutant in mutants.CATALOGUE]
    return first + runs * names.index(name)


def pooled(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each strategy's hits over all mutants, in each mode that runs any."""
    found: list[dict[str, Any]] = []
    for mode in fuzz.MODES:
        some = [answer for answer in answers if "rates" in answer and answer["mode"] == mode]
        for how in fuzz.STRATEGIES if some else ():
            rates = [Rate(**answer["rates"][how]) for answer in some]
            pool = Rate(sum(rate.hits for rate in rates), sum(rate.runs for rate in rates))
            low, high = pool.interval
            found.append({
                "mode": mode, "strategy": how, "mutants": len(some), "runs": pool.runs,
                "hits": pool.hits, "share": round(pool.share, 6), "low": round(low, 6),
                "high": round(high, 6), "never": sum(not rate.hits for rate in rates),
            })  # fmt: skip
    return found


def told(row: Mapping[str, Any]) -> str:
    """A row of `pooled` as a line."""
    return (
        f"{row['mode']} {row['strategy']:6} fails in {row['share']:.1%} of its runs "
        f"[{row['low']:.1%}, {row['high']:.1%}], never on {row['never']} of {row['mutants']} mutants"
    )


def table(rows: Sequence[Mapping[str, Any]], first: int) -> str:
    """The rows of `pooled` in Markdown, and where and when they were measured."""
    lines = []
    for row in rows:
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        cells = (
            row["mode"], f"`{row['strategy']}`", row["mutants"], row["runs"], row["hits"],
            f"{row['share']:.1%}", interval, row["never"],
        )  # fmt: skip
        lines.append([*map(str, cells)])
    where = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    when = datetime.date.today().isoformat()
    return "\n".join(
        [
            *pages.table(_HEAD, lines),
            "",
            f"Measured on {when} ({where}), cases from seed {first} on.",
        ]
    )


def fill(path: Path, rows: Sequence[Mapping[str, Any]], first: int) -> None:
    """Put the table into a page.

    Raises:
        ValueError: the page has no place for it.
    """
    part = f"\n\n{table(rows, first)}\n\n"
    text = pages.replaced(path.read_text(encoding="utf-8"), BEGIN, END, part)
    path.write_text(text, encoding="utf-8")
