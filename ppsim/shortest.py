"""The shortest failure there is, by trying everything shorter: the measure of a shrinker.

The *length* of a failure is its statements and its switches (`ppsim.shrink.length`). What is searched
is every program of that many statements or fewer, in the settings of the failure at hand (stages,
layers, requests and their tokens, faults), under every schedule of so many switches; names and
constants stand for themselves, since no property depends on how they are spelled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import cases, fuzz
from .cases import Case
from .programs import (
    Append,
    Blend,
    Block,
    Call,
    Derive,
    Edit,
    For,
    If,
    Mix,
    Raise,
    Read,
    Save,
    Statement,
    Stop,
    Write,
)
from .shrink import alternatives, length
from .strategies import Switch, Switches

if TYPE_CHECKING:
    from .fuzz import Finding

_NAMES = "abcdefgh"


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
    for case in programs(found.case, total - switches):
        for schedule in _schedules(case, switches):
            if time.process_time() > end:
                raise _OutOfTime
            failure = fuzz.execute(case, Switches(schedule)).failure
            if failure is not None and failure.name == found.failure.name:
                return True
    return False


def _schedules(case: Case, count: int, before: tuple[Switch, ...] = ()) -> Iterator[list[Switch]]:
    if count == 0:
        yield list(before)
        return
    for one in alternatives(case, before):
        yield from _schedules(case, count - 1, (*before, one))


def programs(frame: Case, count: int) -> Iterator[Case]:
    """Every case in the settings of ``frame`` whose blocks have ``count`` statements."""
    slots = [(r, name) for r, request in enumerate(frame.requests) for name, _ in request.blocks]
    order = [location for stage in cases.visits(frame) for location in stage]
    vocabulary = _Vocabulary([*order, "result"])
    for parts in _splits(count, len(slots)):
        choices = [[block for block, _ in vocabulary.blocks(part, 0)] for part in parts]
        for blocks in itertools.product(*choices):
            requests = [replace(request, blocks=()) for request in frame.requests]
            for (index, name), block in zip(slots, blocks, strict=True):
                if block:
                    request = requests[index]
                    requests[index] = replace(request, blocks=(*request.blocks, (name, block)))
            yield frame.with_requests(tuple(requests))


def _splits(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (count,)
        return
    for first in range(count + 1):
        for rest in _splits(count - first, parts - 1):
            yield (first, *rest)


class _Vocabulary:
    """Every block over these locations, up to the names that it makes."""

    def __init__(self, locations: list[str]) -> None:
        self.locations = locations

    def blocks(self, count: int, names: int, depth: int = 0) -> Iterator[tuple[Block, int]]:
        """The blocks of ``count`` statements where so many names are made; the names afterwards."""
        if count == 0:
            yield (), names
            return
        for inner in range(count):
            for statement, made in self._statements(inner, names, depth):
                for rest, left in self.blocks(count - 1 - inner, made, depth):
                    yield (statement, *rest), left

    def _statements(self, inner: int, names: int, depth: int) -> Iterator[tuple[Statement, int]]:
        """The statements with ``inner`` statements inside them."""
        known = _NAMES[:names]
        if inner:
            if depth < 2:
                for name in known:
                    for body, made in self.blocks(inner, names, depth + 1):
                        yield If(name, body), made
                for body, made in self.blocks(inner, names, depth + 1):
                    yield For(0, None, None, body), made
            return
        fresh = [(name, max(names, i + 1)) for i, name in enumerate(_NAMES[: names + 1])]
        for name, made in fresh:
            for location in self.locations:
                yield Read(name, location), made
            for source in known:
                yield Derive(name, source, 1), made
                yield Call(name, "N", source), made
                for other in known:
                    yield Mix(name, source, other), made
        for name in known:
            yield Edit(name, 1), names
            yield Save("x", name), names
            yield Append("y", name), names
            for other in known:
                yield Blend(name, other), names
            for location in self.locations:
                if location not in ("result", "samples"):
                    yield Write(location, name), names
        yield Stop(), names
        yield Raise(1), names
