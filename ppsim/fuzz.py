"""Fuzzing: generated cases under drawn schedules, until the time or the count is up.

Execution ``n`` of a fuzz run with seed ``s`` is a pure function of ``s + n``: the case, the strategy
and its seed follow from that number alone, so a number is a replay token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import cases, generate, terms, world
from .blocks import OutOfFuel
from .cases import Case
from .failures import Crash, Failure
from .strategies import PCT, DelayBounding, RandomWalk
from .world import Strategy, World

#: Strategy names, in the order in which executions take turns.
STRATEGIES = ("walk", "pct", "walk", "delay")


@dataclass(frozen=True)
class Finding:
    """A failing execution."""

    seed: int
    case: Case
    failure: Failure
    schedule: tuple[str, ...]


def strategy(name: str, seed: int) -> Strategy:
    """A strategy by name."""
    if name == "pct":
        return PCT(seed, depth=1 + seed % 4)
    if name == "delay":
        return DelayBounding(seed, delays=seed % 6)
    return RandomWalk(seed)


def strategy_of(seed: int) -> Strategy:
    """The strategy of an execution."""
    return strategy(STRATEGIES[seed % len(STRATEGIES)], seed)


def endless(failure: Failure | None) -> bool:
    """Whether a run means nothing because a block of the case does not end by itself."""
    return isinstance(failure, Crash) and isinstance(failure.cause, OutOfFuel)


def execute(case: Case, how: Strategy, *, record: bool = False) -> World:
    """Run a case; the failure is in the world, None where the case means nothing."""
    done = world.run(case, how, record=record)
    if endless(done.failure):
        done.failure = None
    return done


def executions(
    seed: int, count: int | None = None, seconds: float | None = None, *, faults: bool = True
) -> Iterator[tuple[int, World]]:
    """Executions ``seed``, ``seed + 1``, ... until the count or the time is up."""
    end = time.monotonic() + seconds if seconds is not None else None
    number = 0
    while count is None or number < count:
        if end is not None and time.monotonic() >= end:
            return
        found = generate.case(seed + number, faults=faults)
        yield seed + number, execute(found, strategy_of(seed + number))
        number += 1


def finding(seed: int, *, faults: bool = True) -> Finding | None:
    """Execution ``seed`` again, recorded."""
    case = generate.case(seed, faults=faults)
    with terms.recording():
        done = execute(case, strategy_of(seed), record=True)
    if done.failure is None:
        return None
    return Finding(seed, case, done.failure, tuple(done.schedule))


def shrink(
    found: Finding, *, tries: int = 400, progress: Callable[[str], None] | None = None
) -> Finding:
    """A smaller case, and a schedule for it, that fail in the same property."""
    from .shrink import shrink_case

    name = found.failure.name

    def fails(case: Case) -> Finding | None:
        for attempt in range(24):
            how: Strategy
            if attempt == 0:
                from .strategies import Replay

                how = Replay(found.schedule, lenient=True)
            else:
                how = strategy_of(found.seed + attempt * 7 if attempt % 2 else attempt)
            with terms.recording():
                done = execute(case, how, record=True)
            if done.failure is not None and done.failure.name == name:
                return Finding(found.seed, case, done.failure, tuple(done.schedule))
        return None

    return shrink_case(found, fails, tries, progress)


def describe(found: Finding) -> str:
    """A finding as text: what failed, the case, and its schedule."""
    return (
        f"{found.failure}\n\n{cases.spell(found.case)}\n"
        f"# schedule ({len(found.schedule)} events): {' '.join(found.schedule)}\n"
    )
