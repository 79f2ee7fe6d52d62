"""Putting the saves of one request together from what each stage ships.

Every rank ran the same block, so the saved names and containers are the same everywhere; only the
leaves differ in where their data is. A rank sends the *skeleton* of its saves (opaque bytes), how
many leaves each name has, and the leaves that it ships: those that it holds and no earlier stage
holds. The leaf that no stage holds is forced and shipped by the last. So each leaf crosses once.

A leaf is named by ``(name, position)``: the position counts the leaves below a saved name in the
order in which pickling meets them, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import Diverged

#: Marks in a bitmap of leaves: shipped by the sender, and not.
_SHIPS, _LACKS = "1", "0"


def label(sequence: int, kind: str, name: str) -> str:
    """The name under which a saved value crosses: its sequence, whose it is, its own name.

    ``kind`` is ``saves`` (the traced block's), ``registered`` (a registered block's), or
    ``sequence``, which says only that there is one.
    """
    return f"{sequence}/{kind}/{name}"


def unlabel(text: str) -> tuple[int, str, str]:
    """The parts of a `label`."""
    sequence, kind, name = text.split("/", 2)
    return int(sequence), kind, name


def spell_leaves(ships: Mapping[str, Sequence[bool]]) -> dict[str, str]:
    """Leaves per name as bitmaps, for a `Held` message."""
    return {
        name: "".join(_SHIPS if shipped else _LACKS for shipped in flags)
        for name, flags in ships.items()
    }


def union(bitmaps: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Which leaves any of the senders ships."""
    merged: dict[str, str] = {}
    for bitmap in bitmaps:
        for name, flags in bitmap.items():
            before = merged.get(name)
            if before is None:
                merged[name] = flags
                continue
            width = max(len(before), len(flags))
            merged[name] = "".join(
                _SHIPS if _SHIPS in pair else _LACKS
                for pair in zip(
                    before.ljust(width, _LACKS), flags.ljust(width, _LACKS), strict=True
                )
            )
    return merged


def to_ship(
    holds: Mapping[str, Sequence[bool]], below: Mapping[str, str], *, last: bool
) -> dict[str, list[bool]]:
    """Which leaves this stage ships.

    Args:
        holds: name -> for each leaf, whether its data is on this rank.
        below: what the earlier stages ship.
        last: whether this is the last stage, which ships whatever nobody holds.
    """
    shipped: dict[str, list[bool]] = {}
    for name, flags in holds.items():
        taken = below.get(name, "")
        shipped[name] = [
            (held or last) and (position >= len(taken) or taken[position] != _SHIPS)
            for position, held in enumerate(flags)
        ]
    return shipped


class Part(NamedTuple):
    """What one stage recorded of one location.

    Attributes:
        index: of the location's first visit in the whole model's order.
        turns: of every visit, in order. A visit that was skipped is in none.
        values: of every visit.
    """

    index: int  # type: ignore[assignment]
    turns: Sequence[int]
    values: Sequence[Any]


@dataclass(frozen=True)
class Shipment:
    """What one stage sends home for one request.

    Attributes:
        skeleton: the saves with their leaves taken out; opaque.
        counts: name -> how many leaves it has.
        leaves: (name, position) -> leaf.
        error: the error that ended the request on this stage, if one did.
        own_error: whether that error was raised there (and not told by another stage).
        parts: recordings that each stage has a part of (caches), by number: location -> its part.
    """

    skeleton: bytes
    counts: Mapping[str, int] = field(default_factory=dict)
    leaves: Mapping[tuple[str, int], Any] = field(default_factory=dict)
    error: Any = None
    own_error: bool = False
    parts: Sequence[Mapping[str, Part]] = ()


@dataclass(frozen=True)
class Merged:
    """One request's saves, ready to be put together.

    Attributes:
        skeleton: the one to fill.
        leaves: (name, position) -> leaf, for every leaf of it.
        error: the request's error, or None.
        parts: for each recording, its locations in visiting order with the values of all visits.
    """

    skeleton: bytes
    leaves: Mapping[tuple[str, int], Any]
    error: Any
    parts: Sequence[Mapping[str, list[Any]]]


def merge(shipments: Sequence[Shipment]) -> Merged:
    """Merge what the stages shipped, in stage order.

    Where the request failed, the stage that raised knows what one rank would have saved: the names
    bound before the error.

    Raises:
        Diverged: the stages do not agree on what was saved.
    """
    raised = [shipment for shipment in shipments if shipment.own_error]
    chosen = raised[0] if raised else shipments[-1]
    error = chosen.error
    if error is None:
        error = next((s.error for s in shipments if s.error is not None), None)
    if error is None:
        for stage, shipment in enumerate(shipments):
            if dict(shipment.counts) != dict(chosen.counts):
                raise Diverged(
                    f"stage {stage} saved {_differing(shipment.counts, chosen.counts)!r} "
                    "otherwise than the last stage; the block's control flow depends on the rank"
                )
    leaves: dict[tuple[str, int], Any] = {}
    for shipment in shipments:
        for name, leaf in shipment.leaves.items():
            leaves.setdefault(name, leaf)
    return Merged(chosen.skeleton, leaves, error, merge_parts([s.parts for s in shipments]))


def _differing(a: Mapping[str, int], b: Mapping[str, int]) -> list[str]:
    """The block's own names of what differs."""
    return sorted({name.rpartition("/")[2] for name in {*a, *b} if a.get(name) != b.get(name)})


def merge_parts(stages: Sequence[Sequence[Mapping[str, Part]]]) -> list[dict[str, list[Any]]]:
    """Union of recordings of which each stage has some visits, in the order of the whole model.

    A location that several stages visit (a module that they share) has the visits of one turn from
    each of them in turn.
    """
    merged: list[dict[str, list[Any]]] = []
    for number in range(max((len(parts) for parts in stages), default=0)):
        found: dict[str, list[Part]] = {}
        for parts in stages:
            if number < len(parts):
                for location, part in parts[number].items():
                    found.setdefault(location, []).append(part)
        ordered = sorted(found.items(), key=lambda item: min(part.index for part in item[1]))
        merged.append({location: _turns(parts) for location, parts in ordered})
    return merged


def _turns(parts: Sequence[Part]) -> list[Any]:
    """The visits of a location in the order of the run, from each stage's own."""
    visits = [visit for part in parts for visit in zip(part.turns, part.values, strict=True)]
    return [value for _, value in sorted(visits, key=lambda visit: visit[0])]
