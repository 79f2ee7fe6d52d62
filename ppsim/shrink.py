"""Making a failing run smaller: first its case, then the switches of its schedule.

Greedy: the first smaller case that still fails alike is kept and tried on. A smaller
case has other events, so it is tried under the switches found so far, under the base schedule, and
then under drawn schedules. Where a bug is planted, what fails without it too is not taken: it would
witness something else. Of the switches the fewest are kept: none or one if any single one will do
(all are tried), otherwise what delta debugging (Zeller, Hildebrandt, TSE 2002) leaves.

The *length* of a shrunk failure is its statements and its switches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from . import cases, fuzz, generate, mutants, small
from .cases import Case, Request
from .failures import Failure
from .programs import Block, For, If, Statement, size
from .strategies import POS, RandomWalk, Switch, Switches
from .strategies.switches import Base

if TYPE_CHECKING:
    from .fuzz import Finding
    from .world import Strategy, World

#: Fields of statements that hold names of the block, and labels of saves; places are neither.
NAMES = frozenset({"name", "source", "other", "first", "second"})
LABELS = frozenset({"label"})
PLACES = frozenset({"location", "path", "paths"})
NUMBERS = frozenset({"constant", "code"})

#: Drawn schedules that a smaller case is tried under.
_DRAWN = 12
#: A failure of this length is worth no search for another one to start from; ...
_SHORT = 4
#: ... other failures are looked for among so many cases, those of few statements.
_ELSEWHERE, _BLOCK = 400, 8


def statements(case: Case) -> int:
    """How many statements the blocks of a case have."""
    return sum(size(block) for request in case.requests for _, block in request.blocks)


def length(found: Finding) -> int:
    """Statements and switches."""
    return statements(found.case) + len(found.switches)


def weight(case: Case) -> tuple[int, int]:
    """How big a case is: shrinking only ever lessens this."""
    numbers = sum(map(int, re.findall(r"\d+", cases.spell(case))))
    settings = 3 * case.stages + 3 * case.columns + case.layers + case.shared
    settings += 3 * bool(case.batching) + 2 * len(case.containers)
    for request in case.requests:
        settings += 5 + request.tokens + 2 * sum(bool(name) for name, _ in request.blocks)
        settings += sum(getattr(request, name) != default for name, default in _settings(request))
    return 4 * statements(case) + settings + 5 * len(case.faults), numbers


def _settings(request: Request) -> Iterator[tuple[str, int]]:
    """A request's settings that a plain one does not have, with their defaults."""
    for field in fields(request):
        if field.name not in ("name", "tokens", "blocks"):
            assert isinstance(field.default, int)
            yield field.name, field.default


# --- smaller cases --------------------------------------------------------------------------------


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are a little smaller than this one, the boldest first."""
    for index, request in enumerate(case.requests):
        requests = case.requests[:index] + case.requests[index + 1 :]
        faults = tuple(f for f in case.faults if f.request != request.name)
        if requests:
            yield replace(case, requests=requests, faults=faults)
        for name, _ in request.blocks:
            left = tuple(b for b in request.blocks if b[0] != name)
            yield _put(case, index, replace(request, blocks=left))
        if request.blocks and not request.traced:
            traced = (*request.blocks[:-1], ("", request.blocks[-1][1]))
            yield _put(case, index, replace(request, blocks=traced))
    if case.columns > 1:
        yield replace(case, columns=1, faults=tuple(replace(f, column=0) for f in case.faults))
    if case.shared:
        yield replace(case, shared=False)
    if case.layers > 1:
        yield replace(_moved(case, lambda layer: layer // case.layers), layers=1)
    if case.stages > 2:
        for stage in range(case.stages):
            yield _without_stage(case, stage)
    for batching in (0, 1, 2, 3):
        if batching < case.batching:
            yield replace(case, batching=batching)
    for index, (label, slots) in enumerate(case.containers):
        containers = case.containers[:index] + case.containers[index + 1 :]
        yield replace(case, containers=containers)
        if slots > 1:
            yield replace(case, containers=(*containers, (label, slots - 1)))
    for index, fault in enumerate(case.faults):
        others = case.faults[:index] + case.faults[index + 1 :]
        yield replace(case, faults=others)
        for name, value in (("at", fault.at), ("moves", fault.moves)):
            for less in sorted({0, value // 2, value - 1}):
                if 0 <= less < value:
                    yield replace(case, faults=(*others, _changed(fault, {name: less})))
    for index, request in enumerate(case.requests):
        for tokens in (1, request.tokens - 1):
            if 0 < tokens < request.tokens:
                yield _put(case, index, replace(request, tokens=tokens))
        for name, default in _settings(request):
            setting = getattr(request, name)
            for less in sorted({default, setting - 1}):
                if default <= less < setting:
                    yield _put(case, index, _changed(request, {name: less}))
        for position, (name, block) in enumerate(request.blocks):
            for shorter in _blocks(block):
                if shorter:
                    blocks = list(request.blocks)
                    blocks[position] = (name, shorter)
                    yield _put(case, index, replace(request, blocks=tuple(blocks)))


def _put(case: Case, index: int, request: Request) -> Case:
    requests = (*case.requests[:index], request, *case.requests[index + 1 :])
    return replace(case, requests=requests)


def _changed(thing: Any, values: dict[str, Any]) -> Any:
    """A dataclass with other values in the fields of these names."""
    return replace(thing, **values)


def _moved(case: Case, to: Callable[[int], int]) -> Case:
    """The case with its layers renumbered; those below 0 become layer 0."""
    text = re.sub(r"\bL(\d+)\b", lambda m: f"L{max(0, to(int(m[1])))}", cases.spell(case))
    return cases.parse(text)


def _without_stage(case: Case, stage: int) -> Case:
    """One stage fewer; what was there happens on its neighbour."""
    last = (case.stages - 1) * case.layers - 1
    moved = _moved(
        case,
        lambda layer: min(last, layer if layer // case.layers <= stage else layer - case.layers),
    )

    def new(old: int) -> int:
        return min(case.stages - 2, old if old <= stage else old - 1)

    faults = (replace(f, stage=new(f.stage), peer=new(f.peer)) for f in moved.faults)
    # What a rank hears from itself cannot be late.
    possible = tuple(f for f in faults if f.kind not in ("stall", "late") or f.stage != f.peer)
    return replace(moved, stages=case.stages - 1, faults=possible)


def _blocks(block: Block) -> Iterator[Block]:
    half = len(block) // 2
    if half:
        yield block[half:]
        yield block[:half]
    for index, statement in enumerate(block):
        before, after = block[:index], block[index + 1 :]
        yield (*before, *after)
        for simpler in _statements(statement):
            yield (*before, *simpler, *after)


def _without_two(case: Case) -> Iterator[Case]:
    """The case without two of its statements; what a deleted loop or branch holds goes with it."""
    for index, request in enumerate(case.requests):
        for position, (name, block) in enumerate(request.blocks):
            seen: set[Block] = set()
            for one in _less(block):
                for two in _less(one):
                    if two and two not in seen:
                        seen.add(two)
                        blocks = list(request.blocks)
                        blocks[position] = (name, two)
                        yield _put(case, index, replace(request, blocks=tuple(blocks)))


def _less(block: Block) -> Iterator[Block]:
    """The block without one of its statements, however deep."""
    for index, statement in enumerate(block):
        before, after = block[:index], block[index + 1 :]
        yield (*before, *after)
        if isinstance(statement, If | For):
            for body in _less(statement.body):
                if body:
                    yield (*before, replace(statement, body=body), *after)


def _statements(statement: Statement) -> Iterator[Block]:
    if isinstance(statement, If | For):
        yield statement.body
        for body in _blocks(statement.body):
            if body:
                yield (replace(statement, body=body),)
    if isinstance(statement, For):
        if statement.steps is not None or statement.stop is not None:
            yield (replace(statement, steps=None, stop=None),)
        if statement.start:
            yield (replace(statement, start=0),)
    for field in fields(statement):
        value = getattr(statement, field.name)
        if field.name in NUMBERS and value > 1:
            yield (_changed(statement, {field.name: 1}),)
        elif field.name == "slot" and value:
            yield (_changed(statement, {field.name: 0}),)


def canonical(case: Case) -> Case:
    """The case with names a, b, ... and labels x, y, ... in the order in which they come."""
    requests: list[Request] = []
    shared = {label: label for label, _ in case.containers}
    for number, request in enumerate(case.requests):
        names: dict[str, str] = {}
        labels = dict(shared)
        blocks = tuple((name, _renamed(block, names, labels)) for name, block in request.blocks)
        requests.append(replace(request, name="ABCDEF"[number], blocks=blocks))
    new = {old.name: new.name for old, new in zip(case.requests, requests, strict=True)}
    faults = tuple(replace(f, request=new.get(f.request, "")) for f in case.faults)
    return replace(case, requests=tuple(requests), faults=faults)


def _renamed(block: Block, names: dict[str, str], labels: dict[str, str]) -> Block:
    found: list[Statement] = []
    for statement in block:
        changed: dict[str, object] = {}
        # What a statement uses comes before what it makes.
        for field in sorted(fields(statement), key=lambda field: field.name == "name"):
            value = getattr(statement, field.name)
            if field.name in NAMES:
                changed[field.name] = names.setdefault(value, "abcdefghijklmnopqrst"[len(names)])
            elif field.name in LABELS:
                changed[field.name] = labels.setdefault(value, "xyzuvwst"[len(labels)])
            elif field.name == "body":
                changed[field.name] = _renamed(value, names, labels)
        found.append(_changed(statement, changed))
    return tuple(found)


# --- shrinking ------------------------------------------------------------------------------------


def witnesses(case: Case, how: Strategy) -> bool:
    """Whether a failing run is due to the bug that is planted, if one is: without it, it passes."""
    with mutants.lifted() as any_planted:
        return not any_planted or fuzz.execute(case, how).failure is None


class _OutOfTries(Exception):
    pass


def _wrong(failure: Failure) -> tuple[str, type[BaseException | None]]:
    """What is wrong: the property, and for a crash the kind of error."""
    return failure.name, type(failure.cause)


class _Shrinker:
    def __init__(self, found: Finding, tries: int, progress: Callable[[str], None] | None) -> None:
        self.best = found
        self.wrong = _wrong(found.failure)
        self.tries = tries
        self.progress = progress

    def fails(self, case: Case, switches: Sequence[Switch], drawn: int = 0) -> bool:
        """Try a case; where it still fails it is the best now."""
        hows: list[Callable[[], Strategy]] = [lambda: Switches(switches)]
        if switches:
            hows.append(Switches)
        for seed in range(drawn):
            hows.append(partial(POS if seed % 2 else RandomWalk, seed))
        for how in hows:
            if self.tries <= 0:
                raise _OutOfTries
            self.tries -= 1
            failure = fuzz.execute(case, how()).failure
            if failure is not None and _wrong(failure) == self.wrong and witnesses(case, how()):
                _, found = fuzz.record(case, how())
                assert found is not None
                self.best = found
                return True
        return False

    def shrink_case(self, drawn: int) -> bool:
        """Deletions, until none works; whether one did."""
        any_worked, again = False, True
        while again:
            again = False
            for case in smaller(self.best.case):
                if weight(case) < weight(self.best.case) and self.fails(
                    case, self.best.switches, drawn
                ):
                    any_worked = again = True
                    if self.progress is not None:
                        self.progress(f"shrunk to {length(self.best)}")
                    break
        return any_worked

    def shrink_switches(self) -> None:
        """No switch, or any single one, or what delta debugging leaves."""
        case, switches = self.best.case, self.best.switches
        if not switches or self.fails(case, ()):
            return
        self.debug()
        if len(self.best.switches) > 1 and self.tries > 0:
            for one in alternatives(case, ()):
                if self.fails(case, [one]):
                    return
        if len(self.best.switches) > 2:
            for first in self.best.switches:
                for one in alternatives(case, [first]):
                    if self.fails(case, [first, one]):
                        return

    def delete_pairs(self) -> bool:
        """Where no single statement can go, two may; whether two did."""
        case, switches = self.best.case, self.best.switches
        return any(self.fails(less, switches, _DRAWN // 4) for less in _without_two(case))

    def shrink_once(self) -> None:
        """Single deletions, under the schedule at hand and under drawn ones, and then its switches."""
        self.shrink_case(0)
        self.shrink_case(_DRAWN)
        self.shrink_switches()

    def start_elsewhere(self) -> None:
        """Deletions end where no single one works: another case that fails alike may end lower."""
        for seed in range(_ELSEWHERE):
            if length(self.best) <= _SHORT:
                return
            case, before = generate.case(seed), self.best
            if statements(case) <= _BLOCK and self.fails(case, (), 2):
                self.shrink_once()
                if length(self.best) >= length(before):
                    self.best = before

    def start_small(self) -> None:
        """Deletions can end in a failure that is small for its kind only: try what is smaller still."""
        for count in range(1, 3 if length(self.best) > 3 else 0):
            for case in small.programs(self.best.case, count):
                if self.fails(case, (), _DRAWN // 4):
                    self.shrink_switches()
                    return

    def debug(self) -> None:
        """Delta debugging of the switches: leave out ever smaller parts."""
        part = max(1, len(self.best.switches) // 2)
        while True:
            start, worked = 0, False
            while start < len(self.best.switches):
                switches = self.best.switches
                left = [*switches[:start], *switches[start + part :]]
                before = len(switches)
                if self.fails(self.best.case, left) and len(self.best.switches) < before:
                    worked = True
                else:
                    start += part
            if part == 1 and not worked:
                return
            part = max(1, part // 2)


def shrink(
    found: Finding, *, tries: int = 4000, progress: Callable[[str], None] | None = None
) -> Finding:
    """A smaller case, and few switches for it, that fail in the same property.

    Args:
        tries: the most runs that this may take.
        progress: told how small it is by now.
    """
    shrinker = _Shrinker(found, tries, progress)
    try:
        shrinker.shrink_once()
        shrinker.start_elsewhere()
        while (
            any(shrinker.shrink_case(drawn) for drawn in (0, 4 * _DRAWN)) or shrinker.delete_pairs()
        ):
            shrinker.shrink_switches()
        shrinker.start_small()
    except _OutOfTries:
        # The case may have had all of them: its schedule is not left as it was drawn.
        shrinker.tries = tries // 4
        with suppress(_OutOfTries):
            shrinker.debug()
    # Names change nothing, so this takes a run or two, however many it took to get here.
    shrinker.tries = 2
    shrinker.fails(canonical(shrinker.best.case), shrinker.best.switches)
    return shrinker.best


class _Alternatives:
    """The strategy `Switches`, noting which further single switches there are."""

    def __init__(self, switches: Sequence[Switch]) -> None:
        self._inner = Switches(switches)
        self._base = Base()
        self.found: list[Switch] = []

    def choose(self, world: World) -> int:
        runnable = world.runnable
        expected = runnable[self._base.position(world)]
        steps = self._base.steps.get(expected.number, 0)
        position = self._inner.choose(world)
        for other, task in enumerate(runnable):
            if task is not expected and other != position:
                self.found.append(Switch(expected.name, steps, task.name))
        self._base.moved(runnable[position])
        return position


def alternatives(case: Case, switches: Sequence[Switch]) -> list[Switch]:
    """Every single switch that could be added to this schedule of a case."""
    how = _Alternatives(switches)
    fuzz.execute(case, how)
    return how.found
