"""The requests of one rank of a pipeline: nnsight's, with workers that the protocol drives."""

from __future__ import annotations

from typing import Any

from nnsight.intervention.interleaver import Mediator
from nnsight.modeling.vllm.model_runners.GPUModelRunner import Request, Requests

from ..messages import Worker
from ..runtime.interleaver import Rows
from ..runtime.link import Link
from ..runtime.mediator import PPMediator


class PPRequests(Requests):
    """[`Requests`] whose workers run on every stage."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link

    def add(self, new_requests: list, persistent_objects: dict) -> None:
        super().add(new_requests, persistent_objects)
        for data in new_requests:
            request = self.requests.get(data.req_id)
            if request is None:
                continue
            for block, copy in request.copies.items():
                self._adopt(copy, request, block)
            if request.mediator is not None:
                self._adopt(request.mediator, request, "")

    def _adopt(self, mediator: Mediator, request: Request, block: str) -> None:
        if not isinstance(mediator, PPMediator):
            PPMediator.adopt(mediator, Worker(request.id, block), self.link)

    def scope(self, model: Any, spans: list[tuple[str, int]]) -> None:
        """Open the round, point every worker at its rows, and let those go on that waited for it."""
        interleaver = model.interleaver
        interleaver.open_turns()
        traced = [name for name, _ in spans if (r := self.requests.get(name)) and r.workers()]
        self.link.open_round(traced)
        total = sum(tokens for _, tokens in spans)
        for name, tokens in spans:
            request = self.requests.get(name)
            for mediator in request.workers() if request is not None else ():
                mediator.opened(Rows(tokens, len(spans), total))
        super().scope(model, spans)
        for mediator in interleaver.mediators:
            self._go_on(mediator)
        interleaver.reindex()

    def _go_on(self, mediator: PPMediator) -> None:
        if mediator.exception is not None:
            return
        error = self.link.abandoned(mediator.worker_id)
        if error is not None:
            mediator.abandon(error)
            return
        try:
            mediator.advance()
        except Exception as exception:
            mediator.exception = exception
            mediator.pending = None

    def check_abandoned(self) -> None:
        """End the workers that another rank has ended since the round opened."""
        for mediator in self.workers():
            if mediator.exception is None and mediator.worker is not None:
                error = self.link.abandoned(mediator.worker_id)
                if error is not None:
                    mediator.abandon(error)

    def settle(self, request: Request) -> None:
        """The request has ended: complete whatever its workers wait for.

        Every value that they can wait for has been produced or is produced while its owner settles,
        in program order.
        """
        if request.id not in self.link.core.requests or self.link.core.ended(request.id):
            return
        self.link.end(request.id)
        for mediator in request.workers():
            if isinstance(mediator, PPMediator) and mediator.worker is not None:
                self._go_on(mediator)
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
        for request in list(self.requests.values()):
            if request.named(finished):
                self.settle(request)
        super().harvest(finished)

    def finish_dangling(
        self, mediator: Any, taps: frozenset = frozenset(), quiet: bool = False
    ) -> None:
        if isinstance(mediator, PPMediator) and mediator.alive:
            with mediator.inside():
                super().finish_dangling(mediator, taps, quiet)

    def serve_result(self, mediator: Any, output: Any) -> None:
        try:
            super().serve_result(mediator, output)
        except Exception as exception:
            mediator.exception = exception
            mediator.pending = None
            self.record(mediator)
        else:
            mediator.surface()
