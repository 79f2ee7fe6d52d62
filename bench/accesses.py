"""What an access costs a rank, without an engine and without a network.

The first of two stages runs one step of a small plain module for a request whose block makes so many
accesses of one kind; the figure is the step's time less that of a block which makes none, for each access.
The yardstick is the same block in plain nnsight on one stage. Nothing is pulled: the second stage is not
there.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from nnsight.intervention.interleaver import Interleaver

from ppcore.runtime.link import Link
from ppcore.runtime.transport import Buffer
from ppsim.real import execute
from ppsim.real.exact import Exact
from ppsim.real.stage import New, Output, Part, Rank, Whole
from ppsim.real.tree import Tree

LAYERS = 16
REPETITIONS, _WARM_UP = 60, 5

#: What is measured -> the line of the block for a layer, and whether the layer is the other stage's.
KINDS: dict[str, tuple[str, bool]] = {
    "read": ("a = model.model.layers[{}].output[0]", False),
    "lazy read": ("a = model.model.layers[{}].output[0]", True),
    "lazy read, summed": ("a = model.model.layers[{}].output[0].sum()", True),
    "absorbed write": ("model.model.layers[{}].output = (x, x)", True),
}

_PROMPT = list(range(8))
_FIRST = "x = torch.ones(8, 4, dtype=torch.float64)"


class _Nobody:
    """A transport whose peer has always nothing more to ask."""

    def start(self, on_frame: Any, on_death: Any) -> None:
        self._on_frame = on_frame

    def send(self, peer: int, text: str, payload: Sequence[Buffer] = ()) -> None:
        if text.startswith("done "):
            self._on_frame(peer, text, memoryview(b""))

    def close(self, timeout_s: float = 2.0) -> bool:
        return True


def run() -> dict[str, Any]:
    """Measure; the result is plain data.

    Returns:
        ``cells``: microseconds an access of each kind on the first of two stages, and in plain nnsight
        on one (``plain_us``) where it has the kind.
    """
    shape = (2, LAYERS, False)
    stage = execute.column(shape)[0]
    stage.connect(Link(stage.core(), _Nobody(), torch.device("cpu")))
    whole = Whole(Exact(*shape))
    with torch.device("meta"):
        client = Tree(Exact(*shape), interleaver=Interleaver())
    ways: dict[tuple[str, str], tuple[Rank, bytes]] = {}
    for kind, (line, other) in [("nothing", ("", False)), *KINDS.items()]:
        layers = range(LAYERS, 2 * LAYERS) if other else range(LAYERS)
        text = "\n".join([_FIRST, *(line.format(layer) for layer in layers if line)])
        payload = execute.payload(text, client, {})
        ways["stage", kind] = stage, payload
        ways["plain", kind] = whole, payload
    took: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    names, order = itertools.count(), deque(ways)
    gc.disable()
    for repetition in range(_WARM_UP + REPETITIONS):
        order.rotate()
        for way in order:
            seconds = _step(*ways[way], f"r{next(names)}")
            if repetition >= _WARM_UP:
                took[way].append(seconds)
        gc.collect()
    gc.enable()

    def each(where: str, kind: str) -> float:
        nothing = statistics.median(took[where, "nothing"])
        return round(1e6 * (statistics.median(took[where, kind]) - nothing) / LAYERS, 1)

    cells = [
        {"kind": kind, "us": each("stage", kind), "plain_us": each("plain", kind)} for kind in KINDS
    ]
    return {"cells": cells}


def _step(rank: Rank, payload: bytes, name: str) -> float:
    """Processor seconds of one step of a request, which ends with it."""
    new = [New(name, payload)]
    begun = time.process_time()
    rank.step([Part(name, _PROMPT, 0)], new)
    seconds = time.process_time() - begun
    collected = rank.collect(name, Output([0]))  # type: ignore[attr-defined]
    if rank.erred(name) or getattr(collected[0], "error", None):
        raise AssertionError(f"the block of {name} failed: {collected}")
    return seconds


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'access':<20}{'us':>8}{'us in plain nnsight':>21}"]
    lines += [f"{c['kind']:<20}{c['us']:>8.1f}{c['plain_us']:>21.1f}" for c in result["cells"]]
    return "\n".join(lines)
