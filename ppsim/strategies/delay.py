"""Delay bounding: the base schedule, deviated from a few times.

Emmi, Qadeer, Rakamaric, Delay-Bounded Scheduling (POPL 2011). The base schedule runs a task until it
cannot go on, then the next one, round robin; a delay skips the task whose turn it is. Guarantee:
with all choices of d places for a delay tried, every schedule within d delays of the base is run.
Here the places are drawn from a seed, among as many events as a first run of the case had, and
the base starts with a drawn task.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..world import World


class DelayBounding:
    """Round robin without preemption, and ``delays`` delays among the first ``events`` events."""

    def __init__(self, seed: int, delays: int, events: int) -> None:
        draw = random.Random(seed)
        self._delays = {draw.randrange(max(1, events)) for _ in range(delays)}
        self._current = draw.randrange(1 << 16)

    def choose(self, world: World) -> int:
        runnable, count = world.runnable, len(world.tasks)
        if world.events in self._delays:
            self._current += 1
        start = self._current % count
        best = min(range(len(runnable)), key=lambda p: (runnable[p].number - start) % count)
        self._current = runnable[best].number
        return best
