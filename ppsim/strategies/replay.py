"""Replay: a recorded schedule, followed by name.

A schedule is a list of task names. A name that cannot move any more is a *divergence*; the first one
is kept, with what could move instead. Behind it, or behind the end of the list, the first runnable
task moves, so that a shortened schedule still gives a whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..world import World


class Replay:
    """Follow ``schedule``.

    Attributes:
        divergence: (event, the name asked for, what could move), once there was one.
    """

    def __init__(self, schedule: Sequence[str], *, lenient: bool = False) -> None:
        self._schedule = schedule
        self._at = 0
        self._lenient = lenient
        self.divergence: tuple[int, str, list[str]] | None = None

    def choose(self, world: World) -> int:
        while self._at < len(self._schedule):
            name = self._schedule[self._at]
            self._at += 1
            for position, task in enumerate(world.runnable):
                if task.name == name:
                    return position
            if self.divergence is None:
                can = [task.name for task in world.runnable]
                self.divergence = (world.events, name, can)
            if not self._lenient:
                break
        return 0
