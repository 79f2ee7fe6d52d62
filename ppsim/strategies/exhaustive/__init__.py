"""Exhaustive: every schedule of a small case, by the graph of its states.

Stateful model checking, after Godefroid, Model Checking for Programming Languages using VeriSoft
(POPL 1997), with partial-order reduction by persistent sets (Godefroid, Partial-Order Methods for the
Verification of Concurrent Systems, LNCS 1032). Guarantee: PROVED means that every reachable state of
the case, up to the reduction, was visited, and that no property fails in any schedule. A search that
was cut is UNDETERMINED and never "passed".

*States.* `parts` explores each rank and the engine by itself and remembers what each does with each
input; `search` puts the parts' states together. What a part's state is, `canonical` reads off the
objects that its threads can reach: 128 bits of hash stand for it, and nothing is left out by hand but
constants and counters.

*Reduction.* The graph has no cycle, so a set of steps that no one else can interfere with beforehand
may stand for all steps of a state. Such a set is a single step here, one of these:

* a step of a rank's forward that sends nothing and touches nothing that a listener of this rank can
  touch (`footprint` looks at what it does touch), unless this rank may die and others learn of it;
* the engine's step, while no rank can die: between it and the ranks there are only queues;
* a listener's, where it cannot matter when it comes; see `RankPart.apply`.

A death without any effect that others see before it is the same as one a step earlier. That a block
raises, or a pull is refused while its worker runs, is taken for granted not to happen until it does;
then the search starts again without.

*Ends.* Where nothing can move any more a whole `World` is led along the same schedule, and its checks
decide; one that cannot follow, or comes to another result than the parts, is an error of the search.
``bounded`` looks at other ranks: it is checked at the end of each round, in each state visited.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ... import cases
from ...cases import Case
from ...failures import Failure
from .footprint import Granted, Grants, Unsound
from .search import Cut, Graph, Search


class Verdict(enum.Enum):
    """How an exploration ended."""

    PROVED = "PROVED"
    REFUTED = "REFUTED"
    UNDETERMINED = "UNDETERMINED"


@dataclass
class Exploration:
    """What an exploration found.

    Attributes:
        states: of the whole that were visited.
        edges: steps between them.
        diameter: the longest distance of a state from the first.
        interleavings: how many ways lead from the first state to an end: the number of schedules,
            each step of a thread counted, with those that the reduction tells apart by nothing but
            the order of steps that commute counted once or more. Without reduction it is the number
            of all schedules. Either way a thread's first step, which finds nothing to do, is no part.
        seconds: of processor time.
        schedule: for REFUTED, one that fails.
        ends: the states in which nothing can move, as one digest each.
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
    ends: frozenset[bytes] = frozenset()

    def summary(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "name": self.name, "verdict": self.verdict.value, "states": self.states,
            "edges": self.edges, "diameter": self.diameter, "interleavings": self.interleavings,
            "seconds": round(self.seconds, 3), "reason": self.reason,
        }  # fmt: skip


def explore(
    name: str, case: Case, *, seconds: float = 60.0, states: int = 5_000_000, reduce: bool = True
) -> Exploration:
    """Visit every state of a case.

    Args:
        seconds: of processor time, after which the search is cut.
        states: the most to visit.
        reduce: whether one order of steps that commute may stand for all.

    Raises:
        ValueError: the case has several columns, or a fault other than an error or a death at any time.
    """
    began = time.process_time()
    found = Exploration(name, Verdict.UNDETERMINED)
    grants = Grants(
        deaths=any(fault.kind == "die" for fault in case.faults),
        raises=any(fault.kind == "raise" for fault in case.faults),
    )
    while True:
        search = Search(case, reduce=reduce, grants=grants, end=began + seconds, limit=states)
        try:
            graph = search.run()
        except Granted as what:
            grants = replace(grants, **{str(what): True})
            continue
        except (Cut, Unsound) as error:
            graph = search.graph
            found.reason = f"cut: {error}"
        else:
            _judge(found, graph)
        break
    found.states = len(graph.edges)
    found.edges = sum(map(len, graph.edges))
    found.ends = frozenset(graph.ends)
    found.seconds = time.process_time() - began
    return found


def _judge(found: Exploration, graph: Graph) -> None:
    if graph.failure is not None:
        found.verdict = Verdict.REFUTED
        found.failure, found.schedule = graph.failure, graph.schedule
        found.reason = str(graph.failure).splitlines()[0]
    else:
        found.verdict = Verdict.PROVED
        found.diameter = _diameter(graph.edges)
        found.interleavings = _paths(graph.edges)


def _diameter(edges: list[list[int]]) -> int:
    frontier, seen, depth = [0], bytearray(len(edges)), 0
    seen[0] = 1
    while True:
        following: list[int] = []
        for state in frontier:
            for other in edges[state]:
                if not seen[other]:
                    seen[other] = 1
                    following.append(other)
        if not following:
            return depth
        frontier, depth = following, depth + 1


def _paths(edges: list[list[int]]) -> int:
    """How many ways lead from the first state to an end; the graph has no cycle."""
    counts = [0] * len(edges)
    into = [0] * len(edges)
    for following in edges:
        for other in following:
            into[other] += 1
    counts[0] = 1
    ready, total, visited = [0], 0, 0
    while ready:
        state = ready.pop()
        visited += 1
        count = counts[state]
        counts[state] = 0
        if not edges[state]:
            total += count
        for other in edges[state]:
            counts[other] += count
            into[other] -= 1
            if not into[other]:
                ready.append(other)
    if visited != len(edges):
        raise AssertionError("a cycle of states")
    return total


def _case(stages: int, tokens: int, body: str, extra: str = "", batching: int = 0) -> Case:
    return cases.parse(
        f"stages {stages} columns 1 layers 1 shared 0 batching {batching}\n"
        f"request A tokens {tokens}\n{body}{extra}"
    )


_SAVE = "  a = read L{0}.out\n  save x a\n"
_CALLS = (
    "  a = read L{0}.out\n  n = call N a\n  m = call N n\n  e = call E m\n  if e\n    edit a 1\n"
)
_EARLIER = "  a = read L1.out\n  b = call E a\n  if b\n    save x b\n"
_FORCE = "  a = read L{0}.out\n  if a\n    save x a\n"
#: With it no rank stays behind its forward, for two steps at least.
_BUSY = 80
#: Steps of which one value is looked at, so that those to come are asked for ahead.
_ROW = "  for :\n    a = read {0}\n    if a\n      append out a\n"


def _loop(stages: int, tokens: int, extra: str = "") -> Case:
    """A loop that reads the first and the last stage, edits, forces both ways, and keeps."""
    last = stages - 1
    return _case(
        stages, tokens,
        "  for :\n    a = read L0.out\n    edit a 3\n    if a\n"
        f"      b = read L{last}.out\n      c = mix a b\n      append out c\n"
        "      if c\n        d = read logits\n        save x d\n",
        extra,
    )  # fmt: skip


#: What ``ppsim explore`` explores: stages x rounds.
CONFIGURATIONS: dict[str, Case] = {
    "2x1-save": _case(2, 1, _SAVE.format(1)),
    "2x1-force-earlier": _case(2, 1, _FORCE.format(0)),
    "2x1-force-later": _case(2, 1, _FORCE.format(1)),
    "2x1-force-later-busy": _case(2, 1, _FORCE.format(1), batching=_BUSY),
    "2x2-force-later": _case(2, 2, _FORCE.format(1)),
    "2x1-crash": _case(2, 1, _SAVE.format(0), "fault die 0 0 0\n"),
    "3x1-save": _case(3, 1, _SAVE.format(1)),
    "2x1-call": _case(2, 1, _CALLS.format(0)),
    "3x1-call": _case(3, 1, _CALLS.format(1)),
    "3x1-call-raise": _case(3, 1, _EARLIER, "fault raise 1 0 A 0\n"),
    "2x4-row": _case(2, 4, _ROW.format("L0.out")),
    "2x6-row": _case(2, 6, _ROW.format("L0.out")),
    "2x5-row-late": _case(2, 5, _ROW.format("L1.out")),
    "3x5-row": _case(3, 5, _ROW.format("L1.out")),
    "2x8": _loop(2, 8),
    "3x4": _loop(3, 4),
    "4x4": _loop(4, 4),
    "3x3-crash-first": _loop(3, 3, "fault die 0 0 0\n"),
    "3x3-crash-middle": _loop(3, 3, "fault die 1 0 0\n"),
    "3x3-crash-last": _loop(3, 3, "fault die 2 0 0\n"),
}
