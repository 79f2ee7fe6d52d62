"""Fuzzing: generated cases under drawn schedules, until the time or the count is up.

Execution ``n`` is a pure function of ``n``. Executions come in fours: three run a case of their own, by
random walk, by partial-order sampling, and by either in turn; the fourth runs the third's case again,
under a strategy that has to know how many events a run of it has (PCT, delay bounding).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from . import cases, generate, terms, tokens, world
from .blocks import OutOfFuel
from .cases import Case
from .compiled import needs_sources
from .failures import Crash, Failure
from .strategies import PCT, POS, DelayBounding, RandomWalk, Recorder, Switch, Switches
from .world import Strategy, World

#: The strategies that fuzzing draws from. `base` is the schedule without any preemption.
STRATEGIES = ("walk", "pos", "pct", "delay", "base")
#: Those that need the number of events of a run.
MEASURED = ("pct", "delay")
_UNMEASURED = ("walk", "pos")


@dataclass(frozen=True)
class Finding:
    """A failing run: its case and its schedule, which is told twice.

    Attributes:
        switches: where the run leaves the base schedule; what a token holds.
        schedule: every event, for a replay that notices what changed since.
    """

    case: Case
    failure: Failure
    switches: tuple[Switch, ...]
    schedule: tuple[str, ...]


def strategy(name: str, seed: int, events: int = 0) -> Strategy:
    """A strategy by name.

    Raises:
        KeyError: there is no strategy of this name.
    """
    match name:
        case "walk":
            return RandomWalk(seed)
        case "pos":
            return POS(seed)
        case "pct":
            return PCT(seed, depth=1 + seed // 8 % 4, events=events)
        case "delay":
            return DelayBounding(seed, delays=seed // 8 % 6, events=events)
        case "base":
            return Switches()
    raise KeyError(name)


#: What runs the cases: ``core``, or ``real``, which puts the real runtime in the core's driver's place
#: (see `ppsim.real`).
MODES = ("core", "real")
_mode = "core"


@contextmanager
def in_mode(name: str) -> Iterator[None]:
    """Run cases in this mode, while this lasts."""
    global _mode
    if name == "real":
        needs_sources("the real mode")
    before, _mode = _mode, name
    try:
        yield
    finally:
        _mode = before


def endless(failure: Failure | None) -> bool:
    """Whether a run means nothing because a block of the case does not end by itself."""
    return isinstance(failure, Crash) and isinstance(failure.cause, OutOfFuel)


def execute(case: Case, how: Strategy, *, record: bool = False) -> World:
    """Run a case; the failure is in the world, None where the case means nothing."""
    if _mode == "real":
        from . import real

        return real.run(case, how, record=record)
    done = world.run(case, how, record=record)
    if endless(done.failure):
        done.failure = None
    return done


def case_of(number: int) -> Case:
    """The case of an execution."""
    four, turn = divmod(number, 4)
    return generate.case(3 * four + min(turn, 2))


def strategy_of(number: int, events: int | None = None) -> Strategy:
    """The strategy of an execution.

    Args:
        number: of the execution.
        events: of the execution before, which runs the same case; where a strategy needs that and it
            is not given, it is run.
    """
    four, turn = divmod(number, 4)
    if turn < 3:
        return strategy(_UNMEASURED[turn if turn < 2 else four % 2], number)
    if events is None:
        events = execution(number - 1).events
    return strategy(MEASURED[four % 2], number, events)


def execution(number: int) -> World:
    """Execution ``number``."""
    return execute(case_of(number), strategy_of(number))


def executions(
    first: int, count: int | None = None, seconds: float | None = None
) -> Iterator[tuple[int, World]]:
    """Executions ``first``, ``first + 1``, ... until the count or the time is up."""
    end = time.monotonic() + seconds if seconds is not None else None
    number, events = first, None
    while count is None or number < first + count:
        if end is not None and time.monotonic() >= end:
            return
        # Where the one before was the first run of this case, it has measured it.
        done = execute(case_of(number), strategy_of(number, events if number % 4 == 3 else None))
        events = done.events
        yield number, done
        number += 1


def record(case: Case, how: Strategy) -> tuple[World, Finding | None]:
    """Run a case and write down how it went; a finding where it fails."""
    recorder = Recorder(how)
    with terms.recording():
        done = execute(case, recorder, record=True)
    if done.failure is None:
        return done, None
    found = Finding(case, done.failure, tuple(recorder.switches), tuple(recorder.schedule))
    return done, found


def finding(number: int) -> Finding | None:
    """Execution ``number`` again, recorded."""
    return record(case_of(number), strategy_of(number))[1]


def describe(found: Finding) -> str:
    """A finding as the text of a case file: what failed, the case, its schedule and its token."""
    failure = "".join(f"# {line}\n" for line in str(found.failure).splitlines())
    return (
        f"{failure}{cases.spell(found.case)}"
        f"# switches ({len(found.switches)}): {' '.join(map(str, found.switches))}\n"
        f"# schedule ({len(found.schedule)} events): {' '.join(found.schedule)}\n"
        f"# token: {tokens.encode(found.case, found.switches)}\n"
    )


def load(text: str) -> tuple[Case, tuple[Switch, ...], tuple[str, ...]]:
    """The case, the switches and the schedule of a case file; both are empty where it has none."""
    switches: list[Switch] = []
    schedule: list[str] = []
    for line in text.splitlines():
        if line.startswith("# switches"):
            switches += map(Switch.parse, line.partition(": ")[2].split())
        elif line.startswith("# schedule"):
            schedule += line.partition(": ")[2].split()
    return cases.parse(text), tuple(switches), tuple(schedule)
