"""Replay: a recorded schedule, followed by name.

A schedule is a list of events. Each names the task that moved and how that changed the set of tasks
that can move: ``f0.0+l1.0<0-`` is a step of a forward that woke a listener and then had to wait
itself. Names, not positions: a replay survives whatever leaves the order of these events alone.

An event that cannot happen any more, or that changes the set otherwise, is a *divergence*; the first
one is kept. Behind it, or behind the end of the list, the base schedule goes on
([`Switches`][ppsim.strategies.switches.Switches]), so that a shortened schedule still gives a whole
run. A replay without a divergence is, event for event, the recorded run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .switches import Base, Switch

if TYPE_CHECKING:
    from ..world import Strategy, World


def changes(mover: str, before: set[str], after: set[str]) -> str:
    """How an event of ``mover`` changed who can move; its own parking is a bare ``-``."""
    woken = "".join(f"+{name}" for name in sorted(after - before))
    dropped = "".join(
        "-" if name == mover else f"-{name}" for name in sorted(before - after, reverse=True)
    )
    return woken + dropped


class Recorder:
    """Another strategy, and a record of what it did.

    Attributes:
        schedule: the events so far, for a `Replay`.
        switches: where it left the base schedule.
    """

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner
        self._base = Base()
        self._mover: str | None = None
        self._before: set[str] = set()
        self.schedule: list[str] = []
        self.switches: list[Switch] = []

    def choose(self, world: World) -> int:
        runnable = world.runnable
        now = {task.name for task in runnable}
        if self._mover is not None:
            self.schedule[-1] += changes(self._mover, self._before, now)
        expected = runnable[self._base.position(world)]
        position = self._inner.choose(world)
        task = runnable[position]
        if task is not expected:
            steps = self._base.steps.get(expected.number, 0)
            self.switches.append(Switch(expected.name, steps, task.name))
        self._base.moved(task)
        self._mover, self._before = task.name, now
        self.schedule.append(task.name)
        return position


@dataclass(frozen=True)
class Divergence:
    """Where a replay left its recording: the first event that differs.

    Attributes:
        event: its number, from 0.
        recorded: the event as recorded.
        found: what there is instead.
    """

    event: int
    recorded: str
    found: str

    def __str__(self) -> str:
        return f"diverged at event {self.event}: recorded {self.recorded!r}, but {self.found}"


class Replay:
    """Follow ``schedule``, event by event.

    Attributes:
        divergence: the first event that differs, once there was one.
    """

    def __init__(self, schedule: Sequence[str]) -> None:
        self._schedule = schedule
        self._base = Base()
        self._at = 0
        self._before: set[str] = set()
        # A list of bare names says nothing of who could move; there is nothing to compare with then.
        self._compares = any("+" in event or "-" in event for event in schedule)
        self.divergence: Divergence | None = None

    def choose(self, world: World) -> int:
        runnable, at = world.runnable, self._at
        position = None
        if self.divergence is None and self._compares:
            now = {task.name for task in runnable}
            if 0 < at <= len(self._schedule):
                self._compare(at - 1, self._before, now)
            self._before = now
        if self.divergence is None and at < len(self._schedule):
            name = mover(self._schedule[at])
            position = next((p for p, task in enumerate(runnable) if task.name == name), None)
            if position is None:
                can = ", ".join(task.name for task in runnable)
                self._diverge(at, f"only these can move: {can}")
        self._at = at + 1
        if position is None:
            position = self._base.position(world)
        self._base.moved(runnable[position])
        return position

    def _compare(self, event: int, before: set[str], now: set[str]) -> None:
        name = mover(self._schedule[event])
        found = name + changes(name, before, now)
        if found != self._schedule[event] and event + 1 < len(self._schedule):
            self._diverge(event, f"now it is {found!r}")

    def _diverge(self, event: int, found: str) -> None:
        self.divergence = Divergence(event, self._schedule[event], found)


def mover(event: str) -> str:
    """The task that moves in an event of a schedule."""
    return event.partition("+")[0].partition("-")[0]
