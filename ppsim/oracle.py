"""The reference: one rank runs the same program, by nnsight's own rules.

This asks neither `ppcore.Core` nor its seat: visits are counted as nnsight's `Interleaver` counts
them, a parked access is served when location and occurrence match, and what is still parked at the
end is out of order, or a loop cut short. From the simulated run it takes where the engine preempted,
and how many turns a request had that was ended from outside, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .blocks import (
    FUEL,
    NONE,
    Access,
    BlockRaised,
    BlockStopped,
    Force,
    Frame,
    OutOfOrder,
    Parameter,
    Use,
    Want,
)
from .cases import Case, Request, visits
from .engine import Progress, feed
from .programs import Block
from .terms import CALL, LAYER, LOGITS, RESULT, SAMPLE, SHARED, is_recording, term
from .values import Box, Node, Visit, parameter


@dataclass(frozen=True)
class Expected:
    """What one rank gives.

    Attributes:
        saves: ``sequence/block/label`` -> the shape of what was saved, and the terms of its leaves.
        parts: for each cache, location -> the terms of its visits.
        error: how the request failed, None if it did not.
        endings: sequence -> block -> how it ended.
        tokens: sequence -> what was sampled.
    """

    saves: dict[str, tuple[str, list[int]]]
    parts: list[dict[str, list[int]]]
    error: str | None
    endings: dict[str, dict[str, str]]
    tokens: dict[str, list[int]]


class Went(NamedTuple):
    """What the reference takes from a sequence of the simulated run.

    Attributes:
        number: its position among all sequences.
        recomputed: the turns before which it was preempted.
        turns: how many it had, where it was ended from outside; None otherwise.
        aborted: whether its client went away.
    """

    number: int
    recomputed: frozenset[int]
    turns: int | None
    aborted: bool


class Lone(Frame):
    """A block on a single rank."""

    def __init__(
        self,
        name: str,
        block: Block,
        counts: dict[str, int],
        containers: Mapping[str, int] = NONE,
    ) -> None:
        super().__init__(block, containers)
        self.name = name
        self.counts = counts
        self.pending: Access | None = None
        self.alive = True
        self.exception: Exception | None = None
        self.how = ""
        # The step from which on the block does nothing at some locations, and these.
        self._missing = FUEL
        self._at: frozenset[str] = frozenset()
        self._running = self.run()

    def miss(self, step: int, at: frozenset[str]) -> None:
        """Do nothing at these locations from this step on: the rank that has them raised there."""
        self._missing, self._at = step, at

    def misses(self) -> bool:
        """Whether it is past that step."""
        return FUEL - self.left > self._missing

    def relaxed(self, location: str) -> int:
        return self.counts.get(location, 0)

    def resume(self, value: Box | None) -> None:
        """Run on until the next access."""
        self.pending = None
        try:
            want: Want = self._running.send(value)
            while not isinstance(want, Access):
                want = self._running.send(self._now(want))
            self.pending = want
        except StopIteration:
            self.alive, self.how = False, "done"
        except BlockStopped as error:
            self.alive, self.exception, self.how = False, error, "stop"
        except BlockRaised as error:
            self.alive, self.exception, self.how = False, error, f"raise:{error}"

    def _now(self, want: Force | Use | Parameter) -> Box | None:
        if isinstance(want, Force):
            return None
        if isinstance(want, Parameter):
            return Box(Node(parameter(want.location)))
        return Box(Node(term(CALL, len(want.path), want.node.evaluate())))

    def handle(self, location: str, visit: Visit) -> None:
        """The model is at a visit: serve the worker for as long as it is parked on it."""
        while (
            self.pending is not None
            and self.pending.location == location
            and self.pending.occurrence == self.counts.get(location, 0)
        ):
            access = self.pending
            self.hit()
            if access.node is None:
                if location in self._at:
                    box: Box | None = _Missed(Node(visit.value), visit, self)
                    visit.box = box
                elif visit.box is None:
                    box = visit.box = Box(Node(visit.value), visit)
                else:
                    box = visit.box
            else:
                if not (location in self._at and self.misses()):
                    visit.value = access.node.evaluate()
                visit.box = box = None
            self.resume(box)
        visit.box = None

    def observe(self, location: str, value: int, turn: int) -> None:
        """A visit is over: the block's caches keep its value."""
        for recording in self.recordings.values():
            if recording.keeps(location):
                recording.observe(location, value, turn)

    def unwind(self) -> None:
        """The run is over."""
        if self.alive:
            self.alive = False
            if self.iteration == 0:
                self.exception, self.how = OutOfOrder("order"), "order"
            else:
                self.how = "cut"
            self._running.close()


class _Missed(Box):
    """A value of a rank on which its block may have raised meanwhile."""

    __slots__ = ("lone",)

    def __init__(self, node: Node, visit: Visit, lone: Lone) -> None:
        super().__init__(node, visit)
        self.lone = lone

    def edit(self, node: Node) -> None:
        if self.lone.misses():
            self.visit = None
        super().edit(node)


def expect(
    case: Case,
    request: Request,
    ran: Mapping[str, Progress],
    *,
    fault_at: int = -1,
    stage: int = -1,
) -> Expected:
    """Run one request on one rank.

    Args:
        ran: sequence -> how it went in the simulated run.
        fault_at: the step at which the last block raises of itself; -1 for none.
        stage: the only stage where it does: the block runs on, as it does on the others, and what it
            would do at this one's locations is not done. -1 for all.
    """
    went = tuple(
        Went(
            found.index,
            frozenset(found.recomputed),
            len(found.rounds) if found.cut else None,
            found.aborted,
        )
        for found in map(ran.__getitem__, request.sequences())
    )
    if is_recording():
        return _expect.__wrapped__(
            case, request, went, fault_at, stage
        )  # its terms are to be explained too
    return _expect(case, request, went, fault_at, stage)


@lru_cache(maxsize=64)
def _expect(
    case: Case, request: Request, went: tuple[Went, ...], fault_at: int, stage: int
) -> Expected:
    # Remembered: many schedules of a case expect the same.
    runs = {
        name: _run(case, request, name, ran, fault_at, stage)
        for name, ran in zip(request.sequences(), went, strict=True)
    }
    output = term(*[token for _, progress in runs.values() for token in progress.kept])
    served = not any(ran.aborted for ran in went)
    saves: dict[str, tuple[str, list[int]]] = {}
    parts: list[dict[str, list[int]]] = []
    endings: dict[str, dict[str, str]] = {}
    error = None
    for index, (name, (workers, _)) in enumerate(runs.items()):
        for worker in workers:
            if served and not worker.name and worker.pending is not None:
                worker.handle("result", Visit(term(RESULT, output)))
        for worker in workers:
            worker.unwind()
            failed = worker.exception is not None and not isinstance(worker.exception, BlockStopped)
            if failed and error is None and not (worker.name and worker.how == "order"):
                error = worker.how
            shapes = worker.shapes()
            for label, boxes in worker.leaves().items():
                values = [box.node.evaluate() for box in boxes]
                saves[f"{index}/{worker.name}/{label}"] = (shapes[label], values)
            parts += [worker.recordings[label].values for label in sorted(worker.recordings)]
        endings[name] = {worker.name: worker.how for worker in workers}
    tokens = {name: progress.tokens for name, (_, progress) in runs.items()}
    return Expected(saves, parts, error, endings, tokens)


def _run(
    case: Case, request: Request, name: str, ran: Went, fault_at: int, stage: int
) -> tuple[list[Lone], Progress]:
    """Run one sequence: its workers, still parked where the model left them, and what it sampled."""
    progress = Progress(ran.number, request, recomputed=set(ran.recomputed))
    counts: dict[str, int] = {}
    containers = dict(case.containers)
    workers = [
        Lone(name, block, counts, {} if name else containers) for name, block in request.blocks
    ]
    if workers and fault_at >= 0 and stage < 0:
        workers[-1].fail_at(fault_at)
    elif workers and fault_at >= 0:
        workers[-1].miss(fault_at, frozenset(visits(case)[stage]))
    traced = workers[-1] if request.traced else None
    order = [location for stage in visits(case) for location in stage]
    while ran.turns is None or len(progress.rounds) < ran.turns:
        if not progress.rounds:
            for worker in workers:
                worker.resume(None)
        value = feed(progress)
        progress.rounds.append(len(progress.rounds))
        skipped = 0
        for location in order:
            skip = location.endswith(".skip")
            if not skip:
                value = skipped or _forward(location, value)
            skipped = 0
            visit = Visit(0 if skip else value)
            for worker in workers:
                worker.handle(location, visit)
            if skip:
                skipped = visit.value
            else:
                value = visit.value
                for worker in workers:
                    worker.observe(location, value, len(progress.rounds) - 1)
            counts[location] = counts.get(location, 0) + 1
        erred = traced is not None and traced.exception is not None
        if progress.sampled(value, erred) and ran.turns is None:
            break
    return (workers if progress.rounds else []), progress


def _forward(location: str, value: int) -> int:
    path, _, side = location.rpartition(".")
    if location == "logits":
        return term(LOGITS, value)
    if location == "samples":
        return term(SAMPLE, value)
    if path == "S":
        return term(SHARED, value)
    if side == "out":
        return term(LAYER, int(path[1:]), value)
    return value
