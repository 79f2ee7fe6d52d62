"""Exhaustive: every schedule of a small case, by the graph of its states.

Stateful model checking by re-execution, after Godefroid, Model Checking for Programming Languages
using VeriSoft (POPL 1997), with the states hashed as in Holzmann's SPIN. Guarantee: PROVED means
that every reachable state was visited and no property fails in any schedule of that case (up to a
collision of 64-bit state digests); a search that was cut is UNDETERMINED and never "passed".

A state is what can matter later: each rank's core, its link, the channels, the engine, and each
thread's own state. A thread's own state cannot be read off a generator; it follows from where its
frames stand, from what it has learnt from the core so far, and from how far it got since. What it
learnt for the moment only (effects that it is carrying out) counts while it does so.
"""

from __future__ import annotations

import enum
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from ppcore.core import Core

from .. import cases
from ..cases import Case
from ..failures import Crash, Failure, Liveness
from ..world import Task, World

#: Calls whose results a thread keeps: names, decisions, numbers.
_LASTING = ("access", "again", "call", "pull", "held")
#: Calls whose results it acts on at once.
_PASSING = ("publish", "release", "fail", "finish", "say_done", "say_held", "open_round", "take")


class Verdict(enum.Enum):
    """How an exploration ended."""

    PROVED = "PROVED"
    REFUTED = "REFUTED"
    UNDETERMINED = "UNDETERMINED"


@dataclass
class Exploration:
    """What an exploration found.

    Attributes:
        diameter: the longest distance of a state from the first.
        interleavings: how many different schedules there are.
        schedule: for REFUTED, one that fails.
    """

    name: str
    verdict: Verdict
    states: int = 0
    edges: int = 0
    diameter: int = 0
    interleavings: int = 0
    seconds: float = 0.0
    reason: str = ""
    failure: Failure | None = None
    schedule: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "name": self.name, "verdict": self.verdict.value, "states": self.states,
            "edges": self.edges, "diameter": self.diameter, "interleavings": self.interleavings,
            "seconds": round(self.seconds, 3), "reason": self.reason,
        }  # fmt: skip


class Watched(World):
    """A world that keeps, for each task, what its thread has learnt from the core."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.moving: Task | None = None
        self.learnt: dict[int, int] = {}
        self.passing: dict[int, int] = {}
        self.since: dict[int, int] = {}
        for rank in self.ranks.values():
            for name in _LASTING:
                self._watch(rank.core, name, lasting=True)
            for name in _PASSING:
                self._watch(rank.core, name, lasting=False)

        # A thread that starts and finds nothing to do commutes with everything.
        for task in self.tasks:
            if task.name[0] in "lf":
                self.step(self.runnable.index(task))
        self.hash = 0

    def _watch(self, core: Core, name: str, *, lasting: bool) -> None:
        original = getattr(core, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            task = self.moving
            if task is not None:
                number = task.number
                self.since[number] = 0
                kept = result[0] if name == "pull" else result
                if lasting:
                    self.learnt[number] = hash((self.learnt.get(number, 0), repr(kept)))
                passing = result[1] if name == "pull" else result
                self.passing[number] = 0 if lasting and name != "pull" else hash(repr(passing))
            return result

        setattr(core, name, watched)

    def step(self, position: int) -> None:
        task = self.moving = self.runnable[position]
        self.since[task.number] = self.since.get(task.number, 0) + 1
        super().step(position)
        self.moving = None

    def digest(self) -> int:
        """The state."""
        parts: list[Any] = []
        for task in self.tasks:
            chain, inner = _frames(task.generator)
            number = task.number
            passing = self.passing.get(number, 0) if "carry_out" in inner else 0
            parts.append(
                (number, chain, task.wait is None, self.learnt.get(number, 0), passing,
                 self.since.get(number, 0))
            )  # fmt: skip
        for where, rank in self.ranks.items():
            link = rank.link
            parts.append(
                (where, _core(rank.core), tuple(sorted(link.landed)), tuple(sorted(link.refused)),
                 tuple((owner, key) for owner, key, _ in link.lost), len(rank.inbox),
                 rank.commands, rank.idle, tuple(rank.visited.items()), tuple(rank.carried))
            )  # fmt: skip
        for name, channel in self.channels.items():
            parts.append((name, repr([message for message, _ in channel])))
        engine = self.engine
        parts.append(
            (len(engine.commands), len(engine._results), engine._in_flight, tuple(engine._finished),
             repr(engine._collected), tuple(sorted(engine.outcomes)), tuple(sorted(self.dead)),
             hash(repr(engine.commands)))
        )  # fmt: skip
        return hash(tuple(parts))


def _frames(generator: Any) -> tuple[tuple[int, ...], set[str]]:
    chain: list[int] = []
    names: set[str] = set()
    while generator is not None and getattr(generator, "gi_frame", None) is not None:
        chain.append(generator.gi_frame.f_lasti)
        names.add(generator.__name__)
        generator = generator.gi_yieldfrom
    return tuple(chain), names


def _core(core: Core) -> tuple[Any, ...]:
    found: list[Any] = [core.round, tuple(sorted(core.dead)), tuple(sorted(core._asked))]
    for name, state in sorted(core._requests.items()):
        found.append(
            (name, tuple(state.rounds), state.ended, state.said_done, tuple(sorted(state.done)),
             tuple(sorted(state.held)),
             tuple((b, w.clock, w.next_access, w.finished) for b, w in state.workers.items()),
             tuple(sorted((key, tuple(sorted(e.peers))) for key, e in state.buffer.items())),
             tuple(sorted((key, tuple(sorted(p))) for key, p in state.released.items())),
             tuple(sorted((key, tuple((p, m.number) for p, m in w))
                          for key, w in state.waiting.items())))
        )  # fmt: skip
    return tuple(found)


def explore(
    name: str, case: Case, *, seconds: float = 60.0, states: int = 2_000_000
) -> Exploration:
    """Visit every state of a case."""
    began = time.monotonic()
    found = Exploration(name, Verdict.UNDETERMINED)
    graph: dict[int, list[int]] = {}
    first = Watched(case).digest()
    stack: list[tuple[int, ...]] = [()]
    while stack:
        if time.monotonic() - began > seconds or len(graph) > states:
            found.reason = f"cut after {time.monotonic() - began:.0f} s"
            break
        prefix = stack.pop()
        failure, schedule = _descend(case, prefix, graph, stack)
        if failure is not None:
            found.verdict, found.failure, found.schedule = Verdict.REFUTED, failure, schedule
            found.reason = str(failure).splitlines()[0]
            break
    else:
        found.verdict = Verdict.PROVED
    found.states = len(graph)
    found.edges = sum(map(len, graph.values()))
    if found.verdict is Verdict.PROVED:
        found.diameter = _diameter(graph, first)
        found.interleavings = _paths(graph, first)
    found.seconds = time.monotonic() - began
    return found


def _descend(
    case: Case, prefix: tuple[int, ...], graph: dict[int, list[int]], stack: list[tuple[int, ...]]
) -> tuple[Failure | None, list[str]]:
    """Run ``prefix``, then on along first choices until a known state; note what else there is."""
    world = Watched(case)
    path: list[int] = []
    names: list[str] = []

    def move(position: int) -> None:
        path.append(position)
        names.append(world.runnable[position].name)
        world.step(position)

    try:
        for position in prefix[:-1]:
            move(position)
        before = world.digest() if prefix else None
        if prefix:
            move(prefix[-1])
        while True:
            here = world.digest()
            if before is not None:
                graph[before].append(here)
            if here in graph:
                return None, names
            graph[here] = []
            count = len(world.runnable)
            if not count:
                world.properties.at_rest()
                return None, names
            stack += [(*path, other) for other in range(1, count)]
            before = here
            move(0)
            if world.events > world.limit:
                raise Liveness("ends", "still running")
    except Failure as failure:
        return failure, names
    except Exception as error:
        return Crash("crash", f"{type(error).__name__}: {error}", error), names
    finally:
        for task in world.tasks:
            task.generator.close()


def _diameter(graph: dict[int, list[int]], first: int) -> int:
    frontier, seen, depth = [first], {first}, 0
    while True:
        following: list[int] = []
        for state in frontier:
            for other in graph[state]:
                if other not in seen:
                    seen.add(other)
                    following.append(other)
        if not following:
            return depth
        frontier, depth = following, depth + 1


def _paths(graph: dict[int, list[int]], first: int) -> int:
    """How many ways lead from the first state to an end; the graph has no cycle."""
    counts: dict[int, int] = {}
    stack = [first]
    while stack:
        state = stack[-1]
        missing = [other for other in graph[state] if other not in counts]
        if missing and state not in counts:
            stack += missing
            if len(stack) > 10 * len(graph) + sys.getrecursionlimit():
                raise AssertionError("a cycle of states")
            continue
        stack.pop()
        counts[state] = sum(counts[other] for other in graph[state]) or 1
    return counts[first]


def _small(stages: int, tokens: int, body: str, extra: str = "") -> Case:
    return cases.parse(
        f"stages {stages} columns 1 layers 1 shared 0 batching 0\n"
        f"request A tokens {tokens}\n{body}{extra}"
    )


_KEEP = "  for :\n    a = read L{0}.out\n    save x a\n"
_SAVE = "  a = read L{0}.out\n  save x a\n"
_FORCE = "  a = read L{0}.out\n  if a\n    save x a\n"

#: What ``ppsim explore`` explores. Sizes are what this implementation finishes within a minute.
CONFIGURATIONS: dict[str, Case] = {
    "2x1-save": _small(2, 1, _SAVE.format(1)),
    "2x1-force-earlier": _small(2, 1, _FORCE.format(0)),
    "2x1-force-later": _small(2, 1, _FORCE.format(1)),
    "2x2-force-later": _small(2, 2, _FORCE.format(1)),
    "2x2-loop": _small(2, 2, _KEEP.format(0)),
    "2x8-loop": _small(2, 8, _KEEP.format(0)),
    "3x1-save": _small(3, 1, _SAVE.format(1)),
    "2x1-crash": _small(2, 1, _SAVE.format(0), "fault die 0 0 0\n"),
}
