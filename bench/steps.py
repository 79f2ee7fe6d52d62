"""Whether a long generation stays as fast, and as small, as it began.

A trace looks at the logits of each of 500 steps, on one stage and on two; its block notes the time in each
step. *Growth* is the median of the last 50 steps over that of the first 50 (without the prompt's). Attention
looks at more tokens in each step, so that one stage's growth is the yardstick. *Resident* is the memory of
all ranks together, after a trace of 50 steps and after one of 500.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nnsight

from ppcore.vllm.child import EngineProcess

from . import MODEL, PROMPT
from .traces import ENGINE, STAGES
from .turns import turns
from .workloads import SETTINGS

STEPS, ENDS = 500, 50
#: How much slower, or larger, the end may be.
AT_MOST = 1.03


def run(*, repetitions: int = 3) -> dict[str, Any]:
    """Measure; the result is plain data.

    Returns:
        ``cells``, one for each number of stages: milliseconds of the ``first`` and the ``last`` steps and
        their ``growth``, and MiB ``resident`` after a short trace and after a long one; ``growth`` of two
        stages in terms of one; ``memory``, the same for two stages; ``at_most``.
    """
    from ppcore.vllm.checkpoints import random_llama

    checkpoint = random_llama(**MODEL)
    with ExitStack() as stack:
        engines = {
            stages: stack.enter_context(
                EngineProcess(
                    checkpoint, pipeline_parallel_size=stages, **{**ENGINE, "max_model_len": 640}
                )
            )
            for stages in STAGES
        }
        short: dict[int, int] = {}
        for stages, engine in engines.items():
            engine.wait_ready()
            engine.call(stamps, ENDS, timeout_s=600)
            engine.call(stamps, ENDS, timeout_s=600)
            short[stages] = engine.call(resident)
        took: dict[int, list[tuple[float, float]]] = {stages: [] for stages in engines}
        for stages, _ in turns(engines, repetitions, warm_up=0):
            took[stages].append(ends(engines[stages].call(stamps, STEPS, timeout_s=600)))
        long = {stages: engine.call(resident) for stages, engine in engines.items()}
    return summary(took, short, long) | {"repetitions": repetitions}


def ends(seen: Sequence[float]) -> tuple[float, float]:
    """Milliseconds of a step at the begin and at the end, of the times in seconds at which steps were seen."""
    steps = [1e3 * (later - sooner) for sooner, later in itertools.pairwise(seen)]
    return statistics.median(steps[:ENDS]), statistics.median(steps[-ENDS:])


def summary(
    took: Mapping[int, Sequence[tuple[float, float]]],
    short: Mapping[int, int],
    long: Mapping[int, int],
) -> dict[str, Any]:
    """What `run` returns, of the `ends` of every repetition and of bytes after a short and a long trace."""
    cells = [
        {
            "stages": stages,
            "first": round(statistics.median(first for first, _ in found), 3),
            "last": round(statistics.median(last for _, last in found), 3),
            "growth": round(statistics.median(last / first for first, last in found), 4),
            "resident": [round(size / 2**20, 1) for size in (short[stages], long[stages])],
        }
        for stages, found in took.items()
    ]
    growth = {cell["stages"]: cell["growth"] for cell in cells}
    return {
        "cells": cells,
        "growth": round(growth[2] / growth[1], 4),
        "memory": round(long[2] / short[2], 4),
        "at_most": AT_MOST,
        "steps": STEPS,
    }


# --- in an engine's process -----------------------------------------------------------------------


def stamps(model: Any, steps: int) -> list[float]:
    """When each step of a trace that looks at the logits was looked at, in seconds."""
    clock = time.monotonic
    with model.trace(PROMPT, max_tokens=steps, **SETTINGS) as tracer:
        seen = nnsight.save([])
        for _ in tracer.iter[:steps]:
            float(model.logits.max())
            seen.append(clock())
    assert len(seen) == steps
    return list(seen)


def resident(model: Any) -> int:
    """Bytes of memory that the ranks have."""
    pages = sum(
        int(Path(f"/proc/{rank['pid']}/statm").read_text().split()[1]) for rank in model.pp_status()
    )
    return pages * 4096


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'stages':>7}{'first ms':>10}{'last ms':>9}{'growth':>8}{'MiB':>18}"]
    for cell in result["cells"]:
        sizes = "{:.0f} to {:.0f}".format(*cell["resident"])
        lines.append(
            f"{cell['stages']:>7}{cell['first']:>10.2f}{cell['last']:>9.2f}{cell['growth']:>8.3f}{sizes:>18}"
        )
    for name in ("growth", "memory"):
        verdict = "" if result[name] <= result["at_most"] else "  OVER"
        lines.append(f"{name}: {result[name]:.3f} (at most {result['at_most']}){verdict}")
    return "\n".join(lines)
