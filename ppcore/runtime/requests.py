"""The requests of one rank of a pipeline: nnsight's, with workers that the protocol drives.

nnsight's `Requests` carries the workers of an engine's requests: it takes them off new requests, points
them at their rows of each step, and winds them up. [`StagedRequests`][ppcore.runtime.requests.StagedRequests]
is mixed in front of it on a rank of a pipeline. It adds what one stage of several has to do besides, at
the same points: open the round before the workers are scoped and let those go on that waited for it;
settle a request that has ended, before it is collected; ship this rank's share of its saves.

Whoever drives a rank (the engine's runner, or a loop over a plain module) calls, for each step,
`harvest`, `add`, `scope`, the forward, `check_abandoned`, `linger` where that may be, sampling,
`record_saves` and `Link.close_round`, and `collect` for requests that are over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from nnsight.intervention.errors import capture_exception
from nnsight.intervention.interleaver import Mediator
from nnsight.tracing.tracer import _saves

from ..errors import Unreachable
from ..messages import Worker
from ..saves import Shipment, label, spell_leaves, union
from .collect import Taken
from .interleaver import Rows
from .link import Link
from .mediator import PPMediator, Told


class StagedRequests:
    """Mixed in front of nnsight's `Requests`: its workers run on every stage.

    Args:
        link: this rank's end of the protocol.
        mediators: what workers become.
        leaves: whether this rank will `linger` behind the forward of the step that begins.
    """

    requests: dict[str, Any]
    workers: Callable[[], list]
    record: Callable[[Any], None]

    def __init__(
        self,
        link: Link,
        mediators: type[PPMediator] = PPMediator,
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.link = link
        self._mediators = mediators
        self._leaves = leaves

    # --- a step -------------------------------------------------------------------------------

    def add(self, new_requests: list, persistent_objects: dict) -> None:
        super().add(new_requests, persistent_objects)  # type: ignore[misc]
        for data in new_requests:
            request = self.requests.get(data.req_id)
            if request is None:
                continue
            for block, copy in request.copies.items():
                self._adopt(copy, request, block)
            if request.mediator is not None:
                self._adopt(request.mediator, request, "")

    def _adopt(self, mediator: Mediator, request: Any, block: str) -> None:
        if not isinstance(mediator, PPMediator):
            self._mediators.adopt(mediator, Worker(request.id, block), self.link)

    def unregister(self, registration_id: str) -> None:
        """Stop running a registered block.

        What runs of it ends now, in the torch state that it parked in, and not in the forward's when a
        collector comes by.
        """
        copies = [request.copies.get(registration_id) for request in self.requests.values()]
        super().unregister(registration_id)  # type: ignore[misc]
        for copy in copies:
            if isinstance(copy, PPMediator):
                copy.drop()

    def scope(self, model: Any, spans: list[tuple[str, int]]) -> None:
        """Open the round, point every worker at its rows, and let those go on that waited for it."""
        interleaver = model.interleaver
        interleaver.open_turns()
        traced = [name for name, _ in spans if (r := self.requests.get(name)) and r.workers()]
        self.link.open_round(traced, leaves=self._leaves())
        total = sum(tokens for _, tokens in spans)
        for name, tokens in spans:
            request = self.requests.get(name)
            for mediator in request.workers() if request is not None else ():
                mediator.opened(Rows(tokens, len(spans), total))
        super().scope(model, spans)  # type: ignore[misc]
        for mediator in interleaver.mediators:
            self._go_on(mediator)
        interleaver.reindex()

    def _go_on(self, mediator: PPMediator) -> None:
        self._abandon(mediator)
        self._advance(mediator)

    def _advance(self, mediator: PPMediator) -> None:
        if mediator.exception is not None:
            return
        try:
            mediator.advance()
        except Exception as exception:
            mediator.exception = exception
            mediator.pending = None

    def _abandon(self, mediator: PPMediator) -> None:
        """End a worker that raised on another rank, if it has got as far here."""
        error = self.link.abandoned(mediator.worker_id)
        if mediator.exception is None and error is not None:
            mediator.abandon(error)

    def waiting(self, names: Iterable[str]) -> list[PPMediator]:
        """The workers of these requests that are parked for what other stages make, in order."""
        found = (self.requests.get(name) for name in names)
        return [
            mediator
            for request in found
            for mediator in (request.workers() if request is not None else ())
            if mediator.worker is not None and mediator.seat.waits
        ]

    def linger(self, names: Iterable[str]) -> None:
        """Behind this rank's forward, let workers go on with what later stages make of the step.

        Only where nothing else waits for this rank, and once what the forward handed on has arrived: a
        block may edit that now.

        Args:
            names: the requests of the step, in its order.
        """
        waiting = self.waiting(names)
        if not waiting:
            return
        self.link.leave_round()
        for mediator in waiting:
            self._go_on(mediator)

    def check_abandoned(self) -> None:
        """End the workers that another rank has ended since the round opened."""
        for mediator in self.workers():
            if mediator.worker is not None:
                self._abandon(mediator)

    # --- the end of a request -----------------------------------------------------------------

    def settle(self, request: Any) -> None:
        """The request has ended: complete whatever its workers wait for.

        Every value that they can wait for has been produced or is produced while its owner settles,
        in program order.
        """
        if request.id not in self.link.core.requests or self.link.core.ended(request.id):
            return
        self.link.end(request.id)
        for mediator in request.workers():
            if isinstance(mediator, PPMediator) and mediator.worker is not None:
                # A block that raises everywhere does so here too, with all that it did before.
                self._advance(mediator)
                self._abandon(mediator)
                mediator.surface()
                self.record(mediator)

    def harvest(self, finished: set[str]) -> None:
        self.shelve(finished)
        self.sweep()

    def sweep(self) -> None:
        """Be done with ended requests that left nothing to collect."""
        for name in self.link.core.requests:
            if self.link.core.ended(name) and name not in self.requests:
                self.link.say_done(name)

    def shelve(self, finished: set[str]) -> None:
        """Settle the finished requests and keep what their registered blocks saved."""
        over = [request for request in self.requests.values() if request.named(finished)]
        copies = [copy for request in over for copy in request.copies.values()]
        for request in over:
            self.settle(request)
        super().harvest(finished)  # type: ignore[misc]
        _let_go(copies)

    def finish_dangling(
        self, mediator: Any, taps: frozenset = frozenset(), quiet: bool = False
    ) -> None:
        if isinstance(mediator, PPMediator) and mediator.alive:
            with mediator.inside():
                super().finish_dangling(mediator, taps, quiet)  # type: ignore[misc]

    def serve_result(self, mediator: Any, output: Any) -> None:
        try:
            super().serve_result(mediator, output)  # type: ignore[misc]
        except Exception as exception:
            mediator.exception = exception
            mediator.pending = None
            self.record(mediator)
        else:
            mediator.surface()

    # --- collecting ---------------------------------------------------------------------------

    @torch.inference_mode()  # recorded edits of what the forward made are carried out here, at the latest
    def collect(
        self, wanted: set[str], finished: set[str], outputs: Mapping[str, Any]
    ) -> dict[str, Shipment]:
        """Wind up the requests that are finished, and what this rank ships of their saves.

        Args:
            wanted: the ids that were asked about, as the engine knows them.
            finished: those that are over.
            outputs: engine id -> what the request produced, for ``tracer.result``.

        Returns:
            Engine id -> the shipment, of all the sequences that the id stands for.
        """
        self.shelve(finished)
        groups: dict[str, list[tuple[int, Any]]] = {}
        for request in list(self.requests.values()):
            if request.named(wanted) and request.named(finished):
                engine_id, index = request.key(wanted)
                groups.setdefault(engine_id, []).append((index, request))
        saved: list[Any] = []
        shipments = {
            engine_id: self._collect(found, outputs.get(engine_id), saved)
            for engine_id, found in groups.items()
        }
        self._unmark(saved)
        self.sweep()
        return shipments

    def _collect(self, found: list[tuple[int, Any]], output: Any, saved: list[Any]) -> Shipment:
        saves: dict[str, Any] = {}
        error = None
        for index, request in sorted(found, key=lambda item: item[0]):
            registered: dict[str, Any] = {}
            for taken in request.harvested.values():
                registered.update(taken["saves"])
                if error is None:
                    error = taken["error"]
            request.harvested = {}
            if request.mediator is not None:
                if output is not None:
                    if registered:
                        output.saves = dict(registered)
                    self.serve_result(request.mediator, output)
                self.finish_dangling(request.mediator)
                self.link.finish(Worker(request.id))
            own_saves = request.saves()
            for name, value in sorted(own_saves.items()):
                saves[label(index, "saves", name)] = value
            for name, value in sorted(registered.items()):
                saves[label(index, "registered", name)] = value
            saves.setdefault(label(index, "sequence", ""), None)
            if error is None:
                error = request.deferred()
            saved += own_saves.values()
        shipment = self._ship(found[0][1].id, saves, error)
        for _, request in found:
            self.requests.pop(request.id, None)
            _let_go(request.workers())
            if request.id in self.link.core.requests:
                self.link.say_done(request.id)
        return shipment

    def _unmark(self, saved: list[Any]) -> None:
        """Collected values count as saved no more, but for those that a request still has a name for.

        Two requests may have saved the same number.
        """
        workers = [worker for request in self.requests.values() for worker in request.workers()]
        named = {id(value) for worker in workers for value in worker.lcls.values()}
        marked = _saves()
        for value in saved:
            if id(value) not in named:
                marked.discard(id(value))

    def _ship(self, carrier: str, saves: dict[str, Any], error: Any) -> Shipment:
        """Agree with the other stages on who ships which leaf, and take this rank's share."""
        link = self.link
        last = link.core.stage == link.core.stages - 1
        try:
            taken = Taken(saves)
        except Exception as exception:
            taken = Taken({})
            if error is None:
                error = dict(capture_exception(exception))
        ships: dict[str, list[bool]] = {}

        def decide(below: dict[int, str]) -> str:
            merged = union(json.loads(text) for text in below.values())
            ships.update(taken.ships(merged, last=last))
            return json.dumps(spell_leaves(ships))

        try:
            if carrier in link.core.requests:
                link.exchange_held(carrier, decide, wait=any(taken.found.values()))
            else:
                decide({})
            return taken.shipment(ships, self._recorded, error, _own(error))
        except Exception as exception:
            failed = error or dict(capture_exception(exception))
            return Taken({}).shipment({}, self._recorded, failed, _own(failed))

    def _recorded(self, location: str) -> tuple[int, bool] | None:
        """Where a recorded location is first visited, if it is here, and whether the schedule knows."""
        schedule, stage = self.link.core.schedule, self.link.core.stage
        slots = schedule.slots.get(location)
        if slots is None:
            return schedule.first[stage], False
        return (slots[0].index, True) if schedule.local_count(location, stage) else None


def _let_go(mediators: Iterable[Mediator]) -> None:
    for mediator in mediators:
        if isinstance(mediator, PPMediator):
            mediator.let_go()


def _own(error: Mapping[str, Any] | None) -> bool:
    """Whether an error is this stage's own, and goes before those of others.

    Not one that another stage told; nor a stop; nor the want of a value, since what kept its owner from
    reading it is the error.
    """
    if error is None or isinstance(error, Told):
        return False
    return not error.get("is_control_flow") and error.get("type_name") != Unreachable.__name__
