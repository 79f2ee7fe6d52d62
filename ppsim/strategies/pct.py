"""Probabilistic concurrency testing: priorities, and a few points at which one drops.

Burckhardt, Kothari, Musuvathi, Nagarakatte, A Randomized Scheduler with Probabilistic Guarantees of
Finding Bugs (ASPLOS 2010). Guarantee: a bug of depth d in a run of n tasks and at most k events is
found with probability at least 1 / (n * k^(d-1)). That holds for the k that the change points were
drawn from, so k is measured: the events of a first run of the same case (see `ppsim.fuzz`).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..world import World


class PCT:
    """The runnable task of the highest priority moves; at a change point its priority drops.

    Args:
        seed: of the priorities and the change points.
        depth: the depth of bug looked for; there are ``depth - 1`` change points.
        events: how many events a run of the case has.
    """

    def __init__(self, seed: int, depth: int, events: int) -> None:
        self._random = random.Random(seed)
        self._changes = {self._random.randrange(1, max(2, events)) for _ in range(depth - 1)}
        self._priorities: dict[int, float] = {}
        self._low = 0.0

    def choose(self, world: World) -> int:
        priorities, runnable = self._priorities, world.runnable
        best, top = 0, -1e9
        for position, task in enumerate(runnable):
            priority = priorities.get(task.number)
            if priority is None:
                priority = priorities[task.number] = 1.0 + self._random.random()
            if priority > top:
                best, top = position, priority
        if world.events in self._changes:
            self._low -= 1.0
            priorities[runnable[best].number] = self._low
        return best
