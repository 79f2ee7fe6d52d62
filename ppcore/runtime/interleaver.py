"""The model side on one stage: which visits are this rank's, and what every location looks like.

At load every stage runs one dummy forward with its interleaver *recording*: that shows the order in
which it visits locations and the structure of each value (`Template`). The stages exchange both (see
`exchange`), and from then on a rank knows the order, the owner and the shape of every location of
the whole model.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from greenlet import getcurrent
from nnsight.intervention.interleaver import Interleaver

from ..errors import BlockError
from . import lazy
from .link import Link

if TYPE_CHECKING:
    from .calls import Calls


class Rows(NamedTuple):
    """How many rows a worker has in a step's tensors.

    Attributes:
        tokens: of the worker, where rows are tokens.
        sequences: in the whole step, where rows are sequences.
        total: tokens of the whole step.
    """

    tokens: int
    sequences: int
    total: int


#: Marks, in a template's shape, the extent that is the step's tokens or its sequences.
TOKENS, SEQUENCES = "tokens", "sequences"


@dataclass(frozen=True)
class Shape:
    """A tensor's shape and dtype, with the step's extents left open."""

    extents: tuple[int | str, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Opaque:
    """A leaf that is no data; its type's name is all that crosses."""

    type_name: str


@dataclass(frozen=True)
class Template:
    """The structure of a location's value: tuples, lists and dicts of `Shape` and plain leaves.

    Attributes:
        structure: the value with each tensor replaced by its shape.
        own_row: the value has one row for each sequence and is served one of them.
    """

    structure: Any
    own_row: bool = False

    @classmethod
    def of(
        cls, value: Any, tokens: int, sequences: int | None, *, own_row: bool = False
    ) -> Template:
        """The template of a recorded ``value``, whose step had ``tokens`` and ``sequences``."""

        def shape(tensor: torch.Tensor) -> Shape:
            extents: list[int | str] = list(tensor.shape)
            for position in range(min(2, len(extents))):
                if position == 1 and extents[0] != 1:
                    break
                if extents[position] == tokens:
                    extents[position] = TOKENS
                    break
                if sequences is not None and extents[position] == sequences:
                    extents[position] = SEQUENCES
                    break
            return Shape(tuple(extents), tensor.dtype)

        return cls(_map_leaves(value, shape), own_row)

    def lazies(self, base: lazy.Base, rows: Rows, device: torch.device) -> Any:
        """The value's lazies for a worker that has ``rows``."""

        def extent(found: int | str) -> int:
            if found == TOKENS:
                return rows.tokens
            if found == SEQUENCES:
                if self.own_row:
                    return 1
                # A step of single tokens has as many tokens as sequences: rows of either kind are
                # narrowed alike, on every rank.
                return rows.tokens if rows.sequences == rows.total else rows.sequences
            assert isinstance(found, int)
            return found

        def leaf(part: Shape, path: tuple) -> Any:
            shape = [extent(found) for found in part.extents]
            return lazy.leaf(base, path, shape, part.dtype, device)

        return _build(self.structure, (), leaf)


def _build(part: Any, path: tuple, leaf: Any) -> Any:
    """``part`` with each `Shape` replaced by ``leaf(shape, path)``.

    A function of the module: one that called itself by a closure would be a cycle, and keep what it
    closes over until the collector runs.
    """
    if isinstance(part, Shape):
        return leaf(part, path)
    if isinstance(part, tuple):
        items = [_build(item, (*path, i), leaf) for i, item in enumerate(part)]
        return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
    if isinstance(part, list):
        return [_build(item, (*path, i), leaf) for i, item in enumerate(part)]
    if isinstance(part, dict):
        return {key: _build(item, (*path, key), leaf) for key, item in part.items()}
    return part


def _map_leaves(value: Any, shape: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return shape(value)
    if isinstance(value, tuple):
        items = [_map_leaves(item, shape) for item in value]
        return tuple(items)
    if isinstance(value, list):
        return [_map_leaves(item, shape) for item in value]
    if isinstance(value, dict):
        return {key: _map_leaves(item, shape) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return Opaque(type(value).__name__)


@dataclass
class Recording:
    """What a dummy forward shows: the visits in order, and each location's template."""

    tokens: int
    sequences: int | None = None
    own_row: bool = False

    def __post_init__(self) -> None:
        self.visits: list[str] = []
        self.templates: dict[str, Template] = {}

    def visit(self, location: str, value: Any) -> None:
        """The forward reached ``location``."""
        self.visits.append(location)
        if location not in self.templates:
            self.templates[location] = Template.of(
                value, self.tokens, self.sequences, own_row=self.own_row
            )


class PPInterleaver(Interleaver):
    """An [`Interleaver`] that drives one stage of several.

    Attributes:
        link: this rank's end of the protocol, once `connect` has been called.
        templates: location -> the structure of its value, for every location of the whole model.
        recording: set while a dummy forward runs.
    """

    link: Link | None = None
    recording: Recording | None = None
    #: Threads on which modules run beside the forward (see `calls`); they serve no worker.
    bystanders: frozenset[int] = frozenset()
    #: Ad-hoc calls and parameters; set once connected.
    calls: Calls | None = None
    #: Locations that this stage's forward visits, but that belong to another stage: the outer
    #: modules' inputs on later stages and outputs on earlier ones.
    foreign: frozenset[str] = frozenset()

    def connect(
        self,
        link: Link,
        templates: Mapping[str, Template],
        visits: list[str],
        spanning: frozenset[str],
    ) -> None:
        """Take part in the protocol from now on."""
        self.link = link
        self.templates = dict(templates)
        schedule, stage = link.core.schedule, link.core.stage
        counts = {location: schedule.local_count(location, stage) for location in set(visits)}
        self.foreign = frozenset(location for location, count in counts.items() if not count)
        self.spanning = spanning
        self.counts.clear()

    def beside(self) -> bool:
        """Whether this thread runs a module beside the forward."""
        return bool(self.bystanders) and threading.get_ident() in self.bystanders

    def visited(self, location: str) -> int:
        """How often this turn's forward has visited ``location`` here before the visit at hand."""
        return self.counts.get(location, 0) - self._at_open.get(location, 0)

    def open_turns(self) -> None:
        """A step begins: visits are counted from here."""
        self._at_open = dict(self.counts)

    _at_open: dict[str, int] = {}

    def parameter(self, path: str, name: str, info: Any) -> Any:
        """A parameter of a module that another stage holds, for the worker that runs now."""
        assert self.calls is not None
        return self.calls.parameter(getcurrent().mediator(), path, name, info)  # type: ignore[attr-defined]

    def check_skip(self, location: str) -> None:
        """Refuse to skip a module that spans stages: no stage alone can.

        Raises:
            BlockError: it does.
        """
        path = location.removesuffix(".skip")
        if path in self.spanning:
            raise BlockError(
                f"{path!r} spans pipeline stages and cannot be skipped as a whole; skip its layers"
            )

    def check_swap(self, location: str) -> None:
        """Refuse to replace a value of a module that every stage runs for itself.

        Raises:
            BlockError: the other stages would go on with their own.
        """
        refusal = self.fixed(location)
        if refusal:
            raise BlockError(refusal)

    def fixed(self, location: str) -> str:
        """Why a value of ``location`` cannot be written or edited; empty where it can.

        Every stage but the first has a lazy in the place of such a value, so that an edit in place of it
        ends the block on those, and with that everywhere.
        """
        assert self.link is not None
        path = location.rpartition(".")[0]
        if path not in self.link.core.schedule.repeated:
            return ""
        return (
            f"{path!r} runs on every pipeline stage for itself: it can be read, and not written; "
            "write to what the layers make of it"
        )

    def handle(self, provider: str, value: Any) -> Any:
        if self.recording is not None:
            self.recording.visit(provider, value)
            return value
        if provider in self.foreign:
            return value
        if provider not in self.parked and provider not in self.observers and not self.bystanders:
            # Most visits: nobody waits. nnsight would do the same, after what it asks for others' sake.
            self.counts[provider] = self.counts.get(provider, 0) + 1
            return value
        return value if self.beside() else super().handle(provider, value)
