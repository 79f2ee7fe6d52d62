"""One rank over a plain module: what the engine's runner does around nnsight's and ppcore's requests.

`Stage` is a rank of a pipeline, `Whole` the reference: plain nnsight on one rank. Both run the same
steps, with nnsight's own `Requests`; a stage has `StagedRequests` mixed in front of it, as an engine's
rank has. Whoever drives them says how hidden states get from one stage to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from nnsight.intervention.interleaver import Interleaver
from nnsight.tracing.tracer import _saves

from ppcore.core import Core
from ppcore.runtime import exchange, stubs
from ppcore.runtime.calls import Calls
from ppcore.runtime.interleaver import PPInterleaver, Recording
from ppcore.runtime.link import Link
from ppcore.runtime.mediator import PPMediator
from ppcore.runtime.requests import StagedRequests
from ppcore.runtime.saved import forget_all, watch_saves
from ppcore.saves import Shipment

from .tree import ROOT, Missing, Spans, Tree
from .upstream import WARNED, Requests

#: Tokens and sequences of the dummy forward: extents that nothing in a model has.
DUMMY_TOKENS, DUMMY_SEQUENCES = 13, 11


@dataclass(frozen=True)
class Part:
    """One request's part of a step: its tokens, and the position of the first."""

    name: str
    ids: Sequence[int]
    start: int


@dataclass(frozen=True)
class New:
    """A request that arrives: its traced block, and the registered blocks that it runs.

    Attributes:
        payload: the traced block, serialized; None if the request has none.
        edits: names of registered blocks.
    """

    name: str
    payload: bytes | None
    edits: Sequence[str] = ()

    def data(self) -> Any:
        """The request as the engine's scheduler describes it."""
        extra: dict[str, Any] = {"nnsight_edits": list(self.edits)}
        if self.payload is not None:
            extra["nnsight_mediator"] = self.payload
        return SimpleNamespace(req_id=self.name, sampling_params=SimpleNamespace(extra_args=extra))


@dataclass
class Output:
    """What a block finds in ``tracer.result``, in the shape of the engine's: what was generated.

    Attributes:
        saves: what registered blocks saved for the request.
    """

    tokens: list[int]
    saves: dict[str, Any] = field(default_factory=dict)


class Rank:
    """What the two kinds of rank have in common."""

    tree: Tree
    requests: Any
    first = last = True
    #: The requests of a step that this rank may stay behind.
    _stays: Sequence[str] = ()

    def __init__(self, root: Any) -> None:
        self.root = root

    def _ready(self) -> None:
        interleaver = self.tree.interleaver
        interleaver.batcher = Spans(None)
        interleaver.defer_exceptions = True
        self.objects = self.tree.persistent()

    def register(self, blocks: Mapping[str, bytes]) -> None:
        """Install blocks by name, for the requests that name them."""
        for name, payload in blocks.items():
            self.requests.register(name, payload, self.objects, name=name)

    def unregister(self, names: Iterable[str]) -> None:
        """Forget registered blocks."""
        for name in names:
            self.requests.unregister(name)

    def step(
        self,
        parts: Sequence[Part],
        new: Sequence[New] = (),
        finished: Sequence[str] = (),
        *,
        receive: Callable[[int], Any] = lambda tokens: None,
        hand_on: Callable[[Any], None] = lambda out: None,
        lingers: bool = True,
    ) -> list[int]:
        """One forward step.

        Args:
            parts: the requests that take part, in the order of their rows.
            new: those among them that are here for the first time.
            finished: requests that have ended since the last step.
            receive: brings what the stage before hands on, for so many tokens.
            hand_on: takes what this stage hands to the next.
            lingers: whether it may stay behind its forward for what the next ones make.

        Returns:
            One sampled token for each part, on the last stage.
        """
        interleaver, requests = self.tree.interleaver, self.requests
        self._stays = [part.name for part in parts] if lingers else []
        watch_saves()
        if not requests.requests:
            forget_all()
        if finished:
            requests.harvest(set(finished))
        requests.add([request.data() for request in new], self.objects)
        interleaver.mediators = []
        tokens: list[int] = []
        with torch.inference_mode():
            with interleaver:
                requests.scope(self.tree, [(part.name, len(part.ids)) for part in parts])
                ids = torch.tensor([token for part in parts for token in part.ids])
                positions = torch.cat(
                    [torch.arange(part.start, part.start + len(part.ids)) for part in parts]
                )
                out = self.root(ids, positions, None if self.first else receive(len(ids)))
                requests.unflatten(self.tree)
            if not self.last:
                hand_on(out)
            self._forward_over()
            if self.last:
                tokens = self._sample(parts, out)
        requests.record_saves()
        self._step_over()
        return tokens

    def _forward_over(self) -> None:
        pass

    def _step_over(self) -> None:
        pass

    def _sample(self, parts: Sequence[Part], hidden: torch.Tensor) -> list[int]:
        ends = torch.tensor([len(part.ids) for part in parts]).cumsum(0) - 1
        logits = self.root.compute_logits(hidden[ends])
        with self._still_running():
            logits = Tree.logits.provide(self.tree, logits)
        tokens = self.root.sample(logits.clone())
        with self._still_running():
            tokens = Tree.samples.provide(self.tree, tokens)
        return [int(token) for token in tokens]

    def _still_running(self) -> Interleaver:
        interleaver = self.tree.interleaver
        interleaver.mediators = [m for m in interleaver.mediators if m.alive]
        interleaver.reindex()
        return interleaver

    def erred(self, name: str) -> bool:
        """Whether the request's traced block has ended by an exception."""
        request = self.requests.requests.get(name)
        mediator = request.mediator if request is not None else None
        return mediator is not None and mediator.exception is not None


class Whole(Rank):
    """The reference: the whole model on one rank, and plain nnsight."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self.tree = Tree(root, interleaver=Interleaver())
        self._ready()
        self.reset()

    def reset(self) -> None:
        """Begin anew, with no requests and no registered blocks."""
        self.requests = Requests()

    def collect(self, name: str, output: Any) -> tuple[dict[str, Any], list[str]]:
        """Wind up a request as the engine's runner does: its entry, and what it warned of."""
        requests = self.requests
        requests.harvest({name})
        request = requests.requests.get(name)
        made: dict[str, Any] = {"saves": {}, "error": None, "registered": {}}
        if request is None:
            return made, []
        for taken in request.harvested.values():
            made["registered"].update(taken["saves"])
            made["error"] = made["error"] or taken["error"]
        if request.mediator is not None:
            if made["registered"]:
                output.saves = dict(made["registered"])
            self._serve_result(request.mediator, output)
            requests.finish_dangling(request.mediator)
            made["saves"] = request.saves()
            for value in made["saves"].values():
                _saves().discard(id(value))
        made["error"] = made["error"] or request.deferred()
        requests.requests.pop(name)
        return made, _warned()

    def _serve_result(self, mediator: Any, output: Any) -> None:
        try:
            # An engine's collect is outside of inference mode, and refuses edits there. A worker of
            # several stages has the state that it parked with, and may go on editing.
            with torch.inference_mode():
                self.requests.serve_result(mediator, output)
        except Exception as error:
            # nnsight lets it out of the collect, and takes the engine down: the block's error.
            mediator.exception, mediator.pending = error, None
            self.requests.record(mediator)


class Fault(Exception):
    """A traced block that raises on one rank alone."""


def _raising(faults: dict[str, int]) -> type[PPMediator]:
    """Workers of which some raise where they are parked.

    Args:
        faults: request -> how often its traced block runs on before it raises; counted down, below 0
            once it has raised.
    """

    class Raising(PPMediator):
        def _resume(self, *args: Any) -> Any:
            name, block = self.worker_id
            if block or name not in faults:
                return super()._resume(*args)
            faults[name] -= 1
            return super()._resume(*args) if faults[name] != -1 else self._throw_or_resume(_fault)

    return Raising


def _fault() -> None:
    raise Fault("fault")


class _StageRequests(StagedRequests, Requests):
    """nnsight's requests on a rank of a pipeline."""


@dataclass
class Known:
    """What a stage learned at load; see `ppcore.runtime.exchange`."""

    whole: exchange.Whole
    visits: list[str] = field(default_factory=list)


class Stage(Rank):
    """One rank of a pipeline.

    Args:
        root: the whole model; what is not of this stage is dropped.
        gather: an all-gather of objects over the column, in stage order.
    """

    link: Link
    faults: dict[str, int]
    #: Whether modules run on the forward's thread only, as where columns gather inside of them.
    collective = False

    def __init__(self, root: Any, stage: int, stages: int, gather: Callable[[Any], list]) -> None:
        super().__init__(root)
        self.stage, self.stages = stage, stages
        self.first, self.last = stage == 0, stage == stages - 1
        shared = stubs.aliases(root, ROOT)
        root.keep(stage, stages)
        whole = exchange.load(root, ROOT, (Missing,), shared, gather)
        self.interleaver = PPInterleaver()
        self.tree = Tree(root, interleaver=self.interleaver)
        recordings = self._record()
        exchange.learn(whole, recordings, gather)
        self.known = Known(whole, [visit for found in recordings for visit in found.visits])
        self._ready()

    def _record(self) -> list[Recording]:
        """One dummy forward, with this rank's visits recorded."""
        interleaver = self.interleaver
        recordings = [Recording(DUMMY_TOKENS)]
        interleaver.recording = recordings[0]
        interleaver.interleaving = interleaver.busy = True
        with torch.inference_mode():
            numbers = torch.zeros(DUMMY_TOKENS, dtype=torch.int64)
            passed = None if self.first else self.root.passed(DUMMY_TOKENS)
            hidden = self.root(numbers, numbers, passed)
            if self.last:
                recordings.append(Recording(DUMMY_TOKENS, DUMMY_SEQUENCES))
                interleaver.recording = recordings[-1]
                logits = self.root.compute_logits(hidden[:DUMMY_SEQUENCES])
                recordings.append(Recording(DUMMY_TOKENS, DUMMY_SEQUENCES, own_row=True))
                interleaver.recording = recordings[-1]
                Tree.logits.provide(self.tree, logits)
                Tree.samples.provide(self.tree, self.root.sample(logits))
        interleaver.recording = None
        interleaver.interleaving = interleaver.busy = False
        return recordings

    def core(self) -> Core:
        """A protocol state for this stage; what its calls knew of one before is gone."""
        whole = self.known.whole
        assert whole.schedule is not None
        paths = dict(stubs.modules(self.root, ROOT))
        self.calls = Calls(self.interleaver, paths, collective=self.collective)
        return Core(self.stage, whole.schedule, whole.homes)

    def connect(self, link: Link, faults: Mapping[str, int] | None = None) -> None:
        """Serve requests over ``link`` from now on; nothing is left of those before.

        Args:
            faults: request -> how often its traced block runs on here before it raises.
        """
        whole = self.known.whole
        self.link = link
        self.interleaver.connect(link, whole.templates, self.known.visits, whole.spanning)
        self.interleaver.calls = self.calls
        self.interleaver.mediators = []
        self.faults = dict(faults or {})
        mediators = _raising(self.faults) if faults else PPMediator
        self.requests = _StageRequests(link, mediators, self._leaves)

    def _leaves(self) -> bool:
        """Whether it stays behind the forward of the step that it is in."""
        running = {name for name in self.requests.requests if not self.link.core.ended(name)}
        return not self.last and running <= {*self._stays}

    def _forward_over(self) -> None:
        self.requests.check_abandoned()
        if self._leaves():
            self.requests.linger(self._stays)

    def _step_over(self) -> None:
        self.link.close_round()

    def collect(self, name: str, output: Any) -> tuple[Shipment | None, list[str]]:
        """Wind up a request: this rank's shipment, and what it warned of."""
        shipments = self.requests.collect({name}, {name}, {name: output})
        return shipments.get(name), _warned()

    def status(self) -> dict[str, int]:
        """What is left of requests here, and the running totals."""
        return {
            "requests": len(self.requests.requests) + len(self.link.core.requests),
            "workers": len(self.requests.workers()),
            **self.link.status(),
        }


def _warned() -> list[str]:
    """What this thread was warned of since the last call."""
    caught = WARNED.caught()
    found, caught[:] = list(caught), []
    return found
