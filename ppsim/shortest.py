"""The shortest failure there is, by trying everything shorter: the measure of a shrinker.

The *length* of a failure is its statements and its switches (`ppsim.shrink.length`). What is searched
is every program of that many statements or fewer, in the settings of the failure at hand (stages,
layers, requests and their tokens, faults), under every schedule of so many switches; names and
constants stand for themselves, since no property depends on how they are spelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import fuzz, small
from .cases import Case
from .shrink import alternatives, length, witnesses
from .strategies import Switch, Switches

if TYPE_CHECKING:
    from .fuzz import Finding


@dataclass(frozen=True)
class Shortest:
    """What the search found.

    Attributes:
        length: of the shortest failure; where the search was cut, a length that none is below.
        exhausted: whether everything shorter was tried.
    """

    length: int
    exhausted: bool


class _OutOfTime(Exception):
    pass


def shortest(found: Finding, *, seconds: float) -> Shortest:
    """Look for a failure of the same property that is shorter than this one.

    Args:
        found: the failure.
        seconds: the most that the search may take of this process's own time.
    """
    end = time.process_time() + seconds
    most = length(found)
    for total in range(1, most):
        try:
            if any(_fails(found, total, switches, end) for switches in range(total)):
                return Shortest(total, True)
        except _OutOfTime:
            return Shortest(total, False)
    return Shortest(most, True)


def _fails(found: Finding, total: int, switches: int, end: float) -> bool:
    """Whether a program of ``total - switches`` statements fails under so many switches."""
    for case in small.programs(found.case, total - switches):
        for schedule in _schedules(case, switches):
            if time.process_time() > end:
                raise _OutOfTime
            failure = fuzz.execute(case, Switches(schedule)).failure
            alike = failure is not None and failure.name == found.failure.name
            if alike and witnesses(case, Switches(schedule)):
                return True
    return False


def _schedules(case: Case, count: int, before: tuple[Switch, ...] = ()) -> Iterator[list[Switch]]:
    if count == 0:
        yield list(before)
        return
    for one in alternatives(case, before):
        yield from _schedules(case, count - 1, (*before, one))
