"""Saves as skeleton and leaves: pickling with the tensors taken out, and putting them back.

The skeleton is an ordinary pickle of the saved values, whatever they are made of (lists, dicts,
dataclasses, named tuples, objects); each tensor in it is a reference. So the stages agree on the
structure without agreeing on who has the data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from nnsight.intervention.cache import Cache, Entry
from nnsight.intervention.errors import capture_exception

from ..errors import PPError
from ..saves import Merged, Part, Shipment, merge, to_ship, unlabel
from . import lazy
from .lazy import LazyTensor

#: Where a cache keeps how much it had recorded when each turn began: an attribute of it.
_MARKS = "_ppcore_marks"


class _Mark:
    """Precedes a saved name's value in the skeleton: leaves from here on are counted below it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Skeleton(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.name = ""
        self.found: dict[str, list[torch.Tensor]] = {}
        self.caches: list[Cache] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Mark):
            self.name = value.name
            self.found.setdefault(self.name, [])
            return ("mark", value.name)
        if isinstance(value, torch.Tensor):
            leaves = self.found.setdefault(self.name, [])
            leaves.append(value)
            return ("leaf", self.name, len(leaves) - 1)
        if isinstance(value, Cache):
            for number, known in enumerate(self.caches):
                if known is value:
                    return ("cache", number)
            self.caches.append(value)
            return ("cache", len(self.caches) - 1)
        return None


class Taken:
    """One request's saves on one rank, taken apart.

    Args:
        saves: label -> saved value. A label stands for one saved name of one sequence.
    """

    def __init__(self, saves: Mapping[str, Any]) -> None:
        buffer = io.BytesIO()
        pickler = _Skeleton(buffer)
        pickler.dump([part for name, value in saves.items() for part in (_Mark(name), name, value)])
        self.skeleton = buffer.getvalue()
        self.found = pickler.found
        self.caches = pickler.caches

    def holds(self) -> dict[str, list[bool]]:
        """For each name, whether the data of each leaf is on this rank."""
        return {
            name: [not lazy.is_lazy(leaf) for leaf in leaves] for name, leaves in self.found.items()
        }

    def ships(self, below: Mapping[str, str], *, last: bool) -> dict[str, list[bool]]:
        """Which leaves this rank ships, given what the earlier stages do."""
        return to_ship(self.holds(), below, last=last)

    def shipment(
        self,
        ships: Mapping[str, list[bool]],
        place: Callable[[str], tuple[int, bool] | None],
        error: Any = None,
        own_error: bool = False,
    ) -> Shipment:
        """What this rank sends home. Forces what it ships and does not hold.

        Args:
            ships: as `ships` returned it.
            place: location -> the index of its first visit in the whole model, and True, for
                recordings; None where it is another stage's. Where no schedule knows it, the index of
                this stage's first visit, and False.
        """
        wanted = {
            (name, position): leaf
            for name, leaves in self.found.items()
            for position, leaf in enumerate(leaves)
            if position < len(ships.get(name, ())) and ships[name][position]
        }
        missing = [leaf for leaf in wanted.values() if lazy.is_lazy(leaf)]
        if missing:
            lazy.resolve(tuple(missing))
        # One object is one at home: what is cloned is cloned once.
        single = {id(leaf): leaf for leaf in wanted.values()}
        own = {key: _own(leaf) for key, leaf in single.items()}
        return Shipment(
            self.skeleton,
            {name: len(leaves) for name, leaves in self.found.items()},
            {name: own[id(leaf)] for name, leaf in wanted.items()},
            error,
            own_error,
            [_parts(cache, place) for cache in self.caches],
        )


def opened(cache: Cache, turn: int) -> None:
    """A turn begins: what ``cache`` records from here on is of that turn."""
    marks = cache.__dict__.setdefault(_MARKS, [])
    marks.append((turn, {path: len(found) for path, found in cache.entries.items()}))


def _turns(cache: Cache, path: str) -> list[int]:
    """The turn of every entry of ``path``."""
    marks = cache.__dict__.get(_MARKS, [])
    turn = marks[0][0] - 1 if marks else 0
    turns: list[int] = []
    for following, lengths in marks:
        turns += [turn] * (lengths.get(path, 0) - len(turns))
        turn = following
    return turns + [turn] * (len(cache.entries[path]) - len(turns))


def _parts(cache: Cache, place: Callable[[str], tuple[int, bool] | None]) -> dict[str, Part]:
    """What this stage recorded, by location.

    What no schedule knows, since a dummy forward runs no attention, is put where it was recorded: after
    what was recorded before it.
    """
    parts: dict[str, Part] = {}
    before = {"input": 0, "output": 0}
    for path, entries in cache.entries.items():
        turns = _turns(cache, path)
        kept = {"input": cache.include_inputs, "output": cache.include_output}
        for side in (side for side, wanted in kept.items() if wanted):
            where = place(f"{path}.{side}")
            if where is not None:
                index, known = where
                # A module that stages share has the index of its first visit, which is behind.
                before[side] = max(index, before[side])
                index = index if known else before[side]
                values = [entry.inputs if side == "input" else entry.output for entry in entries]
                parts[f"{path}.{side}"] = Part(index, turns, values)
    return parts


def _entries(part: Mapping[str, list[Any]]) -> dict[str, list[Entry]]:
    """A recording's entries by path, from its values by location."""
    entries: dict[str, list[Entry]] = {}
    for location, values in part.items():
        path, _, side = location.rpartition(".")
        found = entries.setdefault(path, [])
        found += [Entry() for _ in range(len(values) - len(found))]
        for entry, value in zip(found, values, strict=False):
            setattr(entry, "inputs" if side == "input" else side, value)
    return entries


def _own(leaf: torch.Tensor) -> torch.Tensor:
    """The leaf's data, without the memory around it that it is a view of."""
    if isinstance(leaf, LazyTensor):
        leaf = leaf.node.value if leaf.node.executed else leaf.node.cache
    if leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size():
        return leaf.clone()
    return leaf


class _Filler(pickle.Unpickler):
    def __init__(self, merged: Merged) -> None:
        super().__init__(io.BytesIO(merged.skeleton))
        self.merged = merged
        self.caches: dict[int, Cache] = {}

    def persistent_load(self, reference: Any) -> Any:
        kind, *rest = reference
        if kind == "mark":
            return None
        if kind == "leaf":
            name, position = rest
            return self.merged.leaves.get((name, position))
        number = rest[0]
        cache = self.caches.get(number)
        if cache is None:
            cache = self.caches[number] = Cache.__new__(Cache)
            cache.model, cache._open = None, {}
            cache.entries = _entries(self.merged.parts[number])
        return cache


def put_together(merged: Merged) -> dict[str, Any]:
    """The saves by label, every leaf in place."""
    parts = _Filler(merged).load()
    return {parts[i + 1]: parts[i + 2] for i in range(0, len(parts), 3)}


def entry(shipments: Sequence[Shipment]) -> dict[str, Any]:
    """What the client gets of one request: the entry that nnsight attaches to its output.

    Args:
        shipments: of every stage, in stage order, with saves under their labels.
    """
    made: dict[str, Any] = {"saves": {}, "error": None, "registered": {}, "sequences": {}}
    try:
        merged = merge(shipments)
    except PPError as error:
        made["error"] = capture_exception(error)
        return made
    made["error"] = merged.error
    for found, value in put_together(merged).items():
        sequence, kind, name = unlabel(found)
        target = made["sequences"].setdefault(sequence, {"saves": {}, "registered": {}})
        if kind != "sequence":
            target[kind][name] = value
    primary = made["sequences"].get(0)
    if primary is not None:
        made["saves"], made["registered"] = primary["saves"], primary["registered"]
    return made
