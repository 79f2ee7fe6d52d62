"""Run a trace on a model, with what it cost: seconds, values that crossed, what was left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppcore.vllm.compare import plain
from ppcore.vllm.traces import CATALOGUE, Context

__all__ = ["Performance", "at_rest", "crossed", "measured", "perform", "status"]

#: Of `pp_status()`: what has to be zero on every rank when no request is running.
REST = ("requests", "workers", "buffer_entries", "pending_pulls")


@dataclass(frozen=True)
class Performance:
    """One run on one engine."""

    result: Any
    seconds: float
    #: Values that crossed between stages, and their bytes, over all ranks.
    pulls: int
    pulled_bytes: int
    #: rank -> what it still held afterwards; empty if nothing.
    left: dict[str, dict[str, int]]


def status(model: Any) -> list[dict[str, int]]:
    """`model.pp_status()`, or nothing for a model class that has none."""
    return list(model.pp_status()) if hasattr(model, "pp_status") else []


def crossed(ranks: list[dict[str, int]]) -> tuple[int, int]:
    """Values and bytes that have crossed since the engine started, over all ranks."""
    return (
        sum(rank["pulls_total"] for rank in ranks),
        sum(rank["pulled_bytes_total"] for rank in ranks),
    )


def at_rest(ranks: list[dict[str, int]]) -> dict[str, dict[str, int]]:
    """What ranks hold although no request runs: "(stage, column)" -> the counts that are not zero."""
    held = {
        f"({rank['stage']}, {rank['column']})": {key: rank[key] for key in REST if rank[key]}
        for rank in ranks
    }
    return {rank: counts for rank, counts in held.items() if counts}


def measured(model: Any, function: Callable[..., Any], *args: Any) -> Performance:
    """`function(model, *args)`, its result made plain, with what it cost."""
    before = crossed(status(model))
    begun = time.perf_counter()
    result = plain(function(model, *args))
    seconds = time.perf_counter() - begun
    ranks = status(model)
    after = crossed(ranks)
    return Performance(result, seconds, after[0] - before[0], after[1] - before[1], at_rest(ranks))


def perform(model: Any, name: str) -> Performance:
    """Run the trace of that name."""
    return measured(model, CATALOGUE[name].run, Context.of(model))
