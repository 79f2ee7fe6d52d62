"""What a worker reads again and again: the names of the next reads, told from those before.

A block that goes through the layers, or through the steps of a generation, asks for the same expression of
one location after the other, a fixed number of accesses apart. Such a series is worth asking for ahead, as
a file that is read in order is: each ask costs its owner an interruption. How far ahead doubles with what
has come true, as it does there, so that no more is asked for in vain than was of use.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

#: Most reads that are asked for ahead.
FARTHEST: Final = 16

#: Most series that are kept of a request: a block whose expressions differ in each step makes none.
MOST: Final = 64

_NUMBER = re.compile(r"(\d+)")


@lru_cache(maxsize=4096)
def stem(location: str) -> str:
    """The location with its numbers left out: what the locations of a series have in common."""
    return _NUMBER.sub("*", location)


def after(before: str, now: str, steps: int) -> str | None:
    """The location ``steps`` after ``now``, in a series in which ``now`` followed ``before``.

    None where they are not two of a series: other names differ, or several numbers.
    """
    old, new = _NUMBER.split(before), _NUMBER.split(now)
    if len(old) != len(new):
        return None
    moved = [at for at, part in enumerate(new) if part != old[at]]
    if not moved:
        return now
    at = moved[0]
    if len(moved) > 1 or not at % 2:
        return None
    number = int(new[at]) + steps * (int(new[at]) - int(old[at]))
    return "".join([*new[:at], str(number), *new[at + 1 :]]) if number >= 0 else None


class Series:
    """One worker's pulls of one expression of locations with one stem."""

    __slots__ = ("access", "asked", "length", "location", "stride")

    def __init__(self, access: int, location: str) -> None:
        # The last read that was pulled.
        self.access = access
        self.location = location
        # How many accesses lie between two reads; 0 after the first.
        self.stride = 0
        # How many reads in a row are of the series.
        self.length = 1
        # The last access that is asked for.
        self.asked = access

    def goes_on(self, access: int, location: str) -> list[tuple[int, str]]:
        """The worker pulls a read: those to ask for ahead now, by access and location, in order."""
        before, stride = self.location, access - self.access
        if stride <= 0:
            return []  # an older read, which the block looks at once more
        fits = after(before, location, 1) is not None and self.stride in (0, stride)
        self.access, self.location = access, location
        self.length = self.length + 1 if fits else 1
        self.stride = stride if fits else 0
        if not fits or access < self.asked:
            return []
        found: list[tuple[int, str]] = []
        for steps in range(1, min(self.length - 2, FARTHEST) + 1):
            following = after(before, location, steps)
            if following is None:
                break
            found.append((access + steps * stride, following))
        if found:
            self.asked = found[-1][0]
        return found
