"""Where in a run a location belongs: ownership, places and the order of visits.

A forward step of the whole model visits locations (``model.model.layers.3.output``) in a fixed
order: first those of stage 0, then those of stage 1, and so on. One dummy forward at load time
shows each stage its own part; exchanged and concatenated they are the *schedule*, from which every
rank derives, without counting another rank's visits,

* which stage owns a location (where the forward visits it),
* to which turn and which point of that turn the ``i``-th occurrence of a location belongs, and
* how many occurrences of a location lie before any point of the run.

A *place* is ``(turn, index)``: ``index`` is the position of the visit in the concatenated order, so
that places compare lexicographically and ``index`` implies the stage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: Makes a named tuple of a tuple, in half the time of its class, whose constructor is Python.
made: Final = tuple.__new__

#: Index of a place before the first visit of a turn.
BEFORE: Final = -1

#: Locations that no stage's forward visits and every rank serves by itself, once the request ends.
REPLICATED: Final = frozenset({"result"})


class Place(NamedTuple):
    """A point of a request's run: the turn, and the visit's index in the schedule."""

    turn: int
    index: int  # type: ignore[assignment]


class Slot(NamedTuple):
    """One visit that a turn makes to a location."""

    stage: int
    index: int  # type: ignore[assignment]


@dataclass(frozen=True)
class Schedule:
    """The order in which one forward step of the whole model visits locations.

    Attributes:
        stages: number of pipeline stages.
        slots: location -> its visits within one turn, in order. Never empty.
        first: index of the first visit of each stage; ``first[s] <= index < first[s + 1]``.
    """

    stages: int
    slots: Mapping[str, tuple[Slot, ...]]
    first: tuple[int, ...]
    #: Paths of modules that run on several stages for one visit.
    repeated: frozenset[str] = frozenset()
    #: The locations at which a module can be skipped.
    skips: frozenset[str] = frozenset()
    _indices: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    # Path of a module that was skipped -> the indices of the visits of its own locations.
    _visits: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    # (location, stage) -> its visits within one turn, and those of them on earlier stages.
    _counts: dict[tuple[str, int], tuple[int, int]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def build(cls, visits: Sequence[Iterable[str]], split: Iterable[str] = ()) -> Schedule:
        """Concatenate the visits of each stage, in stage order.

        Args:
            visits: for each stage, the locations that its forward visits, in order, repeats kept.
            split: paths of modules whose forward spans stages (the root, the decoder). Every stage
                enters them, but to the user they are one module: their input belongs to the first
                stage that enters and their output to the last. What such a forward runs on every
                stage outside the layers (a rotary table for all of them) is *repeated*: on one rank
                it is one visit, and belongs to the first stage that makes it.
        """
        spanning = frozenset(split)
        last_of: dict[str, int] = {}
        for stage, locations in enumerate(visits):
            for location in locations:
                last_of[location] = stage
        slots: dict[str, list[Slot]] = {}
        first: list[int] = []
        repeated: set[str] = set()
        index = 0
        for stage, locations in enumerate(visits):
            first.append(index)
            for location in locations:
                path, _, side = location.rpartition(".")
                if path in spanning:
                    if side == "output" and last_of[location] != stage:
                        continue
                    if side != "output" and location in slots:
                        continue
                elif location in slots and slots[location][0].stage != stage:
                    above = path.rpartition(".")[0]
                    if above in spanning or above in repeated:
                        repeated.add(path)
                        continue
                slots.setdefault(location, []).append(Slot(stage, index))
                index += 1
        first.append(index)
        found = {name: tuple(made) for name, made in slots.items()}
        skips = frozenset(name for name in found if name.endswith(".skip"))
        return cls(len(visits), found, tuple(first), frozenset(repeated), skips)

    def __contains__(self, location: str) -> bool:
        return location in self.slots or self._slots(location) is not None

    def _slots(self, location: str) -> tuple[Slot, ...] | None:
        found = self.slots.get(location)
        if found is None and ".source." in location:
            # An operation inside a module's forward is as often visited as the module, somewhere
            # between its skip gate and its output.
            path = location.partition(".source.")[0]
            found = self.slots.get(f"{path}.skip")
        return found

    def owners(self, location: str) -> tuple[int, ...]:
        """The stages whose forward visits ``location``, ascending; empty when none does."""
        return tuple(sorted({slot.stage for slot in self._slots(location) or ()}))

    def stage_of(self, index: int) -> int:
        """The stage that makes the visit with this index."""
        return max(0, bisect_right(self.first, index) - 1) if index >= 0 else 0

    def visit(self, location: str, occurrence: int) -> tuple[Place, int] | None:
        """Where the ``occurrence``-th visit of ``location`` belongs and the stage that makes it.

        None where no stage's forward visits the location.
        """
        slots = self.slots.get(location) or self._slots(location)
        if slots is None:
            return None
        if len(slots) == 1:  # as most are
            (stage, index), turn = slots[0], occurrence
        else:
            turn = occurrence // len(slots)
            stage, index = slots[occurrence - turn * len(slots)]
        return made(Place, (turn, index)), stage

    def place(self, location: str, occurrence: int) -> Place:
        """Where the ``occurrence``-th visit of ``location`` belongs.

        Raises:
            KeyError: the schedule has no such location.
        """
        found = self.visit(location, occurrence)
        if found is None:
            raise KeyError(location)
        return found[0]

    def beyond(self, skip: str, place: Place) -> Place:
        """Where a module's output belongs that is skipped at ``place``; there itself if it has none."""
        path, _, _ = skip.rpartition(".")
        indices = self._visits.get(path)
        if indices is None:
            own = (found for name, found in self.slots.items() if name.rpartition(".")[0] == path)
            indices = tuple(sorted(slot.index for slots in own for slot in slots))
            self._visits[path] = indices
        later = bisect_right(indices, place.index)
        return Place(place.turn, indices[later] if later < len(indices) else place.index)

    def owner(self, location: str, occurrence: int) -> int:
        """The stage that makes the ``occurrence``-th visit of ``location``."""
        found = self.visit(location, occurrence)
        if found is None:
            raise KeyError(location)
        return found[1]

    def before(self, location: str, place: Place) -> int:
        """How many occurrences of ``location`` lie strictly before ``place``.

        This is what nnsight counts on one rank for a worker that stands at ``place``: a visit is
        counted once everyone parked on it has been served.
        """
        indices = self._indices.get(location)
        if indices is None:
            slots = self._slots(location) or ()
            indices = self._indices[location] = tuple(slot.index for slot in slots)
        turn, index = place
        if len(indices) == 1:
            return turn + 1 if indices[0] < index else turn
        return turn * len(indices) + bisect_left(indices, index)

    def local_occurrence(self, location: str, stage: int, turn: int, visited: int) -> int | None:
        """Which occurrence the ``visited``-th visit (from 0) of ``location`` on ``stage`` is.

        ``turn`` is the request's turn, ``visited`` this stage's own count within that turn. None where no
        stage's forward visits the location.
        """
        counts = self._counts.get((location, stage))
        if counts is None:
            slots = self._slots(location)
            if slots is None:
                return None
            below = sum(1 for slot in slots if slot.stage < stage)
            counts = self._counts[location, stage] = (len(slots), below)
        return turn * counts[0] + counts[1] + visited

    def local_count(self, location: str, stage: int) -> int:
        """How often ``stage`` visits ``location`` in one turn."""
        return sum(1 for slot in self._slots(location) or () if slot.stage == stage)
