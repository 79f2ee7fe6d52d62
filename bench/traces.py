"""What a trace costs on two stages beside what it costs on one.

The *overhead* of a trace is its time less that of the same requests without one, on the same engine,
measured one after the other. Both engines are warm and take turns, a second apart (see `turns`); figures
are medians over the repetitions, and what counts are the ratios of the overheads.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ppcore.vllm.child import EngineProcess

from . import MODEL, workloads
from .turns import turns

STAGES = (1, 2)
ENGINE: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "disable_log_stats": True}
_WARM_UP, _CALLS = 2, 30


@dataclass(frozen=True)
class Measured:
    """A workload on every engine; times in milliseconds, one entry a number of stages."""

    name: str
    traced: dict[int, float]
    untraced: dict[int, float]
    overhead: dict[int, float]
    #: First and third quartile of the overhead.
    quartiles: dict[int, tuple[float, float]]
    values: int
    bytes: int

    @property
    def ratio(self) -> float:
        return self.overhead[2] / self.overhead[1]

    @property
    def per_value(self) -> float:
        """Milliseconds for each value that crossed, above what one stage costs."""
        return (self.overhead[2] - self.overhead[1]) / max(self.values, 1)

    @property
    def per_step(self) -> float:
        """Milliseconds a step above 1.1 times what one stage costs."""
        steps = workloads.WORKLOADS[self.name].tokens
        return (self.overhead[2] - 1.1 * self.overhead[1]) / steps


#: (workload, what is judged, how it is found, the most that it may be: None is a direct round trip)
BOUNDS: list[tuple[str, str, Callable[[Measured], float], float | None]] = [
    ("save all", "overhead, ratio", lambda found: found.ratio, 1.2),
    ("early used", "ms a value", lambda found: found.per_value, 0.15),
    ("late used 12", "ms a value", lambda found: found.per_value, 0.15),
    ("logits 32", "ms a step above 1.1 x", lambda found: found.per_step, None),
    ("logits 128", "ms a step above 1.1 x", lambda found: found.per_step, None),
    ("invokes 16", "overhead, ratio", lambda found: found.ratio, 1.15),
]


def run(
    *,
    repetitions: int = 15,
    names: Sequence[str] = (),
    round_trip_ms: float | None = None,
    so_far: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure; the result is plain data.

    Args:
        names: of `workloads.WORKLOADS`; those that have a bound by default.
        round_trip_ms: of a small pull over the direct transport, which bounds a step of the logits;
            without it these are shown and not judged.
        so_far: told of the result after each workload: all of them take many minutes.

    Returns:
        ``cells``, one for each workload and number of stages, in milliseconds; ``bounds``, each with
        what was found; ``call_ms``: of a call of all ranks that does nothing, for each number of
        stages; ``load``: the machine's load average before.
    """
    from ppcore.vllm.checkpoints import random_llama

    load = os.getloadavg()[0]
    checkpoint = random_llama(**MODEL)
    with ExitStack() as stack:
        engines = {
            stages: stack.enter_context(
                EngineProcess(checkpoint, pipeline_parallel_size=stages, **ENGINE)
            )
            for stages in STAGES
        }
        for engine in engines.values():
            engine.wait_ready()
        found: dict[str, Measured] = {}
        about = {
            "repetitions": repetitions,
            "load": load,
            "call_ms": {str(stages): _call_ms(engine) for stages, engine in engines.items()},
        }
        for name in names or [name for name, *_ in BOUNDS]:
            found[name] = _measure(engines, name, repetitions)
            so_far(summary(found, round_trip_ms) | about)
    return summary(found, round_trip_ms) | about


def _call_ms(engine: EngineProcess) -> float:
    took = [engine.call(workloads.call) for _ in range(_CALLS)]
    return round(1e3 * statistics.median(took), 3)


def summary(found: Mapping[str, Measured], round_trip_ms: float | None) -> dict[str, Any]:
    """``cells`` and ``bounds`` of what was found, see `run`."""
    bounds = []
    for name, what, value, most in BOUNDS:
        if name in found:
            most = round_trip_ms if most is None else most
            bounds.append(
                {"name": name, "what": what, "found": round(value(found[name]), 4), "at_most": most}
            )
    cells = [
        {
            "name": name,
            "stages": stages,
            "traced_ms": round(one.traced[stages], 3),
            "untraced_ms": round(one.untraced[stages], 3),
            "overhead_ms": round(one.overhead[stages], 3),
            "quartiles_ms": [round(value, 3) for value in one.quartiles[stages]],
            "values": one.values if stages > 1 else 0,
            "bytes": one.bytes if stages > 1 else 0,
        }
        for name, one in found.items()
        for stages in STAGES
    ]
    return {"cells": cells, "bounds": bounds}


def _measure(engines: dict[int, EngineProcess], name: str, repetitions: int) -> Measured:
    took: dict[int, list[tuple[float, float]]] = {stages: [] for stages in engines}
    for stages, counts in turns(engines, repetitions, warm_up=_WARM_UP):
        pair = engines[stages].call(workloads.once, name)
        if counts:
            took[stages].append((1e3 * pair[0], 1e3 * pair[1]))
    values, size = engines[2].call(workloads.crossing, name)
    over = {stages: [traced - plain for traced, plain in pairs] for stages, pairs in took.items()}
    quarters = {
        stages: statistics.quantiles(differences, n=4) for stages, differences in over.items()
    }
    return Measured(
        name,
        {stages: statistics.median(t for t, _ in pairs) for stages, pairs in took.items()},
        {stages: statistics.median(u for _, u in pairs) for stages, pairs in took.items()},
        {stages: middle for stages, (_, middle, _) in quarters.items()},
        {stages: (low, high) for stages, (low, _, high) in quarters.items()},
        values,
        size,
    )


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{'trace':<12}{'stages':>7}{'untraced ms':>13}{'traced ms':>11}{'overhead ms':>13}"
        f"{'quartiles':>18}{'values':>8}{'bytes':>10}"
    ]
    for cell in result["cells"]:
        low, high = cell["quartiles_ms"]
        lines.append(
            f"{cell['name']:<12}{cell['stages']:>7}{cell['untraced_ms']:>13.1f}"
            f"{cell['traced_ms']:>11.1f}{cell['overhead_ms']:>13.1f}{f'{low:.1f}-{high:.1f}':>18}"
            f"{cell['values']:>8}{cell['bytes']:>10}"
        )
    for found in result["bounds"]:
        most = found["at_most"]
        verdict = "  OVER" if most is not None and found["found"] > most else ""
        limit = "" if most is None else f" (at most {most:.3g})"
        lines.append(f"{found['name']}: {found['found']:.3f} {found['what']}{limit}{verdict}")
    lines.append(f"load average before: {result['load']:.1f} on {os.cpu_count()} cores")
    return "\n".join(lines)
