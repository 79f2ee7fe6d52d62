"""Exhaustive: every schedule of a small case, by the graph of its states."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ... import cases
from ...cases import Case
from ...failures import Failure
from .footprint import Granted, Grants, Unsound
from .search import Cut, Search


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


def explore(
    name: str,
    case: Case,
    *,
    seconds: float = 60.0,
    states: int = 5_000_000,
    reduce: bool = True,
    window: int | None = None,
) -> Exploration:
    """Visit every state of a case."""
    began = time.process_time()
    found = Exploration(name, Verdict.UNDETERMINED)
    grants = Grants(
        deaths=any(fault.kind == "die" for fault in case.faults),
        raises=any(fault.kind == "raise" for fault in case.faults),
    )
    while True:
        search = Search(
            case, reduce=reduce, grants=grants, window=window, end=began + seconds, limit=states
        )
        graph = search.graph
        try:
            search.run()
        except Granted as what:
            grants = replace(grants, **{str(what): True})
            continue
        except (Cut, Unsound) as error:
            found.reason = f"cut: {error}"
        else:
            if graph.failure is not None:
                found.verdict, found.failure, found.schedule = (
                    Verdict.REFUTED,
                    graph.failure,
                    graph.schedule,
                )
                found.reason = str(graph.failure).splitlines()[0]
            else:
                found.verdict = Verdict.PROVED
        break
    found.states = len(graph.edges)
    found.edges = sum(map(len, graph.edges))
    if found.verdict is Verdict.PROVED:
        found.diameter = _diameter(graph.edges)
        found.interleavings = _paths(graph.edges)
    found.seconds = time.process_time() - began
    found.search = search
    return found


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
