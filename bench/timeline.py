"""What `VLLM(..., timeline=FILE)` costs: two engines of two stages, of which one records, take turns.

A workload's ratio is the median of its time on the engine that records, over the median on the other.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ppcore.vllm.child import EngineProcess

from . import MODEL, workloads
from .traces import ENGINE
from .turns import turns

#: One that only saves, one that pulls at every step, one of many requests.
NAMES = ("save all", "logits 32", "invokes 16")
_WARM_UP = 2


def run(*, repetitions: int = 15) -> dict[str, Any]:
    """Measure; the result is plain data.

    Returns:
        ``cells``, one for each workload: milliseconds ``without`` and ``with`` a timeline, their
        ``ratio``, and the ``quartiles`` of the ratios of neighbouring runs.
    """
    from ppcore.vllm.checkpoints import random_llama

    checkpoint = random_llama(**MODEL)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        settings = {"without": None, "with": str(Path(folder) / "timeline.json")}
        engines = {
            name: stack.enter_context(
                EngineProcess(
                    checkpoint, warm=True, pipeline_parallel_size=2, timeline=file, **ENGINE
                )
            )
            for name, file in settings.items()
        }
        for engine in engines.values():
            engine.wait_ready()
        cells = [measure(engines, name, repetitions) for name in NAMES]
    return {"cells": cells, "repetitions": repetitions}


def measure(engines: Mapping[str, Any], name: str, repetitions: int) -> dict[str, Any]:
    """One workload on the engines ``with`` and ``without``; see `run`."""
    took: dict[str, list[float]] = {"without": [], "with": []}
    for engine, counts in turns(took, repetitions, warm_up=_WARM_UP):
        traced, _ = engines[engine].call(workloads.once, name)
        if counts:
            took[engine].append(1e3 * traced)
    ratios = [on / off for on, off in zip(took["with"], took["without"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = {engine: statistics.median(times) for engine, times in took.items()}
    return {
        "name": name,
        **{engine: round(median, 3) for engine, median in medians.items()},
        "ratio": round(medians["with"] / medians["without"], 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'trace':<12}{'without ms':>12}{'with ms':>10}{'ratio':>8}{'quartiles':>16}"]
    for cell in result["cells"]:
        low, high = cell["quartiles"]
        lines.append(
            f"{cell['name']:<12}{cell['without']:>12.1f}{cell['with']:>10.1f}{cell['ratio']:>8.3f}"
            f"{f'{low:.3f}-{high:.3f}':>16}"
        )
    return "\n".join(lines)
