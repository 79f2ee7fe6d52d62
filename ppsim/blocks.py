"""Running a block: the interpreter that the reference and every simulated rank share.

A block runs as a generator. It yields what it wants and is sent what it gets, and does not know
whether one rank serves it or several:

* [`Access`][ppsim.blocks.Access]: a read is sent a `Box`, a write or a skip nothing;
* [`Force`][ppsim.blocks.Force]: sent nothing, once the nodes have their terms;
* [`Use`][ppsim.blocks.Use]: a call of a module away from the forward; sent a `Box`;
* [`Parameter`][ppsim.blocks.Parameter]: sent a `Box`.

Which occurrence of a location an access means follows nnsight's rules for ``tracer.iter``: a loop
pins its step, the first hit of a pinned step other than 0 relaxes it, and a relaxed access means the
next occurrence.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

from .programs import (
    Append,
    Blend,
    Block,
    Cache,
    Call,
    Derive,
    Edit,
    For,
    If,
    Mix,
    Param,
    Put,
    Raise,
    Read,
    Save,
    Skip,
    Statement,
    Stop,
    Write,
)
from .terms import DERIVE, EDIT, MIX, truth
from .values import Box, Node, operation

#: No containers.
NONE: Mapping[str, int] = {}

#: Statements that a block may run; a block that needs more runs for ever.
FUEL = 2000


class BlockStopped(Exception):
    """``tracer.stop()``."""


class BlockRaised(Exception):
    """The block's own error."""


class OutOfOrder(Exception):
    """The block waited for something that the model ran past."""


class OutOfFuel(Exception):
    """The block does not end; no run of it means anything."""


@dataclass(slots=True)
class Access:
    """A read, or with ``node`` set a write or a skip, of an occurrence of a location."""

    location: str
    occurrence: int
    node: Node | None = None


@dataclass(slots=True)
class Force:
    """The block needs the terms of these nodes."""

    nodes: list[Node]


@dataclass(slots=True)
class Use:
    """The block calls a module away from the forward."""

    path: str
    node: Node


@dataclass(slots=True)
class Parameter:
    """The block reads a module's parameter."""

    location: str


class Recording:
    """What ``tracer.cache()`` keeps: a module's values as they are when a visit is over.

    Attributes:
        values: location -> the values of its visits.
    """

    def __init__(self, inputs: bool, paths: tuple[str, ...]) -> None:
        self.sides = ("in", "out") if inputs else ("out",)
        self.paths = frozenset(paths)
        self.values: dict[str, list[int]] = {}

    def keeps(self, location: str) -> bool:
        """Whether a visit of ``location`` is recorded."""
        path, _, side = location.rpartition(".")
        return bool(path) and side in self.sides and (not self.paths or path in self.paths)

    def observe(self, location: str, value: int) -> None:
        """A visit that is kept is over."""
        self.values.setdefault(location, []).append(value)


#: Statements for which a block may have to wait.
_ASKING = frozenset({Read, Write, Skip, Param, Blend, Call, If})

Want = Access | Force | Use | Parameter
Running = Generator[Want, Box | None, None]


class Frame:
    """A running block's state.

    Attributes:
        names: what the block's names stand for.
        saves: label -> saved box or list of boxes; a slot of a list that nobody wrote is None.
        recordings: label -> what a cache has kept.
        iteration: the pinned step, None when relaxed (nnsight's `Mediator.iteration`).

    Args:
        block: what runs.
        containers: label -> number of slots of a list that was bound and saved above the block.
    """

    def __init__(self, block: Block, containers: Mapping[str, int] = NONE) -> None:
        self.block = block
        self.names: dict[str, Box] = {}
        self.saves: dict[str, Box | list[Box | None]] = {
            label: [None] * slots for label, slots in containers.items()
        }
        self.recordings: dict[str, Recording] = {}
        self.touched = False
        self.iteration: int | None = 0
        self.fuel = FUEL
        # Raise at this step, which the driver counts down; a fault that only one rank has.
        self.fault_at = -1

    def wanted(self, location: str) -> int:
        """Which occurrence an access made now means."""
        return self.iteration if self.iteration is not None else self.relaxed(location)

    def relaxed(self, location: str) -> int:
        """The next occurrence of a location; the driver's to say."""
        raise NotImplementedError

    def hit(self) -> None:
        """An access was served: a pinned step other than 0 relaxes."""
        self.touched = True
        if self.iteration:
            self.iteration = None

    def leaves(self) -> dict[str, list[Box]]:
        """What is saved, each name's leaves in order."""
        return {
            label: [box for box in found if box is not None] if isinstance(found, list) else [found]
            for label, found in self.saves.items()
        }

    def shapes(self) -> dict[str, str]:
        """What the saves are made of: ``x`` a value, ``[x-x]`` a list of three with a hole."""
        return {
            label: f"[{''.join('-' if box is None else 'x' for box in found)}]"
            if isinstance(found, list)
            else "x"
            for label, found in self.saves.items()
        }

    def run(self) -> Running:
        """The block."""
        return self._run(self.block)

    def _run(self, block: Block) -> Running:
        for statement in block:
            self.fuel -= 1
            if self.fuel < 0:
                raise OutOfFuel
            if self.fault_at >= 0:
                if self.fault_at == 0:
                    raise BlockRaised("fault")
                self.fault_at -= 1
            kind = type(statement)
            if kind is For:
                yield from self._loop(statement)  # type: ignore[arg-type]
            elif kind in _ASKING:
                yield from self._asking(statement)
            else:
                self._plain(statement)

    def _plain(self, statement: Statement) -> None:
        """Do a statement that needs nothing of the driver."""
        names = self.names
        match statement:
            case Edit(name, constant):
                if name in names:
                    names[name].edit(operation((EDIT, constant), names[name].node))
            case Derive(name, source_name, constant):
                if source_name in names:
                    names[name] = Box(operation((DERIVE, constant), names[source_name].node))
            case Mix(name, first, second):
                if first in names and second in names:
                    names[name] = Box(operation((MIX, 1), names[first].node, names[second].node))
            case Save(label, name):
                if name in names:
                    self.saves[label] = names[name]
            case Append(label, name):
                if name in names:
                    found = self.saves.setdefault(label, [])
                    if isinstance(found, list):
                        found.append(names[name])
            case Cache(label, inputs, paths):
                if self.touched:
                    raise BlockRaised("cache")
                self.recordings[label] = Recording(inputs, paths)
            case Put(label, slot, name):
                slots = self.saves.get(label)
                if name in names and isinstance(slots, list):
                    if slot >= len(slots):
                        raise BlockRaised("index")
                    slots[slot] = names[name]
            case Stop():
                raise BlockStopped
            case Raise(code):
                raise BlockRaised(str(code))

    def _asking(self, statement: Statement) -> Running:
        """Do a statement that may ask the driver for something."""
        names = self.names
        match statement:
            case Read(name, location):
                box = yield Access(location, self.wanted(location))
                assert box is not None
                names[name] = box
            case Write(location, name):
                if name in names:
                    yield Access(location, self.wanted(location), names[name].node)
            case Skip(path, name):
                if name in names:
                    location = f"{path}.skip"
                    yield Access(location, self.wanted(location), names[name].node)
            case Param(name, location):
                box = yield Parameter(location)
                assert box is not None
                names[name] = box
            case Blend(name, other):
                if name in names and other in names:
                    target, source = names[name], names[other].node
                    if target.node.value is not None and source.value is None:
                        # A lazy written into a real tensor: its data is needed now.
                        yield Force([source])
                    target.edit(operation((MIX, 0), target.node, source))
            case Call(name, path, source_name):
                if source_name in names:
                    box = yield Use(path, names[source_name].node)
                    assert box is not None
                    names[name] = box
            case If(name, body):
                if name in names:
                    node = names[name].node
                    if node.value is None:
                        yield Force([node])
                    if truth(node.evaluate()):
                        yield from self._run(body)

    def _loop(self, loop: For) -> Running:
        previous = self.iteration
        try:
            for step in _steps(loop):
                self.iteration = step
                yield from self._run(loop.body)
        finally:
            self.iteration = previous


def _steps(loop: For) -> Iterator[int]:
    if loop.steps is not None:
        yield from loop.steps
        return
    step = loop.start
    while loop.stop is None or step < loop.stop:
        yield step
        step += 1
