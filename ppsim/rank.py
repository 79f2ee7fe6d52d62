"""One rank's forward thread: the engine's commands, one after the other.

The order of steps is that of `ppcore.vllm.requests` and `ppcore.vllm.runner`: settle what finished,
open the round, start new workers, let those go on that waited for it, run the stage's visits, look
for workers that were ended elsewhere, sample, close the round; and at a request's end collect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TYPE_CHECKING

from ppcore.core import Core
from ppcore.errors import PPError, Unreachable
from ppcore.messages import Worker
from ppcore.saves import Part, Shipment, spell_leaves, to_ship, union

from .blocks import BlockStopped, Recording
from .cases import Case
from .engine import Collect, Round, lingers
from .link import Link, Wait
from .seated import Seated, Steps, plan
from .terms import LAYER, LOGITS, RESULT, SAMPLE, SHARED, term
from .values import Box, Visit

if TYPE_CHECKING:
    from .world import World


#: The value at a skip gate that nobody uses.
NO_SKIP = 0


class EngineDied(Exception):
    """The forward needs something of a rank that is gone: the engine's end, not the protocol's."""


class Rank:
    """The rank at (stage, column).

    Attributes:
        carried: the requests that this rank knows, with their workers, registered ones first.
        recordings: the caches that observe this round, each with its request.
        inbox: hidden states from the stage before, in round order.
    """

    def __init__(self, world: World, case: Case, core: Core, stage: int, column: int) -> None:
        self.world = world
        self.case = case
        self.core = core
        self.stage = stage
        self.column = column
        self.link = Link(core, world, stage, column)
        self.last = stage == case.stages - 1
        self.carried: dict[str, list[Seated]] = {}
        self.known: set[str] = set()
        self.recordings: list[tuple[str, Recording]] = []
        self.model = _model(world.visits[stage])
        self.inbox: list[dict[str, int]] = []
        self.commands = 0
        self.idle = False
        self.collectives = 0
        self.endings: dict[str, dict[str, str]] = {}
        #: Whether it has left its round, and works behind its forward.
        self.between = False

    def forward(self) -> Steps:
        """The forward thread: commands until there are no more."""
        commands = self.world.engine.commands
        while True:
            if self.commands >= len(commands):
                self.idle = True
                self.world.stir_engine()
                yield lambda: self.commands < len(commands)
            self.idle = False
            command = commands[self.commands]
            self.commands += 1
            if isinstance(command, Round):
                try:
                    yield from self.round(command)
                except EngineDied:
                    self.world.broken(self.stage, self.column)
                    return
            elif isinstance(command, Collect):
                for request in command.requests:
                    yield from self.collect(request, served=command.served)
            else:
                return

    # --- a round ------------------------------------------------------------------------------

    def round(self, command: Round) -> Steps:
        """One forward step."""
        for name in command.finished:
            if name in self.carried:
                yield from self.harvest(name)
        self._add(command)
        self.link.visited.clear()
        batch = [(name, self.carried[name]) for name in command.inputs]
        yield None
        yield from self.link.carry_out(
            self.core.open_round([name for name, workers in batch if workers])
        )
        current = [worker for _, workers in batch for worker in workers]
        leaves = self._leaves(current)
        if leaves:
            self.core.will_leave_round()
        for worker in current:
            if not worker.started:
                yield from worker.start()
        yield from self._go_on(current)
        self.recordings = [
            (worker.worker.request, found)
            for worker in current
            for found in worker.recordings.values()
        ]
        states = command.inputs if self.stage == 0 else (yield from self._receive())
        states = yield from self._visit_all(dict(states), batch)
        if self.case.columns > 1:
            yield from self._collective("forward")
        if not self.last:
            self.world.hand_on(self.stage, self.column, states)
            states = {}
        self.world.properties.passed(self)
        yield from self._check_abandoned()
        if self.last:
            yield from self._sample(command, states, batch)
        elif leaves:
            yield from self._linger(current)
        yield from self.link.flush()
        self.world.properties.closed(self)

    def _go_on(self, workers: list[Seated]) -> Steps:
        """Let workers go on that waited for this, or end those that have ended elsewhere."""
        for worker in workers:
            if worker.exception is None:
                yield None
                error = self.link.ended_elsewhere(worker.worker)
                yield from worker.advance() if error is None else worker.abandon(error)
                del error  # what follows does not depend on it

    def _leaves(self, current: list[Seated]) -> bool:
        """Whether this rank stays behind the forward that begins.

        Where every request takes part in it, nobody can want this rank before the later stages are through.
        """
        running = {worker.worker.request for worker in current}
        return (
            not self.last
            and lingers(self.case.batching, self.core.round)
            and all(self.core.ended(name) for name in {*self.carried} - running)
        )

    def _linger(self, current: list[Seated]) -> Steps:
        """Behind the forward: let workers go on with what later stages make of this round."""
        waiting = [w for w in current if w.started and w.exception is None and w.seat.waits]
        if not waiting:
            return
        yield None
        yield from self.link.carry_out(self.core.leave_round())
        self.between = True
        yield from self._go_on(waiting)
        self.between = False

    def _add(self, command: Round) -> None:
        for name in command.inputs:
            if name in self.known:
                continue
            self.known.add(name)
            request = self.world.requests[name]
            containers = dict(self.case.containers)
            workers = self.carried[name] = [
                Seated(self.link, Worker(name, block), body, {} if block else containers)
                for block, body in request.blocks
            ]
            for fault in self.case.faults:
                here = (fault.stage, fault.column) == (self.stage, self.column)
                if fault.kind == "raise" and here and fault.request == request.name and workers:
                    workers[-1].fail_at(fault.at)

    def _receive(self) -> Generator[Wait, None, dict[str, int]]:
        if not self.inbox:
            yield lambda: bool(self.inbox) or self.world.severed(self.stage, self.column)
        if not self.inbox:
            raise EngineDied
        return self.inbox.pop(0)

    def _check_abandoned(self) -> Steps:
        yield None
        if not self.link.abandoned:
            return
        for workers in list(self.carried.values()):
            for worker in workers:
                if worker.started:
                    yield from self._abandon(worker)

    def _abandon(self, worker: Seated) -> Steps:
        """End a worker that raised on another rank, if it has got as far here."""
        error = self.link.ended_elsewhere(worker.worker)
        if worker.exception is None and error is not None:
            yield from worker.abandon(error)

    def _visit_all(
        self, states: dict[str, int], batch: list[tuple[str, list[Seated]]]
    ) -> Generator[Wait, None, dict[str, int]]:
        skipped: dict[str, int] = {}
        for location, does, layer in self.model:
            offered = states
            if does == "skip":
                offered = skipped = dict.fromkeys(states, NO_SKIP)
            elif does == "shared":
                offered = states = {name: term(SHARED, value) for name, value in states.items()}
            elif does == "layer":
                offered = states = {
                    name: skipped[name] or term(LAYER, layer, value)
                    for name, value in states.items()
                }
            if self._awaited(location, batch):
                yield from self._visit(location, offered, batch)
            else:
                self._visited(location)
        return states

    def _awaited(self, location: str, batch: list[tuple[str, list[Seated]]]) -> bool:
        """Whether a visit concerns anybody."""
        if self.recordings:
            return True
        for _, workers in batch:
            for worker in workers:
                if worker.pending is not None and worker.pending.location == location:
                    return True
        return False

    def _visit(
        self, location: str, states: dict[str, int], batch: list[tuple[str, list[Seated]]]
    ) -> Steps:
        """Offer a location's value to the workers that are parked on this visit of it."""
        ready = [(name, w) for name, workers in batch for w in workers if w.ready(location)]
        recordings = self.recordings
        observers = [r for r in recordings if r[1].keeps(location)] if recordings else recordings
        if self.case.columns > 1 and (ready or observers) and not location.endswith(".skip"):
            yield from self._collective(location)
        for name, worker in ready:
            yield None
            visit = Visit(states[name])
            yield from worker.handle(location, visit)
            states[name] = visit.value
        self._visited(location)
        for name, found in observers:
            found.observe(location, states[name], self.core.turn(name))

    def _visited(self, location: str) -> None:
        visited = self.link.visited
        visited[location] = visited.get(location, 0) + 1

    def _collective(self, location: str) -> Steps:
        """The columns of a stage gather a value that a worker waits for."""
        number = self.collectives
        self.collectives += 1
        self.world.gather(self.stage, self.column, number, location)
        if not self.world.gathered(self.stage, number):
            yield (
                lambda: (
                    self.world.gathered(self.stage, number)
                    or self.world.severed(self.stage, self.column)
                )
            )

    def _sample(
        self, command: Round, states: dict[str, int], batch: list[tuple[str, list[Seated]]]
    ) -> Steps:
        states = {name: term(LOGITS, value) for name, value in states.items()}
        yield from self._visit("logits", states, batch)
        states = {name: term(SAMPLE, value) for name, value in states.items()}
        yield from self._visit("samples", states, batch)
        erred = {
            name
            for name, workers in batch
            if workers and not workers[-1].worker.block and workers[-1].exception is not None
        }
        if self.column == 0:
            self.world.engine.sampled(command, states, erred)

    # --- the end of a request -----------------------------------------------------------------

    def settle(self, name: str) -> Steps:
        """The request has ended: complete whatever its workers wait for."""
        if name not in self.core.requests or self.core.ended(name):
            return
        yield None
        self.core.end(name)
        for worker in self.carried[name]:
            if worker.started:
                if worker.exception is None:
                    yield None
                    # A block that raises everywhere does so here too, with all that it did before.
                    yield from worker.advance()
                yield from self._abandon(worker)

    def harvest(self, name: str) -> Steps:
        """The scheduler says that the request is over; one that is owed nothing goes at once."""
        yield from self.settle(name)
        workers = self.carried[name]
        kept = any(w.saves or w.recordings or w.exception is not None for w in workers)
        if not self.world.requests[name].traced and not kept:
            for worker in workers:
                worker.unwind()
            yield from self._forget(name)

    def collect(self, request: str, *, served: bool) -> Steps:
        """Wind up a finished request and ship this rank's share of its saves."""
        sequences = self.world.sequences(request)
        for name in sequences:
            if name in self.carried:
                yield from self.harvest(name)
        found = [name for name in sequences if name in self.carried]
        error, own = None, False
        boxes: dict[str, list[Box]] = {}
        shapes: dict[str, str] = {}
        parts: list[Recording] = []
        for name in found:
            index = sequences.index(name)
            workers = self.carried[name]
            yield from self._wind_up(request, workers, served)
            for worker in workers:
                label = f"{index}/{worker.worker.block}/"
                boxes |= {label + saved: leaves for saved, leaves in worker.leaves().items()}
                for saved, shape in worker.shapes().items():
                    shapes[label + saved] = shape
                parts += [worker.recordings[saved] for saved in sorted(worker.recordings)]
                failure = worker.exception
                if failure is None or isinstance(failure, BlockStopped):
                    continue
                if worker.worker.block and worker.how == "order":
                    continue  # a registered block that waits in vain ends quietly
                if error is None:
                    error = worker.how
                    # The want of a value is the consequence of another stage's error.
                    own = not worker.told and not error.startswith("Unreachable")
        if any(self.carried[name] for name in found):
            shipment = yield from self._ship(found[0], boxes, shapes, parts, error, own)
            if self.column == 0:
                self.world.engine.shipped(request, self.stage, shipment)
        boxes.clear()
        for name in found:
            yield from self._forget(name)
        yield from self.link.flush()
        self.world.engine.collected(request, self.stage, self.column)

    def _wind_up(self, request: str, workers: list[Seated], served: bool) -> Steps:
        """Serve the result, and end whoever still waits."""
        for worker in workers:
            if worker.worker.block:
                worker.unwind()
            elif served and worker.ready("result") and worker.alive:
                result = Visit(term(RESULT, self.world.engine.outputs[request]))
                yield from worker.handle("result", result)
        for worker in workers:
            worker.unwind()
            if worker.started:
                # What a peer asks for and this worker never got to is answered never, before this
                # rank waits for that peer.
                yield from self.link.finish(worker.worker)

    def _forget(self, name: str) -> Steps:
        """Nothing of the request is needed here any more."""
        workers = self.carried.pop(name)
        self.endings[name] = {w.worker.block: w.how for w in workers}
        for worker in workers:
            worker.clear()
        del workers
        if name in self.core.requests:
            yield from self.link.say_done(name)

    def _ship(
        self,
        carrier: str,
        found: dict[str, list[Box]],
        shapes: dict[str, str],
        recordings: list[Recording],
        error: str | None,
        own: bool,
    ) -> Generator[Wait, None, Shipment]:
        """This rank's share of what a request saved; ``carrier`` names the talk about who ships."""
        holds = {
            label: [box.node.value is not None for box in boxes] for label, boxes in found.items()
        }
        ships: dict[str, list[bool]] = {}

        def decide(below: dict[int, str]) -> str:
            merged = union(map(_read_leaves, below.values()))
            ships.update(to_ship(holds, merged, last=self.last))
            return _spell(tuple(spell_leaves(ships).items()))

        leaves: dict[tuple[str, int], int] = {}
        parts = [
            {
                location: Part(
                    self.core.schedule.slots[location][0].index,
                    recording.turns[location],
                    values,
                )
                for location, values in recording.values.items()
            }
            for recording in recordings
        ]
        try:
            if carrier in self.core.requests:
                yield from self.link.exchange_held(carrier, decide, wait=any(found.values()))
            else:
                decide({})
            for label, flags in ships.items():
                for position, shipped in enumerate(flags):
                    if shipped:
                        node = found[label][position].node
                        wanted = plan([node])
                        if wanted:
                            self.world.properties.ships(self, label)
                            values = yield from self.link.fetch([(b, t) for _, b, t in wanted])
                            for (settled, _, _), value in zip(wanted, values, strict=True):
                                settled.settle(value)
                        leaves[label, position] = node.evaluate()
        except PPError as failure:
            text = f"{type(failure).__name__}: {failure}"
            mine = error is None and not isinstance(failure, Unreachable)
            return Shipment(b"", {}, {}, error or text, own or mine)
        counts = {label: len(boxes) for label, boxes in found.items()}
        skeleton = _spell(tuple(sorted(shapes.items()))).encode()
        return Shipment(skeleton, counts, leaves, error, own, parts)


@lru_cache(maxsize=1024)
def _spell(items: tuple[tuple[str, str], ...]) -> str:
    """A dictionary's items as JSON."""
    return json.dumps(dict(items))


_read_leaves: Callable[[str], dict[str, str]] = lru_cache(maxsize=1024)(json.loads)


@lru_cache(maxsize=256)
def _model(visits: tuple[str, ...]) -> tuple[tuple[str, str, int], ...]:
    """A stage's layers: each location that its forward visits, what it does there, and the layer."""
    found: list[tuple[str, str, int]] = []
    for location in visits:
        path, _, side = location.rpartition(".")
        if path == "S":
            found.append((location, "shared", 0))
        elif path:
            does = {"in": "enter", "skip": "skip", "out": "layer"}[side]
            found.append((location, does, int(path[1:])))
    return tuple(found)
