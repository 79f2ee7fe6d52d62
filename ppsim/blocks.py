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

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

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


class Access:
    """A read, or with ``node`` set a write or a skip, of an occurrence of a location."""

    __slots__ = ("location", "node", "occurrence")

    def __init__(self, location: str, occurrence: int, node: Node | None = None) -> None:
        self.location = location
        self.occurrence = occurrence
        self.node = node


class Force:
    """The block needs the terms of these nodes."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes


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
        turns: location -> the turns of its visits.
    """

    def __init__(self, inputs: bool, paths: tuple[str, ...]) -> None:
        self.sides = ("in", "out") if inputs else ("out",)
        self.paths = frozenset(paths)
        self.values: dict[str, list[int]] = {}
        self.turns: dict[str, list[int]] = {}

    def keeps(self, location: str) -> bool:
        """Whether a visit of ``location`` is recorded."""
        path, _, side = location.rpartition(".")
        return bool(path) and side in self.sides and (not self.paths or path in self.paths)

    def observe(self, location: str, value: int, turn: int) -> None:
        """A visit that is kept is over."""
        self.values.setdefault(location, []).append(value)
        self.turns.setdefault(location, []).append(turn)


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
        # Statements that it may still run, and whether a fault stops it then.
        self.left = FUEL
        self.faulty = False

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

    def fail_at(self, step: int) -> None:
        """Raise at this step: a fault that only one rank has."""
        self.left, self.faulty = step, True

    def run(self) -> Running:
        """The block."""
        return self._run(self.block)

    def _run(self, block: Block) -> Running:
        for statement in block:
            if not self.left:
                raise BlockRaised("fault") if self.faulty else OutOfFuel
            self.left -= 1
            kind = type(statement)
            if kind is Read:
                location = statement.location  # type: ignore[union-attr]
                box = yield Access(location, self.wanted(location))
                assert box is not None
                self.names[statement.name] = box  # type: ignore[union-attr]
                del box  # a value lives as long as the block has a name for it
                continue
            plain = _PLAIN.get(kind)
            if plain is not None:
                plain(self, statement)
            else:
                yield from _ASKING[kind](self, statement)

    # --- statements that need nothing of the driver -------------------------------------------

    def _do_edit(self, do: Edit) -> None:
        box = self.names.get(do.name)
        if box is not None:
            box.edit(operation((EDIT, do.constant), box.node))

    def _do_derive(self, do: Derive) -> None:
        source = self.names.get(do.source)
        if source is not None:
            self.names[do.name] = Box(operation((DERIVE, do.constant), source.node))

    def _do_mix(self, do: Mix) -> None:
        first, second = self.names.get(do.first), self.names.get(do.second)
        if first is not None and second is not None:
            self.names[do.name] = Box(operation((MIX, 1), first.node, second.node))

    def _do_save(self, do: Save) -> None:
        box = self.names.get(do.name)
        if box is not None:
            self.saves[do.label] = box

    def _do_append(self, do: Append) -> None:
        box = self.names.get(do.name)
        if box is not None:
            found = self.saves.setdefault(do.label, [])
            if isinstance(found, list):
                found.append(box)

    def _do_put(self, do: Put) -> None:
        box, slots = self.names.get(do.name), self.saves.get(do.label)
        if box is not None and isinstance(slots, list):
            if do.slot >= len(slots):
                raise BlockRaised("index")
            slots[do.slot] = box

    def _do_cache(self, do: Cache) -> None:
        if self.touched:
            raise BlockRaised("cache")
        self.recordings[do.label] = Recording(do.inputs, do.paths)

    def _do_stop(self, do: Stop) -> None:
        raise BlockStopped

    def _do_raise(self, do: Raise) -> None:
        raise BlockRaised(str(do.code))

    # --- statements that may ask the driver for something -------------------------------------

    def _do_write(self, do: Write) -> Running:
        box = self.names.get(do.name)
        if box is not None:
            yield Access(do.location, self.wanted(do.location), box.node)

    def _do_skip(self, do: Skip) -> Running:
        box = self.names.get(do.name)
        if box is not None:
            location = f"{do.path}.skip"
            yield Access(location, self.wanted(location), box.node)

    def _do_param(self, do: Param) -> Running:
        box = yield Parameter(do.location)
        assert box is not None
        self.names[do.name] = box

    def _do_blend(self, do: Blend) -> Running:
        target, other = self.names.get(do.name), self.names.get(do.other)
        if target is not None and other is not None:
            source = other.node
            if target.node.value is not None and source.value is None:
                # A lazy written into a real tensor: its data is needed now.
                yield Force([source])
            target.edit(operation((MIX, 0), target.node, source))

    def _do_call(self, do: Call) -> Running:
        source = self.names.get(do.source)
        if source is not None:
            box = yield Use(do.path, source.node)
            assert box is not None
            self.names[do.name] = box

    def _do_if(self, do: If) -> Running:
        box = self.names.get(do.name)
        if box is not None:
            node = box.node
            if node.value is None:
                yield Force([node])
            if truth(node.evaluate()):
                yield from self._run(do.body)

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


_PLAIN: Final[dict[type, Callable[[Frame, Any], None]]] = {
    Edit: Frame._do_edit, Derive: Frame._do_derive, Mix: Frame._do_mix, Save: Frame._do_save,
    Append: Frame._do_append, Put: Frame._do_put, Cache: Frame._do_cache, Stop: Frame._do_stop,
    Raise: Frame._do_raise,
}  # fmt: skip
_ASKING: Final[dict[type, Callable[[Frame, Any], Running]]] = {
    Write: Frame._do_write, Skip: Frame._do_skip, Param: Frame._do_param, Blend: Frame._do_blend,
    Call: Frame._do_call, If: Frame._do_if, For: Frame._loop,
}  # fmt: skip
