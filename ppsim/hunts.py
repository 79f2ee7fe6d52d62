"""Looking for planted bugs: after how many executions one is found, and how often by each strategy.

A failing execution is run again without the bug: one that fails then too says nothing about the
mutant, and is passed over. So a broken core does not pass for a fuzzer that finds everything.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from . import fuzz, generate
from .mutants import Mutant, planted


@dataclass(frozen=True)
class Hunt:
    """How a mutant was looked for.

    Attributes:
        executions: how many there were, the one that found it included.
        property: what failed.
        number: of the execution that found it, -1 if none did.
    """

    mutant: str
    killed: bool
    executions: int
    seconds: float
    property: str = ""
    number: int = -1


def hunt(mutant: Mutant, *, executions: int = 2000, seconds: float = 10.0, first: int = 0) -> Hunt:
    """Fuzz the code with the bug in it until a property fails that holds without it.

    Given up after so many executions and so long, whichever comes last.

    Args:
        executions: the fewest before it is given up.
        seconds: the same, of this process's own time, so that a busy machine changes nothing.
        first: the number of the first execution.
    """
    with fuzz.in_mode(mutant.mode):
        return _hunt(mutant, executions, seconds, first)


def _hunt(mutant: Mutant, executions: int, seconds: float, first: int) -> Hunt:
    began = time.process_time()
    count = 0
    while count < executions or time.process_time() - began < seconds:
        suspect = None
        with planted(mutant):
            for number, done in fuzz.executions(first + count):
                count += 1
                if done.failure is not None:
                    suspect = (number, done.failure.name)
                    break
                if count >= executions and time.process_time() - began >= seconds:
                    break
        if suspect is None:
            break
        number, name = suspect
        if fuzz.execution(number).failure is None:
            return Hunt(mutant.name, True, count, time.process_time() - began, name, number)
    return Hunt(mutant.name, False, count, time.process_time() - began)


@dataclass(frozen=True)
class Rate:
    """How often a strategy finds a mutant.

    Attributes:
        hits: runs that failed.
        runs: runs that there were.
    """

    hits: int
    runs: int

    @property
    def share(self) -> float:
        """Hits a run."""
        return self.hits / self.runs if self.runs else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies with 95% confidence.

        Wilson, Probable Inference, the Law of Succession, and Statistical Inference (JASA 1927): it
        stays within 0 and 1, and says something where no run hit.
        """
        n, z = self.runs, 1.96
        if not n:
            return 0.0, 1.0
        middle = (self.share + z * z / (2 * n)) / (1 + z * z / n)
        half = (
            z / (1 + z * z / n) * math.sqrt(self.share * (1 - self.share) / n + (z / (2 * n)) ** 2)
        )
        return max(0.0, middle - half), min(1.0, middle + half)


def rate(mutant: Mutant, strategy: str, *, runs: int, first: int = 0) -> Rate:
    """Run cases ``first``, ``first + 1``, ... under one strategy, and count those that fail.

    A strategy that has to know a run's events measures them in a run under the base schedule, which
    is not counted.
    """
    hits = 0
    with planted(mutant), fuzz.in_mode(mutant.mode):
        for number in range(first, first + runs):
            case = generate.case(number)
            events = 0
            if strategy in fuzz.MEASURED:
                events = fuzz.execute(case, fuzz.strategy("base", 0)).events
            done = fuzz.execute(case, fuzz.strategy(strategy, 8 * number, events))
            hits += done.failure is not None
    return Rate(hits, runs)
