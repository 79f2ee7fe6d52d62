"""What one access costs the core, by the number of stages.

One worker reads every location of a model, turn after turn, on the core of the first, the middle and the
last stage: the next occurrence is looked up, the access is named and placed, and where this rank's
forward makes the visit it is served. No tensor, no message and no other thread takes part; the least
of some repetitions counts. A column's cores know nothing of other columns: their number does not enter.

Engines run the core's sources. Where the simulator is compiled (`ppsim.compiled`), the same is measured of its
machine code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ppcore.core import Core, Verdict
from ppcore.messages import Worker
from ppcore.schedule import Schedule
from ppsim import compiled

STAGES = (2, 4, 8, 16, 32, 64)
#: Of the whole model, at any number of stages.
LAYERS = 64
TURNS, REPETITIONS = 5, 15
#: Microseconds.
AT_MOST = 3.0

_WORKER = Worker("measured")
_COMPILED = """
import json
from ppsim import compiled
compiled.use()
from bench import core
print(json.dumps(core.here()))
"""


def _schedule(stages: int) -> tuple[Schedule, list[str]]:
    visits: list[list[str]] = [[] for _ in range(stages)]
    for layer in range(LAYERS):
        for side in ("input", "output"):
            visits[layer * stages // LAYERS].append(f"model.layers.{layer}.{side}")
    return Schedule.build(visits), [location for stage in visits for location in stage]


def _microseconds(stage: int, schedule: Schedule, locations: list[str]) -> float:
    """Of one access, at least, over some repetitions."""
    least = float("inf")
    for _ in range(REPETITIONS):
        core = Core(stage, schedule, {})
        took, made = 0.0, 0
        for turn in range(TURNS):
            core.open_round([_WORKER.request])
            if not turn:
                core.start(_WORKER)
            begun = time.perf_counter()
            for done, location in enumerate(locations, 1):
                decision = core.access(_WORKER, location, core.wanted(_WORKER, location))
                if decision.verdict is Verdict.LOCAL:
                    core.served(_WORKER, decision.place)
                elif decision.verdict is Verdict.GATE:
                    break  # a later stage's value: the worker is parked until the next turn
            took += time.perf_counter() - begun
            made += done
        least = min(least, 1e6 * took / made)
    return least


def run() -> dict[str, Any]:
    """Measure; the result is plain data.

    Returns:
        ``cells``, microseconds an access for each number of stages and stage; ``worst``; ``at_most``;
        ``compiled``, the cells of the machine code, or nothing where there is none of these sources.
    """
    cells = here()
    elsewhere: list[dict[str, Any]] = []
    if compiled.folder().is_dir():
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(
            [sys.executable, "-c", _COMPILED], cwd=root, stdout=subprocess.PIPE, check=True
        )
        elsewhere = json.loads(done.stdout)
    worst = max(cell["us"] for cell in cells)
    return {"cells": cells, "worst": worst, "at_most": AT_MOST, "compiled": elsewhere}


def here() -> list[dict[str, Any]]:
    """The cells, of the core that this process has."""
    cells = []
    for stages in STAGES:
        schedule, locations = _schedule(stages)
        for stage in sorted({0, stages // 2, stages - 1}):
            found = _microseconds(stage, schedule, locations)
            cells.append({"stages": stages, "stage": stage, "us": round(found, 3)})
    return cells


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'stages':>7}{'stage':>7}{'us an access':>14}{'compiled':>10}"]
    machine = [f"{cell['us']:>10.2f}" for cell in result["compiled"]] or [""] * len(result["cells"])
    lines += [
        f"{c['stages']:>7}{c['stage']:>7}{c['us']:>14.2f}{code}"
        for c, code in zip(result["cells"], machine, strict=True)
    ]
    verdict = "" if result["worst"] <= result["at_most"] else "  OVER"
    lines.append(f"worst: {result['worst']:.2f} us (at most {result['at_most']}){verdict}")
    return "\n".join(lines)
