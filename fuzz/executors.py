"""One program, several executors: where it can run, and whether it comes home the same.

An [`Executor`][fuzz.executors.Executor] runs a case and says where what came home is not what one rank
gives. They take the same cases and, with one model, give the same numbers:

===========  =======================================================================================
`Reference`  plain nnsight on one rank, in this process: what the others are compared with
`Sim`        the core under the simulator; its values are terms, so it has a reference of its own
`Real`       the real runtime under the simulator's schedules
`Gloo`       the real runtime in real processes over gloo
`engines`    real vLLM engines, one a layout; their model is a Llama, so they have a reference of
             their own, the engine of one stage
===========  =======================================================================================

All requests of a case arrive together and are batched whenever they can be: who shares a step with whom
shows in nnsight itself (a replacement for one request's rows makes a new tensor for all). A further
executor needs a `ppsim.real.translate.Target`, if its model is another one, and a client that sends
`ppsim.real.execute.payload`'s blocks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ppsim import fuzz as core
from ppsim import generate, real
from ppsim.cases import Case
from ppsim.real import execute, translate
from ppsim.real.outcome import Outcome, difference, outcome_of
from ppsim.real.stage import Whole
from ppsim.strategies import RandomWalk
from tests.harness import cluster as processes
from tests.harness.record import become
from tests.harness.stage import Job
from tests.harness.stage import Stage as Process

from . import engines

#: Request -> what its client gets.
Outcomes = dict[str, Outcome]


class Executor(Protocol):
    """Where a case runs."""

    def fits(self, case: Case) -> bool:
        """Whether it can run this case."""

    def differs(self, case: Case, expected: Outcomes, seed: int) -> str | None:
        """Run the case; where what comes home is not ``expected``, None where it is.

        Args:
            seed: of the schedule, where the executor has one.
        """

    def close(self) -> None:
        """Stop what was started."""


def shared(case: Case) -> Case:
    """The case as all executors can run it."""
    return replace(execute.plain(case), batching=0)


def jobs(case: Case, prefix: str = "") -> list[Job]:
    """The requests of a case, as a column's loop takes them."""
    blocks = execute.payloads(case)
    return [
        Job(
            f"{prefix}{request.name}",
            blocks[request.name].get(""),
            translate.prompt(case, request),
            request.tokens,
            edits={name: block for name, block in blocks[request.name].items() if name},
            ignore_eos=request.ignore_eos,
        )
        for request in case.requests
    ]


class Reference:
    """Plain nnsight on one rank, driven by the loop that drives each process of `Gloo`."""

    def __init__(self) -> None:
        self._ranks: dict[execute.Shape, Process] = {}

    def outcomes(self, case: Case) -> Outcomes:
        """What the client of each request gets."""
        shape = execute.shape(case)
        if shape not in self._ranks:
            self._ranks[shape] = Process(rank=Whole(execute.model(shape)))
        return _named(processes.outcomes([self._ranks[shape].run(jobs(case))]))


def _named(found: dict[str, processes.Outcome], prefix: str = "") -> Outcomes:
    return {
        name.removeprefix(prefix): outcome_of(
            {"saves": one.saves, "registered": one.registered, "error": one.error},
            one.tokens,
            [tuple(warned) for warned in one.warnings],
        )
        for name, one in found.items()
    }


def _first(found: Outcomes, expected: Outcomes) -> str | None:
    for name, outcome in expected.items():
        wrong = difference(found[name], outcome)
        if wrong is not None:
            return f"{name} {wrong}"
    return None


class Sim:
    """The core under the simulator."""

    def fits(self, case: Case) -> bool:
        return True

    def differs(self, case: Case, expected: Outcomes, seed: int) -> str | None:
        failure = core.execute(case, RandomWalk(seed)).failure
        return None if failure is None else str(failure)

    def close(self) -> None:
        pass


class Real:
    """The real runtime under the simulator's schedules."""

    def fits(self, case: Case) -> bool:
        return True

    def differs(self, case: Case, expected: Outcomes, seed: int) -> str | None:
        world = real.run(case, RandomWalk(seed))
        if world.failure is not None:
            return str(world.failure)
        return _first(world.outcomes, expected)

    def close(self) -> None:
        pass


class Gloo:
    """Real processes over gloo, a column for each number of stages.

    Args:
        most: the most stages that a case may have.
    """

    def __init__(self, most: int = 3) -> None:
        self._most = most
        self._stack = ExitStack()
        self._columns: dict[int, processes.Cluster] = {}
        self._shapes: dict[int, execute.Shape] = {}

    def fits(self, case: Case) -> bool:
        return case.stages <= self._most

    def differs(self, case: Case, expected: Outcomes, seed: int) -> str | None:
        column, prefix = self._column(case), f"{seed}."
        return _first(_named(column.serve(jobs(case, prefix)), prefix), expected)

    def _column(self, case: Case) -> processes.Cluster:
        stages = case.stages
        if stages not in self._columns:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            column = self._columns[stages] = processes.Cluster(stages, Path(folder))
            self._stack.callback(column.stop)
            column.wait_ready()
        if self._shapes.get(stages) != execute.shape(case):
            self._shapes[stages] = execute.shape(case)
            self._columns[stages].each(become, execute.shape(case))
        return self._columns[stages]

    def close(self) -> None:
        self._stack.close()


EXECUTORS: dict[str, Callable[[], Executor]] = {"sim": Sim, "real": Real, "gloo": Gloo}
#: The name that stands for one executor a layout.
ENGINES = "vllm"


@dataclass
class Tally:
    """What an executor did.

    Attributes:
        seconds: that it ran for.
        failures: programs that it ran otherwise than one rank does.
    """

    programs: int = 0
    failures: int = 0
    seconds: float = 0.0

    @property
    def per_minute(self) -> float:
        """Programs a minute."""
        return 60 * self.programs / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Found:
    """A case that an executor runs otherwise than one rank does."""

    executor: str
    seed: int
    case: Case
    text: str


@dataclass
class Comparison:
    """Programs on the reference and on some executors."""

    executors: dict[str, Executor]
    reference: Reference = field(default_factory=Reference)

    def __post_init__(self) -> None:
        self.tallies = {name: Tally() for name in ("reference", *self.executors)}

    def cases(self, seeds: Iterator[int]) -> Iterator[tuple[int, Case]]:
        """Generated cases that mean something everywhere."""
        for seed in seeds:
            case = shared(generate.case(seed, faults=False))
            fit = translate.ends(case) and not translate.known_to_differ(case)
            if fit and any(request.blocks for request in case.requests):
                yield seed, case

    def run(self, seed: int, case: Case) -> Found | None:
        """Run a case everywhere; the first difference."""
        with self._timed("reference"):
            expected = self.reference.outcomes(case)
        for name, executor in self.executors.items():
            if executor.fits(case):
                with self._timed(name):
                    text = executor.differs(case, expected, seed)
                if text is not None:
                    self.tallies[name].failures += 1
                    return Found(name, seed, case, text)
        return None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.tallies[name].seconds += time.monotonic() - began
        self.tallies[name].programs += 1


@contextmanager
def started(names: Sequence[str], layouts: Sequence[str] = ("pp2",)) -> Iterator[Comparison]:
    """A comparison of the executors of these names.

    Args:
        layouts: of the engines, if they are among them.
    """
    with ExitStack() as stack:
        executors: dict[str, Executor] = {}
        for name in names:
            if name in EXECUTORS:
                executors[name] = EXECUTORS[name]()
                stack.callback(executors[name].close)
        if ENGINES in names:
            found = engines.started(layouts, stack)
            executors |= {f"{ENGINES}-{layout}": engine for layout, engine in found.items()}
        yield Comparison(executors)


__all__ = ["Comparison", "Executor", "Found", "Gloo", "Real", "Reference", "Sim", "started"]
