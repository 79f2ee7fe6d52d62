"""A worker that runs on every rank of a column.

nnsight's `Mediator` runs a block as a greenlet that parks on a location until the model's forward
reaches it. On one stage of several, most locations are never reached here. This subclass looks at
what the worker parked on at the one place where every park passes, `switch`, and asks the core what
becomes of it: wait for this rank's forward, answer at once with a lazy, or stay parked until a turn
opens or a value lands.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent
from nnsight.intervention.errors import capture_exception
from nnsight.intervention.interleaver import EarlyStopException, Event, Mediator, Pending

from ..core import Available, Decision, Verdict
from ..errors import BlockError, DeadlineExceeded, Missed, PPError
from ..messages import Worker
from ..schedule import REPLICATED
from ..seat import Move, Seat
from . import collect, expression, lazy, tracebacks
from .lazy import Base, LazyTensor
from .left import Left
from .link import Forcing
from .threadstate import Draws, Kept, may_draw

if TYPE_CHECKING:
    from .interleaver import PPInterleaver, Rows
    from .link import Link

#: What a worker is parked on, to nnsight, when the model can do nothing for it.
IDLE = Pending(Event.BARRIER, None)

#: The whole value of an access, whatever its structure.
_WHOLE = expression.of_leaf(())


class Told(dict):
    """An error, as nnsight captures one, that another rank raised."""


class PPMediator(Mediator):
    """A [`Mediator`] whose accesses may belong to other stages.

    Attributes:
        worker_id: the worker's name, the same on every rank.
        seat: what the worker is parked on, to the protocol.
        held: the same to nnsight, where this rank's forward will not serve it.
        parameters: location -> the lazy of another stage's parameter, once the block has read it.
    """

    link: Link
    worker_id: Worker
    seat: Seat
    held: Pending | None
    parameters: dict[str, LazyTensor]

    @classmethod
    def adopt(cls, mediator: Mediator, worker: Worker, link: Link) -> PPMediator:
        """Turn a mediator that has not started into one of these."""
        mediator.__class__ = cls
        adopted: PPMediator = mediator  # type: ignore[assignment]
        adopted.link = link
        adopted.worker_id = worker
        adopted.seat = Seat(link.core, worker)
        adopted.held = None
        adopted._resume_with = None
        adopted._reported = False
        adopted._left = Left()
        adopted.parameters = {}
        adopted._seen = {}
        adopted._rows = {}
        draws = None
        if may_draw(mediator.code, mediator.lcls):
            draws = Draws(zlib.crc32(str(worker).encode()))
        adopted._state = Kept(draws)
        return adopted

    # Makes what a fetched read is answered with; None while the worker itself waits in a lazy.
    _resume_with: Callable[[], Any] | None
    # The visit that the forward left while the worker was parked for a late value.
    _left: Left
    # What this worker sees of the visit that its clock stands at: location -> value.
    _seen: dict[Any, Any]
    # Whether this worker's end by an error is known to the other ranks.
    _reported: bool
    # Turn -> the rows that this worker had in it. A worker may act in a turn after its rank is through
    # with it: it was parked for a value of a later stage.
    _rows: dict[int, Rows]
    _state: Kept

    # --- nnsight's side -----------------------------------------------------------------------

    def start(self, interleaver: Any = None) -> None:
        with self.link._changed:
            self.link.core.start(self.worker_id)
        try:
            super().start(interleaver)
        except Exception as error:
            self.pending = None
            self._report(error)
            raise

    def wanted(self, location: str) -> int:
        if self.iteration is not None:
            return self.iteration
        if not self.link.core.knows(location):
            return super().occurrence(location)
        return self.link.core.wanted(self.worker_id, location)

    def occurrence(self, location: str) -> int:
        """Which occurrence of ``location`` the visit that this rank's forward is at would be."""
        found = self._at(location)
        return super().occurrence(location) if found is None else found

    def _at(self, location: str) -> int | None:
        """The same; None where no stage's forward visits the location."""
        interleaver: PPInterleaver = self.interleaver
        visited = interleaver.visited(location)
        return self.link.core.occurrence(self.worker_id.request, location, visited)

    def switch(self, *args: Any) -> Any:
        return self._settle(self._resume(*args))

    def _resume(self, *args: Any) -> Any:
        frame = None
        if self._left.watched:
            self._left.resumes(self.link.core.clock(self.worker_id))
            frame = tracebacks.blocks_frame(self.worker)
        self._enter()
        try:
            pending = super().switch(*args)
        except Exception as error:
            error.__intervention_tb__ = tracebacks.blocks_own(error)  # type: ignore[attr-defined]
            raise
        finally:
            self._leave()
        if self._left.watched and self._left.edited():
            pending = self._end_late(self._left.error(self.link.core.stage), frame)
        if not self.alive:
            self.link.finish(self.worker_id)
        return pending

    def _end_late(self, error: Missed, frame: FrameType | None) -> Any:
        """It has edited what this rank's forward went on with: end it where it is parked now.

        Args:
            frame: the block's; one that is through is told the line that it ended with.
        """
        if not self.alive:
            if frame is not None:
                error.__intervention_tb__ = tracebacks.at(frame)  # type: ignore[attr-defined]
            raise error
        with self.inside():
            return self.worker.throw(error)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While the worker is entered past `switch`: unwound at the end of its request."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        self._state.enter()
        self.link.block_begins(self.worker_id)

    def _leave(self) -> None:
        self.link.block_parks()
        self._state.leave()

    def handle(self, provider: str, value: Any) -> Any:
        pending = self.pending
        if pending is None or pending.provider != provider:
            return value
        try:
            return self._handle(provider, value)
        except Exception as error:
            self._report(error)
            raise

    def _handle(self, provider: str, value: Any) -> Any:
        occurrence = self.occurrence(provider)
        batcher = self.interleaver.batcher
        link, worker = self.link, self.worker_id
        while (
            (pending := self.pending) is not None
            and pending.provider == provider
            and pending.iteration == occurrence
        ):
            if self.iteration:
                self.iteration = None
            decision = self.seat.decision
            assert decision is not None
            scheduled = link.core.knows(provider)
            if scheduled or provider in REPLICATED:
                with link._lock:
                    link.core.served(worker, decision.place)
                self._seen = {}
            if pending.event is Event.VALUE:
                served = batcher.narrow(value, self.batch_group)
                if scheduled:
                    link.publish(decision.key, provider, served)
                self._left.serves = decision.place, provider, served
                try:
                    self.pending = self.switch(served)
                finally:
                    self._left.serves = None
            else:
                given = lazy.resolve(pending.value)
                if pending.event is Event.SWAP:
                    self.interleaver.check_swap(provider)
                    widened = batcher.widen(value, self.batch_group, given)
                    _check_dtype(provider, given, value)
                    value = widened
                else:
                    self.interleaver.check_skip(provider)
                    value = batcher.gather_skip(value, self.batch_group, given)
                self.pending = self.switch()
        return value

    def _report(self, error: Exception) -> None:
        """This worker raised: tell the other ranks, unless one of them is the cause."""
        if isinstance(error, EarlyStopException):
            self.link.finish(self.worker_id)
            return
        if self._reported:
            return
        self._reported = True
        cause = (
            self.link.abandoned(self.worker_id, at_once=True)
            if isinstance(error, PPError)
            else None
        )
        if cause is not None:
            self.abandon(cause)
        else:
            self.link.failed(self.worker_id, dict(capture_exception(error)))

    # --- the protocol's side ------------------------------------------------------------------

    def _settle(self, pending: Any) -> Any:
        """Answer what the worker parked on for as long as that needs no wait."""
        while pending is not None:
            if isinstance(pending, Forcing):
                self.seat.need(pending.numbers)
                self._left.parks()
                return IDLE
            if pending.event is Event.BARRIER:
                return pending
            passed = self._passed(pending)
            with self.link._lock:
                verdict = self.seat.ask(pending.provider, pending.iteration, passed=passed)
            parked, pending = self._apply(verdict, pending)
            if parked is not None:
                return parked
        return None

    def _apply(self, verdict: Verdict, pending: Pending) -> tuple[Pending | None, Any]:
        """Do what was decided: (what to stay parked on, or None and the next request)."""
        if verdict is Verdict.ANSWER:
            assert self.seat.decision is not None
            return self._answer(pending, self.seat.decision)
        if verdict is Verdict.LOCAL:
            if pending.event is not Event.VALUE:
                lazy.prefetch(pending.value)
            return pending, None
        self.held = pending
        return IDLE, None

    def _passed(self, pending: Pending) -> bool:
        """Whether this rank's forward is beyond the visit that the worker wants."""
        at = self._at(pending.provider)
        return at is not None and at > pending.iteration

    def _answer(self, pending: Pending, decision: Decision) -> tuple[Pending | None, Any]:
        # nnsight takes it from this that a block has touched a value, and cannot open a cache any more.
        # That has to be so on every rank: an error that some are only told of would part the columns.
        self.pending = pending
        location = pending.provider
        if self.iteration:
            self.iteration = None
        if (decision.place, location) not in self._seen:
            self._seen = {
                key: value for key, value in self._seen.items() if key[0] == decision.place
            }
        slot: Any = (decision.place, location)
        if pending.event is Event.SWAP:
            self.interleaver.check_swap(location)
            self._seen[slot] = lazy.map_tensors(pending.value, lambda path, tensor: tensor.clone())
            return None, self._resume()
        if pending.event is Event.SKIP:
            self.interleaver.check_skip(location)
            return None, self._resume()
        if slot in self._seen:
            self.link.forget(decision.owner, decision.key)
            return None, self._resume(_again(self._seen[slot]))
        base = Base(
            self.link,
            decision.key,
            location,
            decision.owner,
            Available(decision.place.turn, decision.owner),
            self.interleaver.fixed(location),
        )
        template = self.interleaver.templates.get(location)
        if template is None:
            return self._fetch(base, slot)
        value = template.lazies(base, self._rows[decision.place.turn], self.link.device)
        self._seen[slot] = value
        return None, self._resume(value if _unchanging(value) else _again(value))

    def _fetch(self, base: Base, slot: Any) -> tuple[Pending | None, Any]:
        """Read a location of unknown structure: bring it whole.

        Nothing that this worker may still ask for in this turn lies before the owner's stage, so
        that parking here costs a transfer and no visit.
        """
        numbers = self.link.request([(base, _WHOLE)])

        def value(base: Base = base) -> Any:  # the base lives until its value is here
            self._seen[slot] = self.link.values(numbers)[0]
            return _again(self._seen[slot])

        if self.link.may_wait(numbers):
            self.link.wait(numbers)
            return None, self._throw_or_resume(value)
        self.seat.need(numbers)
        self._resume_with = value
        return IDLE, None

    def _throw_or_resume(self, value: Callable[[], Any]) -> Any:
        try:
            found = value()
        except Exception as error:
            return self._throw(error)
        return self._resume(found)

    def _throw(self, error: Exception) -> Any:
        """Let the worker go on with an error at the line where it is parked."""
        with self.inside():
            pending = self.worker.throw(error)
        if not self.alive:
            self.link.finish(self.worker_id)
        return pending

    def opened(self, rows: Rows) -> None:
        """A turn of this worker's request has opened here, in which it has ``rows``."""
        turn = self.link.core.turn(self.worker_id.request)
        stands = self.link.core.clock(self.worker_id).turn if self.worker is not None else turn
        self._rows = {t: found for t, found in self._rows.items() if t >= stands}
        self._rows[turn] = rows
        for cache in self.caches:
            collect.opened(cache, turn)

    def advance(self) -> None:
        """A turn of this worker's request has opened here, or the request has ended.

        What was parked for that carries on; what it raises is raised here.
        """
        try:
            self._advance()
        except Exception as error:
            self._report(error)
            raise

    def _advance(self) -> None:
        while True:
            with self.link._changed:
                move = self.seat.go_on()
            if move is Move.STAY:
                return
            if move is Move.WAIT:
                self.pending = self._settle(self._awaited())
            else:
                pending, self.held = self.held, None
                assert pending is not None
                passed = self._passed(pending)
                with self.link._changed:
                    verdict = self.seat.retry(passed=passed)
                parked, following = self._apply(verdict, pending)
                self.pending = parked if parked is not None else self._settle(following)

    def _awaited(self) -> Any:
        """Wait for what the worker needs, and let it go on with that, or with the wait's error."""
        resume, self._resume_with = self._resume_with, None
        late: DeadlineExceeded | None = None
        try:
            self.link.wait(self.seat.pulls)
        except DeadlineExceeded as error:
            late = error
        self.seat.take()
        if late is not None:
            return self._throw(late)
        return self._resume() if resume is None else self._throw_or_resume(resume)

    def surface(self) -> None:
        """Show nnsight what the worker is really parked on, for it to report: the run is over."""
        if self.held is not None:
            self.pending, self.held = self.held, None

    def abandon(self, error: dict) -> None:
        """Another rank ended this worker with ``error``."""
        self.nnsight_error = Told(error)
        self._reported = True
        self.exception = Missed("ended by another rank")
        self._end()

    def drop(self) -> None:
        """Nobody wants this worker any more: end it where it is parked."""
        self._end()
        self.let_go()

    def _end(self) -> None:
        self.pending = self.held = None
        self.seat.take()
        self._unwind()
        self.link.finish(self.worker_id)

    def _unwind(self) -> None:
        """End the block where it is parked; what its ``finally`` clauses raise is nobody's error.

        Left parked, it would keep its frames, and all values in them, until a collector that happens to
        run on this thread comes by.
        """
        if self.alive:
            self.worker.parent = getcurrent()
            with self.inside(), contextlib.suppress(Exception):
                self.worker.throw(GreenletExit)

    def let_go(self) -> None:
        """The request is over: hold nothing of it, whoever holds this.

        nnsight's unwinding leaves a worker in a cycle with the traceback of what ended it; until the
        collector comes by, that would keep every value that the block had a name for.
        """
        self.lcls.clear()
        self.lcls.shared.clear()
        self.caches = []
        self.pending = self.held = self._resume_with = None
        self._left = Left()
        self.parameters = {}
        self._seen = {}
        self._rows = {}
        if self.exception is not None:
            self.exception.__dict__.pop("__intervention_tb__", None)
            self.exception.__context__ = self.exception.__traceback__ = None


def _check_dtype(location: str, given: Any, value: Any) -> None:
    """Refuse a replacement that the model's forward cannot take: it would end there, and the engine with it.

    Logits are the sampler's, which takes any.

    Raises:
        BlockError: a floating tensor is of another dtype than what it replaces.
    """
    if isinstance(given, (tuple, list)) and isinstance(value, (tuple, list)):
        for one, other in zip(given, value, strict=False):
            _check_dtype(location, one, other)
    elif isinstance(given, torch.Tensor) and isinstance(value, torch.Tensor):
        both = given.is_floating_point() and value.is_floating_point()
        if both and given.dtype != value.dtype and location.endswith((".output", ".input")):
            raise BlockError(
                f"{location!r} is {value.dtype}, and its replacement {given.dtype}: convert it with "
                f".to({value.dtype})"
            )


def _unchanging(value: Any) -> bool:
    """Whether a block cannot change what holds the tensors of a value."""
    if isinstance(value, tuple):
        return all(map(_unchanging, value))
    return not isinstance(value, (list, dict))


def _again(value: Any) -> Any:
    """What a further read of the same visit gets: new objects over the same memory."""

    def alias(path: tuple, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, LazyTensor):
            family = tensor.node.family
            if not tensor.node.executed or (family is not None and family.fixed):
                return LazyTensor.of(tensor.node)
            tensor = tensor.node.value
        return tensor.view(tensor.shape)

    return lazy.map_tensors(value, alias)
