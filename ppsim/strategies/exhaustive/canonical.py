"""The state of suspended threads, read off the objects that they can reach.

Two moments of a program are one state when nothing that a thread can still reach tells them apart.
What a generator can reach is where it and the generators below it stand, and the values in their
frames, the operand stacks (the position in a list that a loop runs over) included: the garbage
collector's traversal lists all of them. From there `Canonical` walks the object graph and spells it,
with each mutable object numbered at its first visit, so that aliases count and addresses do not.

What is constant in a run (the case, the schedule, code), or seen by nobody (counters), is left out.
Sets are sorted. Dictionaries keep their order, for a loop may see it, save those that nothing loops
over with an effect on the order of what it sends.
"""

from __future__ import annotations

import enum
import gc
import hashlib
import marshal
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from ppcore.core import Core

from ...rank import Rank

#: Attributes that are the same in every state, or that no decision depends on.
LEFT_OUT: dict[type, frozenset[str]] = {
    Core: frozenset({"schedule", "homes", "counters", "peers"}),
    Rank: frozenset({"model"}),
}

_ATOMS = frozenset({int, bool, str, bytes, float, type(None)})
_ITERABLES: tuple[Any, ...] = ([], (), range(1), {}, {}.items(), {}.values(), zip(), enumerate([]))
_ITERATORS = frozenset(type(iter(thing)) for thing in _ITERABLES)
_CODE = (
    types.CodeType, types.ModuleType, types.FrameType, types.BuiltinFunctionType, type,
)  # fmt: skip


class Canonical:
    """Spells object graphs.

    Args:
        constant: objects that are the same in every state, with everything below them.
        left_out: classes whose objects do not belong to the state.
    """

    def __init__(self, constant: Iterable[object], left_out: tuple[type, ...]) -> None:
        self._constants: dict[int, int] = {}
        self._kept = list(constant)
        for thing in self._kept:
            self._fix(thing)
        self._left_out = left_out
        self._names: dict[type, tuple[str, ...]] = {}
        self._out: list[Any] = []
        self._seen: dict[int, int] = {}
        # What exists for the walk only must live as long as its address is compared.
        self._alive: list[Any] = []
        self._hands: dict[type, Callable[[Any], None]] = {}

    def _fix(self, thing: Any) -> None:
        if type(thing) in _ATOMS or id(thing) in self._constants:
            return
        self._constants[id(thing)] = len(self._constants)
        if isinstance(thing, tuple):
            for part in thing:
                self._fix(part)
        elif is_dataclass(thing):
            for one in fields(thing):
                self._fix(getattr(thing, one.name))

    def digest(self, roots: Iterable[Any]) -> bytes:
        """128 bits that stand for everything reachable from ``roots``."""
        self._out, self._seen, self._alive = [], {}, []
        for root in roots:
            self._add(root)
        text = marshal.dumps(self._out, 0)
        self._out, self._seen, self._alive = [], {}, []
        return hashlib.blake2b(text, digest_size=16).digest()

    def _add(self, thing: Any) -> None:
        kind = type(thing)
        if kind in _ATOMS:
            self._out.append(thing)
            return
        where = id(thing)
        fixed = self._constants.get(where)
        if fixed is not None:
            self._out.append(("fixed", fixed))
            return
        hand = self._hands.get(kind)
        if hand is None:
            hand = self._hands[kind] = self._hand(kind)
        hand(thing)

    def _hand(self, kind: type) -> Callable[[Any], None]:
        """How objects of a class are spelled."""
        if issubclass(kind, (*self._left_out, *_CODE)):
            return lambda thing: None
        if issubclass(kind, enum.Enum):
            return lambda thing: self._out.append((kind.__name__, thing.name))
        if issubclass(kind, tuple):
            return self._tuple
        if issubclass(kind, list | deque):
            return self._list
        if issubclass(kind, dict):
            return self._unordered if getattr(kind, "unordered", False) else self._dict
        if issubclass(kind, set | frozenset):
            return self._set
        if issubclass(kind, types.GeneratorType):
            return self._generator
        if issubclass(kind, types.FunctionType):
            return self._function
        if issubclass(kind, types.MethodType):
            return self._method
        if issubclass(kind, types.CellType):
            return self._cell
        if kind in _ITERATORS:
            return self._iterator
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is not None and parameters.frozen:
            return self._value
        return self._object

    def _new(self, thing: Any, kind: str) -> bool:
        """Number an object; whether this is its first visit."""
        number = self._seen.get(id(thing))
        if number is not None:
            self._out.append(("again", number))
            return False
        self._seen[id(thing)] = len(self._seen)
        self._out.append(kind)
        return True

    def _tuple(self, thing: tuple[Any, ...]) -> None:
        self._out.append(("tuple", len(thing)))
        for part in thing:
            self._add(part)

    def _list(self, thing: Any) -> None:
        if self._new(thing, "list"):
            self._out.append(len(thing))
            for part in thing:
                self._add(part)

    def _dict(self, thing: dict[Any, Any]) -> None:
        if self._new(thing, "dict"):
            self._out.append(len(thing))
            for key, value in dict.items(thing):
                self._add(key)
                self._add(value)

    def _unordered(self, thing: dict[Any, Any]) -> None:
        if self._new(thing, "map"):
            self._out.append(len(thing))
            for key, value in sorted(dict.items(thing), key=lambda item: repr(item[0])):
                self._add(key)
                self._add(value)

    def _set(self, thing: Iterable[Any]) -> None:
        # Members are values, whose text says all.
        self._out.append(("set", *sorted(map(repr, set.__iter__(thing)
                          if isinstance(thing, set) else thing))))  # fmt: skip

    def _generator(self, thing: Any) -> None:
        if not self._new(thing, "generator"):
            return
        frame = thing.gi_frame
        if frame is None:
            self._out.append("ended")
            return
        self._out += [thing.gi_code.co_qualname, frame.f_lasti]
        del frame
        found = gc.get_referents(thing)
        self._alive.append(found)
        for part in found:
            self._add(part)

    def _function(self, thing: Any) -> None:
        self._out.append((thing.__qualname__, thing.__code__.co_firstlineno))
        for cell in thing.__closure__ or ():
            self._add(cell)

    def _method(self, thing: Any) -> None:
        self._out.append(thing.__func__.__qualname__)
        self._add(thing.__self__)

    def _cell(self, thing: Any) -> None:
        if self._new(thing, "cell"):
            try:
                self._add(thing.cell_contents)
            except ValueError:
                self._out.append("empty")

    def _iterator(self, thing: Any) -> None:
        reduced = thing.__reduce__()
        self._alive.append(reduced)
        self._out.append((type(thing).__name__, len(reduced)))
        for part in reduced[1:]:
            self._add(part)

    def _value(self, thing: Any) -> None:
        self._out.append(type(thing).__name__)
        for name in self._attributes(thing):
            self._add(getattr(thing, name))

    def _object(self, thing: Any) -> None:
        if self._new(thing, type(thing).__name__):
            for name in self._attributes(thing):
                self._out.append(name)
                self._add(getattr(thing, name))
            if isinstance(thing, BaseException):
                self._add(thing.args)

    def _attributes(self, thing: Any) -> list[str]:
        kind = type(thing)
        names = self._names.get(kind)
        if names is None:
            slots = [s for base in kind.__mro__ for s in getattr(base, "__slots__", ())]
            names = self._names[kind] = tuple(sorted(slots))
        found = [name for name in names if hasattr(thing, name)]
        held = getattr(thing, "__dict__", None)
        if held:
            left_out = LEFT_OUT.get(kind, ())
            found += sorted(name for name in held if name not in left_out)
        return found
