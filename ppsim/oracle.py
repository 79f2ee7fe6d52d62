"""The reference: one rank runs the same program, by nnsight's own rules.

This asks neither `ppcore.Core` nor its seat: visits are counted as nnsight's `Interleaver` counts
them, a parked access is served when location and occurrence match, and what is still parked at the
end is out of order, or a loop cut short. From the simulated run it takes the token limit and where
the engine preempted, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import (
    Access,
    BlockRaised,
    BlockStopped,
    Force,
    Frame,
    OutOfOrder,
    Use,
    Want,
)
from .cases import Case, Request, visits
from .engine import Progress, feed
from .programs import Block
from .terms import CALL, LAYER, LOGITS, RESULT, SAMPLE, SHARED, term
from .values import Box, Node, Visit


@dataclass(frozen=True)
class Expected:
    """What one rank gives.

    Attributes:
        saves: ``block/label`` -> the terms of its leaves.
        error: how the request failed, None if it did not.
        endings: block -> how it ended.
        tokens: what was sampled.
    """

    saves: dict[str, list[int]]
    error: str | None
    endings: dict[str, str]
    tokens: list[int]


class Lone(Frame):
    """A block on a single rank."""

    def __init__(self, name: str, block: Block, counts: dict[str, int]) -> None:
        super().__init__(block)
        self.name = name
        self.counts = counts
        self.pending: Access | None = None
        self.alive = True
        self.exception: Exception | None = None
        self.how = ""
        self._running = self.run()

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

    def _now(self, want: Force | Use) -> Box | None:
        if isinstance(want, Force):
            return None
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
                if visit.box is None:
                    visit.box = Box(Node(visit.value), visit)
                box: Box | None = visit.box
            else:
                visit.value = access.node.evaluate()
                visit.box = box = None
            self.resume(box)
        visit.box = None

    def unwind(self) -> None:
        """The run is over."""
        if self.alive:
            self.alive = False
            if self.iteration == 0:
                self.exception, self.how = OutOfOrder("order"), "order"
            else:
                self.how = "cut"
            self._running.close()


def expect(case: Case, request: Request, recomputed: set[int]) -> Expected:
    """Run one request on one rank."""
    index = [r.name for r in case.requests].index(request.name)
    progress = Progress(index, request.tokens, request.ignore_eos, recomputed=recomputed)
    counts: dict[str, int] = {}
    workers = [Lone(name, block, counts) for name, block in request.blocks]
    order = [location for stage in visits(case) for location in stage]
    for worker in workers:
        worker.resume(None)
    while len(progress.tokens) < request.tokens:
        value = feed(progress)
        progress.rounds.append(len(progress.rounds))
        for location in order:
            value = _forward(location, value)
            visit = Visit(value)
            for worker in workers:
                worker.handle(location, visit)
            value = visit.value
            counts[location] = counts.get(location, 0) + 1
        progress.tokens.append(value)
        traced = workers[-1] if workers and not workers[-1].name else None
        if traced is not None and traced.exception is not None and not request.ignore_eos:
            break
    for worker in workers:
        if not worker.name and worker.pending is not None:
            worker.handle("result", Visit(term(RESULT, term(*progress.tokens))))
    error = None
    for worker in workers:
        worker.unwind()
        failed = worker.exception is not None and not isinstance(worker.exception, BlockStopped)
        if failed and error is None and not (worker.name and worker.how == "order"):
            error = worker.how
    saves = {
        f"{worker.name}/{label}": [box.node.evaluate() for box in boxes]
        for worker in workers
        for label, boxes in worker.leaves().items()
    }
    return Expected(saves, error, {w.name: w.how for w in workers}, progress.tokens)


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
