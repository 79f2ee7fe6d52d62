"""Partial-order sampling: random priorities, drawn anew for events that race with the last one.

Yuan, Yang, Gu, Partial Order Aware Concurrency Sampling (CAV 2018). Every pending event has a random
priority and the highest moves; then the pending events that *race* with it, those that touch what it
touched, draw new ones. Schedules that differ only in the order of events that do not race are one
partial order, and this samples partial orders: guarantee, the probability of each is bounded from
below by the number of its races, where a random walk's falls with the number of all events.

Events of one rank touch its core, so they race; the engine's and a fault's touch every rank.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..world import World


class POS:
    """The pending event of the highest priority moves."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._priorities: dict[int, float] = {}
        self._ranks: dict[int, str] = {}

    def choose(self, world: World) -> int:
        priorities, runnable, draw = self._priorities, world.runnable, self._random
        best, top = 0, -1.0
        for position, task in enumerate(runnable):
            priority = priorities.get(task.number)
            if priority is None:
                priority = priorities[task.number] = draw()
            if priority > top:
                best, top = position, priority
        mover = runnable[best]
        rank = self._rank(mover.number, mover.name)
        del priorities[mover.number]
        for task in runnable:
            number = task.number
            if number in priorities and number != mover.number:
                other = self._rank(number, task.name)
                if not rank or not other or other == rank:
                    del priorities[number]
        return best

    def _rank(self, number: int, name: str) -> str:
        """The rank that a task's events touch; "" for all of them."""
        found = self._ranks.get(number)
        if found is None:
            own = name[0] in "fl" and name[1:2].isdigit()
            found = self._ranks[number] = name[1:].partition("<")[0] if own else ""
        return found
