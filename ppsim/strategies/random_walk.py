"""Seeded random walk: every runnable task is as likely to move.

After "naive random scheduling" in Thomson, Donaldson, Betts, Concurrency Testing Using Controlled
Schedulers: An Empirical Study (TOPC 2016), where it finds most of the known bugs. Guarantee: every
schedule has a positive probability, which is exponentially small in its length.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..world import World


class RandomWalk:
    """A uniform choice at every event."""

    def __init__(self, seed: int) -> None:
        self._random: Callable[[], float] = random.Random(seed).random

    def choose(self, world: World) -> int:
        return int(self._random() * float(len(world.runnable)))
