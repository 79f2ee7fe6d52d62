"""Context bounding: a schedule without preemption, and a few switches away from it.

Musuvathi, Qadeer, Iterative Context Bounding for Systematic Testing of Multithreaded Programs
(PLDI 2007). The *base schedule* lets a task run until it cannot go on, then the next one by number,
round robin. A *switch* lets another task move instead at one event. Guarantee: with every list of c
switches tried, every schedule within c switches of the base is run; most bugs need very few, so a
failing schedule is told, and shrunk, as its switches.

A switch names its event by the task whose turn it would be and how many steps that task has made:
``f0.0@12>l1.0<0``. Unrelated changes elsewhere in the run leave that name alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..world import Task, World


class Switch(NamedTuple):
    """Instead of the ``step``-th step of ``task``, ``to`` moves (and goes on, as the base does)."""

    task: str
    step: int
    to: str

    def __str__(self) -> str:
        return f"{self.task}@{self.step}>{self.to}"

    @classmethod
    def parse(cls, text: str) -> Switch:
        """The switch that ``text`` spells.

        Raises:
            ValueError: it spells none.
        """
        event, arrow, to = text.partition(">")
        task, at, step = event.rpartition("@")
        if not (arrow and at and task and to and step.isdigit()):
            raise ValueError(f"not a switch: {text!r}")
        return cls(task, int(step), to)


class Base:
    """The base schedule, from wherever the run is."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self._current = 0

    def position(self, world: World) -> int:
        """Where in ``world.runnable`` the task is whose turn it is."""
        runnable, count, start = world.runnable, len(world.tasks), self._current
        best, least = 0, count
        for position, task in enumerate(runnable):
            distance = (task.number - start) % count
            if distance < least:
                best, least = position, distance
                if not distance:
                    break
        return best

    def moved(self, task: Task) -> None:
        """This task moves."""
        self._current = task.number
        self.steps[task.number] = self.steps.get(task.number, 0) + 1


class Switches:
    """The base schedule with these switches; one whose event does not come about does nothing."""

    def __init__(self, switches: Iterable[Switch] = ()) -> None:
        self._base = Base()
        self._switches: dict[tuple[str, int], list[str]] = {}
        for task, step, to in switches:
            self._switches.setdefault((task, step), []).append(to)

    def choose(self, world: World) -> int:
        base, runnable = self._base, world.runnable
        position = base.position(world)
        if self._switches:
            task = runnable[position]
            waiting = self._switches.get((task.name, base.steps.get(task.number, 0)))
            if waiting:
                to = waiting.pop(0)
                position = next((p for p, t in enumerate(runnable) if t.name == to), position)
        base.moved(runnable[position])
        return position
