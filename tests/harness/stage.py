"""One rank: what `ppcore.vllm`'s runner and requests do, over a plain torch module.

`Stage` with ``stages=None`` is the reference: plain nnsight workers on one rank, driven by the same
loop. Run as a module, this file serves commands on a socket that it inherits.
"""

from __future__ import annotations

import json
import pickle
import sys
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from nnsight.intervention.errors import capture_exception
from nnsight.intervention.interleaver import Interleaver, Mediator, dangling_unwind
from nnsight.intervention.serialization import loads
from nnsight.tracing.tracer import _local, _saves, inc

from ppcore.core import Core
from ppcore.messages import Worker
from ppcore.runtime import exchange, stubs
from ppcore.runtime.calls import Calls
from ppcore.runtime.collect import Taken
from ppcore.runtime.interleaver import PPInterleaver, Recording, Rows
from ppcore.runtime.link import Link
from ppcore.runtime.mediator import PPMediator
from ppcore.runtime.transport import GlooTransport
from ppcore.saves import Shipment, spell_leaves, union
from tests.harness import model as tiny

#: Tokens and sequences of the dummy forward: extents that nothing in the model has.
DUMMY_TOKENS, DUMMY_SEQUENCES = 13, 11


@dataclass
class Job:
    """A request: a block (or none), a prompt, and how many tokens to generate.

    ``start`` is the round in which it arrives.
    """

    id: str
    payload: bytes | None
    prompt: list[int]
    max_tokens: int = 1
    start: int = 0


@dataclass
class Request:
    job: Job
    mediator: Any = None
    error: Any = None
    tokens: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def input(self) -> list[int]:
        return self.tokens[-1:] or self.job.prompt


class Stage:
    """A rank and everything on it.

    Args:
        stage: this rank's stage; 0 on the reference.
        stages: how many there are; None for the reference.
    """

    def __init__(self, stage: int = 0, stages: int | None = None, deadline_s: float = 20.0) -> None:
        self.stage, self.stages = stage, stages or 1
        self.first, self.last = stage == 0, stage == self.stages - 1
        self.requests: dict[str, Request] = {}
        self.peak_entries = 0
        self.root = tiny.build()
        self.link: Link | None = None
        if stages is None:
            self.tree = tiny.Tree(self.root, interleaver=Interleaver())
        else:
            self._join(deadline_s)
        interleaver = self.tree.interleaver
        interleaver.batcher = tiny.Spans(None)
        interleaver.defer_exceptions = True
        self.objects = self.tree.persistent()

    def _join(self, deadline_s: float) -> None:
        shared = tiny.aliases(self.root)
        self.root.keep(self.stage, self.stages)
        whole = exchange.load(self.root, tiny.ROOT, (tiny.Missing,), shared, self.gather)
        interleaver = PPInterleaver()
        self.tree = tiny.Tree(self.root, interleaver=interleaver)
        recordings = self._record(interleaver)
        exchange.learn(whole, recordings, self.gather)
        assert whole.schedule is not None
        calls = Calls(interleaver, dict(stubs.modules(self.root, tiny.ROOT)))
        self.link = Link(
            Core(self.stage, whole.schedule, whole.homes),
            GlooTransport.create([list(range(self.stages))]),
            torch.device("cpu"),
            deadline_s=deadline_s,
            parameter=calls.value_of,
            describe=calls.describe,
        )
        visits = [visit for recording in recordings for visit in recording.visits]
        interleaver.connect(self.link, whole.templates, visits, whole.spanning)
        interleaver.calls = calls

    def gather(self, value: Any) -> list:
        gathered: list = [None] * self.stages
        dist.all_gather_object(gathered, value)
        return gathered

    def _record(self, interleaver: PPInterleaver) -> list[Recording]:
        recordings = [Recording(DUMMY_TOKENS)]
        interleaver.recording = recordings[0]
        interleaver.interleaving = interleaver.busy = True
        with torch.inference_mode():
            passed = _passed(DUMMY_TOKENS)
            numbers = torch.zeros(DUMMY_TOKENS, dtype=torch.int64)
            hidden = self.root(numbers, numbers, None if self.first else passed)
            if self.last:
                recordings.append(Recording(DUMMY_TOKENS, DUMMY_SEQUENCES))
                interleaver.recording = recordings[-1]
                logits = self.root.compute_logits(hidden[:DUMMY_SEQUENCES])
                recordings.append(Recording(DUMMY_TOKENS, DUMMY_SEQUENCES, own_row=True))
                interleaver.recording = recordings[-1]
                tiny.Tree.logits.provide(self.tree, logits)
                samples = torch.zeros(DUMMY_SEQUENCES, 1, dtype=torch.int32)
                tiny.Tree.samples.provide(self.tree, samples)
        interleaver.recording = None
        interleaver.interleaving = interleaver.busy = False
        return recordings

    # --- a run --------------------------------------------------------------------------------

    def run(self, jobs: list[Job]) -> dict[str, Any]:
        """Serve the requests to their ends: what each ships, and what was left."""
        shipped: dict[str, Any] = {}
        waiting, number = list(jobs), 0
        self.peak_entries = 0
        if not getattr(_local, "depth", 0):
            inc()
        if self.link is not None:
            _saves().clear()  # ids of an earlier run's values, which others may have by now
        while waiting or self.requests:
            for job in [job for job in waiting if job.start <= number]:
                waiting.remove(job)
                self._add(job)
            if self.requests:
                for name in self._round():
                    request = self.requests.pop(name)
                    shipment = self._collect(request)
                    shipped[name] = pickle.dumps((shipment, request.warnings, request.tokens))
            number += 1
        return {"shipped": shipped, "status": self.status()}

    def _add(self, job: Job) -> None:
        request = self.requests[job.id] = Request(job)
        if job.payload is not None:
            try:
                request.mediator = loads(job.payload, persistent_objects=self.objects)
            except Exception as exception:
                request.error = capture_exception(exception)
                return
            if self.link is not None:
                PPMediator.adopt(request.mediator, Worker(job.id), self.link)

    def _mediators(self) -> list[Any]:
        return [r.mediator for r in self.requests.values() if r.mediator is not None]

    def _round(self) -> list[str]:
        """One forward step of every request; the names of those that are over."""
        batch = list(self.requests.values())
        spans = [len(request.input) for request in batch]
        interleaver = self.tree.interleaver
        interleaver.mediators = []
        with torch.inference_mode():
            with interleaver:
                self._scope(batch, spans)
                hidden = self._forward(batch, spans)
            for row, request in enumerate(batch):
                if request.mediator is not None:
                    request.mediator.batch_group = [row, 1]
            interleaver.batcher.total = len(batch)
            if self.link is not None:
                self._check_abandoned()
            tokens = self._sample(batch, spans, hidden) if self.last else None
        for request in batch:
            if request.mediator is not None:
                self._note(request)
        if self.link is not None:
            self.link.close_round()
            self.peak_entries = max(self.peak_entries, self.link.status()["buffer_entries"])
        return self._advance(batch, tokens)

    def _scope(self, batch: list[Request], spans: list[int]) -> None:
        interleaver = self.tree.interleaver
        rows = [Rows(tokens, len(batch), sum(spans)) for tokens in spans]
        if self.link is not None:
            interleaver.open_turns()
            self.link.open_round([r.job.id for r in batch if r.mediator is not None])
            for request, found in zip(batch, rows, strict=True):
                if request.mediator is not None:
                    request.mediator.opened(found)
        interleaver.batcher.total = sum(spans)
        scheduled, start = [], 0
        for request, tokens in zip(batch, spans, strict=True):
            mediator = request.mediator
            if mediator is not None and mediator.exception is None:
                mediator.batch_group = [start, tokens]
                if mediator.worker is None:
                    try:
                        mediator.start(interleaver)
                    except Exception as exception:
                        mediator.exception = exception
                if mediator.alive or mediator.caches:
                    scheduled.append(mediator)
            start += tokens
        interleaver.mediators = scheduled
        interleaver.reindex()
        for mediator in scheduled if self.link is not None else ():
            self._go_on(mediator)
        interleaver.reindex()

    def _go_on(self, mediator: Any) -> None:
        assert self.link is not None
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

    def _check_abandoned(self) -> None:
        assert self.link is not None
        for mediator in self._mediators():
            if mediator.exception is None and mediator.worker is not None:
                error = self.link.abandoned(mediator.worker_id)
                if error is not None:
                    mediator.abandon(error)

    def _forward(self, batch: list[Request], spans: list[int]) -> Any:
        ids = torch.tensor([token for request in batch for token in request.input])
        starts = [len(r.job.prompt) + len(r.tokens) - n for r, n in zip(batch, spans, strict=True)]
        positions = torch.cat(
            [torch.arange(at, at + n) for at, n in zip(starts, spans, strict=True)]
        )
        passed = None
        if not self.first:
            passed = _passed(len(ids))
            for tensor in passed:
                dist.recv(tensor, src=self.stage - 1)
        out = self.root(ids, positions, passed)
        if not self.last:
            for tensor in out:
                dist.send(tensor.contiguous(), dst=self.stage + 1)
        return out

    def _sample(self, batch: list[Request], spans: list[int], hidden: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor(spans).cumsum(0) - 1
        with self._still_running():
            logits = self.root.compute_logits(hidden[ends])
        with self._still_running():
            logits = tiny.Tree.logits.provide(self.tree, logits).clone()
        with self._still_running():
            tokens = logits.argmax(-1, keepdim=True).to(torch.int32)
            return tiny.Tree.samples.provide(self.tree, tokens).clone()

    def _still_running(self) -> Interleaver:
        interleaver = self.tree.interleaver
        interleaver.mediators = [m for m in interleaver.mediators if m.alive]
        interleaver.reindex()
        return interleaver

    def _advance(self, batch: list[Request], tokens: torch.Tensor | None) -> list[str]:
        """Tell every rank the tokens, and which requests are over."""
        told = torch.zeros(len(batch), 2, dtype=torch.int64)
        if tokens is not None:
            for row, request in enumerate(batch):
                raised = request.mediator is not None and request.mediator.exception is not None
                over = raised or len(request.tokens) + 1 >= request.job.max_tokens
                told[row] = torch.tensor([int(tokens[row]), int(over)])
        if self.stages > 1:
            dist.broadcast(told, src=self.stages - 1)
        for (token, _), request in zip(told.tolist(), batch, strict=True):
            request.tokens.append(token)
        return [r.job.id for (_, over), r in zip(told.tolist(), batch, strict=True) if over]

    # --- the end of a request -----------------------------------------------------------------

    def _note(self, request: Request) -> None:
        mediator = request.mediator
        saved = _saves()
        mediator.saved_names = {name for name, value in mediator.lcls.items() if id(value) in saved}
        mediator.saved_names |= mediator.presaved
        if mediator.exception is not None and getattr(mediator, "nnsight_error", None) is None:
            mediator.nnsight_error = capture_exception(mediator.exception)

    def _collect(self, request: Request) -> Any:
        mediator, link = request.mediator, self.link
        if link is not None and mediator is not None:
            link.end(request.job.id)
            if mediator.worker is not None:
                self._go_on(mediator)
                mediator.surface()
                self._note(request)
        saves: dict[str, Any] = {}
        error, own = request.error, request.error is not None
        if mediator is not None:
            self._serve_result(request)
            self._finish_dangling(request)
            if link is not None:
                link.finish(mediator.worker_id)
            self._note(request)
            saves = {n: mediator.lcls[n] for n in mediator.saved_names if n in mediator.lcls}
            saves = dict(sorted(saves.items()))
            error = error or getattr(mediator, "nnsight_error", None)
            own = error is not None and not getattr(mediator, "told", False)
        if link is None:
            return Taken(saves).shipment(
                Taken(saves).ships({}, last=True), lambda path: 0, error, own
            )
        shipment = self._ship(request.job.id, saves, error, own)
        if request.job.id in link.core.requests:
            link.say_done(request.job.id)
        return shipment

    def _ship(self, name: str, saves: dict[str, Any], error: Any, own: bool) -> Shipment:
        link = self.link
        assert link is not None
        taken = Taken(saves)
        ships: dict[str, list[bool]] = {}

        def decide(below: dict[int, str]) -> str:
            merged = union(json.loads(text) for text in below.values())
            ships.update(taken.ships(merged, last=self.last))
            return json.dumps(spell_leaves(ships))

        if name in link.core.requests:
            link.exchange_held(name, decide, wait=any(taken.found.values()))
        else:
            decide({})
        try:
            return taken.shipment(ships, self._order, error, own)
        except Exception as exception:
            failed = error or dict(capture_exception(exception))
            return Taken({}).shipment({}, self._order, failed, True)

    def _order(self, path: str) -> int:
        assert self.link is not None
        slots = self.link.core.schedule.slots
        found = slots.get(f"{path}.output") or slots.get(f"{path}.input")
        return found[0].index if found else -1

    def _serve_result(self, request: Request) -> None:
        mediator = request.mediator
        pending = mediator.pending
        if not mediator.alive or pending is None or pending.provider != "result":
            return
        try:
            mediator.handle("result", list(request.tokens))
        except Exception as exception:
            mediator.exception = exception
            mediator.pending = None
        else:
            if isinstance(mediator, PPMediator):
                mediator.surface()
        self._note(request)

    def _finish_dangling(self, request: Request) -> None:
        mediator: Mediator = request.mediator
        if not mediator.alive or mediator.pending is None:
            return
        error, expected = dangling_unwind(mediator)
        try:
            with mediator.inside() if isinstance(mediator, PPMediator) else nullcontext():
                mediator.worker.throw(error)
        except BaseException as thrown:
            if expected is not None and thrown is error:
                request.warnings.append(expected)
            else:
                mediator.nnsight_error = capture_exception(thrown)

    def status(self) -> dict[str, int]:
        """What is left of requests here, and the running totals."""
        if self.link is None:
            return {}
        self.link.wait_drained()
        return {
            "requests": len(self.requests) + len(self.link.core.requests),
            "workers": len(self._mediators()),
            "peak_entries": self.peak_entries,
            **self.link.status(),
        }


def _passed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for what a stage hands to the next."""
    return tuple(torch.zeros(tokens, tiny.HIDDEN, dtype=torch.float64) for _ in range(2))


# --- the process ------------------------------------------------------------------------------


def serve(connection: Any, stage: Stage) -> None:
    """Run functions of the parent's choice on the stage until it hangs up."""
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(stage, *args))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        connection.send(answer)


def main() -> None:
    from multiprocessing.connection import Connection

    fd, stage, stages, store, deadline_s = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-4)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(stage), world_size=int(stages)
    )
    connection = Connection(int(fd))
    built = Stage(int(stage), int(stages), float(deadline_s))
    connection.send((True, "ready"))
    serve(connection, built)


if __name__ == "__main__":
    from tests.harness.stage import main as run_as_imported  # what is pickled names this module

    run_as_imported()
