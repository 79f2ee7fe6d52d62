"""Every small program: the small scope in which most bugs show (Jackson, Software Abstractions)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from . import cases
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

_NAMES = "abcdefgh"


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
