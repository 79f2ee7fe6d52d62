"""One rank's end of the protocol: the core, its lock, its transport and what landed.

The forward thread and the transport's receiving threads meet here. With the lock held the core decides
and what it decided is carried out, a message handed to the transport included: messages leave in the
order in which they were decided on, whichever threads did. The lock is never held during I/O or torch
work: a value that a peer asked for is evaluated, and encoded, after it is let go.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from greenlet import getcurrent

from ..core import Core
from ..effects import Abandoned, Compute, Describe, Dropped, Effect, Landed, Send, Serve
from ..errors import DeadlineExceeded, Missed, refusal
from ..messages import Key, Message, Never, Reply, Worker, parse, spell
from . import codec, expression
from .lazy import Base
from .parking import parking
from .threadstate import apart, inferring
from .transport import Buffer, Transport
from .watchdog import Watchdog


class Forcing:
    """What a worker parks on that needs data of a later place: the pulls it waits for."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


class Link:
    """The driver of one rank's `Core`.

    Args:
        core: the protocol state.
        transport: carries frames to the other stages; None on a single stage.
        device: where this rank's tensors live.
        deadline_s: how long a wait may last before it ends with a report.
        watchdog: ends blocks that do not come back; None where nothing looks on.
        parameter: location of a module's parameter -> the tensor, for peers that need one.
        describe: a call's spelling -> the structure it returns, spelled (see `calls`).
        compute: computes a call that a peer gave, and publishes the result (see `calls`).
        dropped: told of each request of which nothing is left.
        changed: the lock, and what waits for a change wait on; the simulator passes its own.
    """

    def __init__(
        self,
        core: Core,
        transport: Transport | None,
        device: torch.device,
        *,
        deadline_s: float = 300.0,
        watchdog: Watchdog | None = None,
        parameter: Callable[[str], torch.Tensor] | None = None,
        describe: Callable[[str], str] | None = None,
        compute: Callable[[Compute], None] | None = None,
        dropped: Callable[[str], None] = lambda request: None,
        changed: threading.Condition | None = None,
    ) -> None:
        self.core = core
        self.transport = transport
        self.device = device
        self.deadline_s = deadline_s
        self.watchdog = watchdog
        self.pulled_bytes = 0
        self.host_copies = 0
        self._parameter = parameter
        self._describe = describe
        self._compute = compute
        self._dropped = dropped
        lock = threading.RLock()
        self._changed = changed or threading.Condition(lock)
        # The same lock, for who neither waits nor wakes: to take it so costs a tenth.
        self._lock = changed or lock
        # Pull number -> its value, until no lazy needs it.
        self._landed: dict[int, Any] = {}
        self._refused: dict[int, str] = {}
        self._abandoned: dict[Worker, Abandoned] = {}
        # Bases that no lazy needs, put here by destructors on any thread.
        self._forgotten: deque[tuple[int, Key, list[int]]] = deque()
        self._closed = False
        # Pull number -> when it was asked for.
        self._since: dict[int, float] = {}
        if transport is not None:
            transport.start(self._on_frame, self._on_death)

    # --- carrying out what the core says ------------------------------------------------------

    def _do(self, decide: Callable[[], Iterable[Effect]]) -> None:
        """Have the core decide, and carry out what it says."""
        with self._changed:
            if self._closed:
                return  # what peers still say, while both leave, is nothing to a rank that has left
            slow = self._carry_out(decide())
            self._changed.notify_all()
        self._answer_all(slow)

    def _answer_all(self, slow: list[Serve | Describe | Compute]) -> None:
        if slow:
            # It may be a worker's thread that decided.
            with inferring(), apart():
                for effect in slow:
                    self._answer(effect)

    def _carry_out(self, effects: Iterable[Effect]) -> list[Serve | Describe | Compute]:
        """Do what is cheap, with the lock held; what takes a while is returned."""
        slow: list[Serve | Describe | Compute] = []
        for effect in effects:
            match effect:
                case Send(peer, message, payload):
                    self._send(peer, message, payload or ())
                case Serve() | Describe() | Compute():
                    slow.append(effect)
                case Landed(number, token, reason):
                    if number not in self._since:
                        pass  # nobody needs it any more
                    elif reason is not None:
                        self._refused[number] = reason
                    else:
                        self._landed[number] = token
                case Abandoned(worker):
                    self._abandoned.setdefault(worker, effect)
                case Dropped(request):
                    for worker in [w for w in self._abandoned if w.request == request]:
                        del self._abandoned[worker]
                    self._dropped(request)
        return slow

    def _send(self, peer: int, message: Message, payload: Sequence[Buffer] = ()) -> None:
        assert self.transport is not None
        self.transport.send(peer, spell(message), payload)

    def _answer(self, effect: Serve | Describe | Compute) -> None:
        """Evaluate what a peer asked for and send it, or publish it where it is a call."""
        if isinstance(effect, Compute):
            assert self._compute is not None
            self._compute(effect)
            return
        payload: Sequence[Buffer] = ()
        message: Reply | Never = Reply(effect.number)
        try:
            payload = codec.pieces(self._asked_value(effect))
        except Exception as error:
            message = Never(effect.number, f"failed: {type(error).__name__}: {error}")
        with self._changed:
            self.core.sent_reply(effect.peer, message)
            self._send(effect.peer, message, payload)

    def _asked_value(self, effect: Serve | Describe) -> Any:
        if isinstance(effect, Describe):
            assert self._describe is not None
            return self._describe(effect.call)
        token = effect.token
        if isinstance(token, str):
            assert self._parameter is not None
            token = (self._parameter(token),)
        if isinstance(token, Exception):
            raise token
        return expression.evaluate(effect.expression, token)

    # --- what the transport brings ------------------------------------------------------------

    def _on_frame(self, peer: int, text: str, payload: memoryview) -> None:
        message = parse(text)
        token = None
        if len(payload):
            with inferring():
                token = self._to_device(codec.decode(payload))

        def take() -> list[Effect]:
            self.pulled_bytes += len(payload)
            return self.core.take(peer, message, token)

        self._do(take)

    def _on_death(self, peer: int, why: str) -> None:
        self._do(lambda: self.core.peer_died(peer, why))

    def _to_device(self, value: Any) -> Any:
        if self.device.type == "cpu":
            return value
        from .lazy import map_tensors

        return map_tensors(value, lambda path, tensor: tensor.to(self.device))

    # --- forcing (the lazies' Fetcher) --------------------------------------------------------

    def request(self, wanted: list[tuple[Base, str]]) -> list[int]:
        """Ask for the expressions, without waiting; the numbers of the pulls, in order."""
        numbers: list[int] = []
        with self._changed:
            for base, text in wanted:
                number, effects = self.core.pull(
                    base.key, base.location, text, base.owner, base.available
                )
                if number not in base.numbers:
                    base.numbers.append(number)
                numbers.append(number)
                self._since.setdefault(number, time.monotonic())
                self._carry_out(effects)
        return numbers

    def fetch(self, wanted: list[tuple[Base, str]]) -> list[Any]:
        """The values of the expressions, in order.

        Blocks where the wait rule allows it, and parks the calling worker otherwise.

        Raises:
            Missed: the rule does not allow it and no worker calls: a write whose value a later stage
                produces in the same turn.
            BlockError: the worker is inside of what cannot be parked (see `parking`).
        """
        numbers = self.request(wanted)
        in_worker = getattr(getcurrent(), "mediator", None) is not None
        while not self.may_wait(numbers):
            if not in_worker:
                late = wanted[0][0]
                raise Missed(
                    f"stage {self.core.stage} needs {late.location!r} ({late.key}), which stage "
                    f"{late.owner} produces only after it in the same turn"
                )
            # The rank's loop resumes the worker once it may wait, and the values are here.
            with parking():
                getcurrent().parent.switch(Forcing(numbers))  # type: ignore[union-attr]
        if not self.ready(numbers):
            self.wait(numbers)
        return self.values(numbers)

    def values(self, numbers: list[int]) -> list[Any]:
        """The answers to these pulls, in order.

        Raises:
            Unreachable: the owner cannot produce one.
            Exception: what evaluating it raised there, by its type.
            Diverged: the block ran differently there.
            PeerDied: the owner is gone.
        """
        return [self._value(number) for number in numbers]

    def forget(self, owner: int, key: Key) -> None:
        """This rank will not ask for ``key``."""
        self._forgotten.append((owner, key, []))

    def _value(self, number: int) -> Any:
        reason = self._refused.get(number)
        if reason is not None:
            raise refusal(reason)
        return self._landed[number]

    def ready(self, numbers: Iterable[int]) -> bool:
        """Whether every one of these pulls is answered."""
        return all(number in self._landed or number in self._refused for number in numbers)

    def may_wait(self, numbers: Iterable[int]) -> bool:
        """Whether this rank's forward thread may wait for these pulls (the wait rule)."""
        with self._changed:
            return self.core.may_wait(numbers)

    def wait(self, numbers: Sequence[int]) -> None:
        """Block this thread until these pulls are answered; the wait rule must allow it."""
        with self._changed:
            self.core.wait(numbers)
        self.until(lambda: self.ready(numbers), "a pull")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Block this thread until ``condition`` holds.

        Raises:
            DeadlineExceeded: it did not within the deadline; the text lists who waits for what.
        """
        end = time.monotonic() + self.deadline_s
        waiting = self.watchdog.waiting() if self.watchdog else contextlib.nullcontext()
        with waiting, self._changed:
            while not condition():
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(self.report(what))
                self._changed.wait(min(left, 1.0))

    def report(self, what: str) -> str:
        """The wait-for edges of this rank with their ages, for an error text."""
        now = time.monotonic()
        waiting = [
            since
            for number, since in self._since.items()
            if number not in self._landed and number not in self._refused
        ]
        oldest = min(waiting, default=now - self.deadline_s)
        waits = self.core.waits() or [
            f"stage {self.core.stage} (round {self.core.round}) waits for {what}"
        ]
        return (
            f"waited {self.deadline_s:.0f} s for {what} (oldest pull: {now - oldest:.0f} s); "
            + "; ".join(waits)
        )

    def probe(self, owner: int, call: str) -> str:
        """Ask ``owner`` what structure a call returns (spelled, see `calls`); blocks."""
        with self._changed:
            number, effects = self.core.probe(owner, call)
            self._since[number] = time.monotonic()
            self._carry_out(effects)
        self.wait([number])
        try:
            return self._value(number)
        finally:
            self._drop([number])

    def forgotten(self, base: Base) -> None:
        """A destructor's word that ``base`` is needed no more."""
        self._forgotten.append((base.owner, base.key, base.numbers))

    # --- what the rank's loop calls -----------------------------------------------------------

    def open_round(self, requests: list[str], *, leaves: bool = False) -> None:
        """A forward step begins.

        Args:
            leaves: whether this rank will leave the round behind its forward.
        """

        def decide() -> list[Effect]:
            effects = self.core.open_round(requests)
            if leaves:
                self.core.will_leave_round()
            return effects

        self._do(decide)

    def leave_round(self) -> None:
        """The forward step is over here, what it handed on has arrived, and nothing else is to do."""
        self._do(self.core.leave_round)

    def close_round(self) -> None:
        """The forward step is over: tell owners what this rank can force no more."""
        self._flush()

    def _flush(self) -> None:
        with self._changed:
            released: list[tuple[int, Key]] = []
            while self._forgotten:
                owner, key, numbers = self._forgotten.popleft()
                if key.access >= 0 and key.worker.request:
                    released.append((owner, key))
                self._drop(numbers)
                self.core.forget(key)
            if released:
                self._carry_out(self.core.release(released))

    def _drop(self, numbers: Iterable[int]) -> None:
        """Nobody needs these pulls any more, whether they are answered or not."""
        with self._changed:
            for number in numbers:
                self._landed.pop(number, None)
                self._refused.pop(number, None)
                self._since.pop(number, None)

    def publish(self, key: Key, location: str, value: Any) -> None:
        """This rank's worker read ``value``: keep it as it is now for whoever asks."""
        with self._lock:
            if not self.core.asked_for(key):
                self.core.publish(key, location, None, 0)
                return
        kept, size = self.kept(value)
        with self._lock:  # nobody here waits for what this rank publishes
            if self._closed:
                return
            slow = self._carry_out(self.core.publish(key, location, kept, size))
        self._answer_all(slow)

    def kept(self, value: Any) -> tuple[Any, int]:
        """``value`` with its tensors as they are now, and their bytes."""
        from .lazy import map_tensors

        kept = map_tensors(value, lambda path, tensor: self._keep(tensor))
        return kept, codec.size_bytes(kept)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that later work cannot change.

        On an accelerator it is taken to the host here, in the order of the forward's stream: a copy
        from the thread that answers pulls would race with what the forward does next.
        """
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_cpu:
            return tensor.clone()
        self.host_copies += 1
        return tensor.to("cpu")

    def failed(self, worker: Worker, error: dict) -> None:
        """The worker raised here: tell every rank."""
        if self.transport is not None:
            self._do(lambda: self.core.fail(worker, json.dumps(error)))

    def abandoned(self, worker: Worker, *, at_once: bool = False) -> dict | None:
        """The error with which another rank ended this worker, once it has got as far here.

        Args:
            at_once: wherever it is here.
        """
        with self._changed:
            found = self._abandoned.get(worker)
            if found is None:
                return None
            reached = self.core.reached(worker, found.access) or self.core.ended(worker.request)
        return json.loads(found.error) if reached or at_once else None

    def block_begins(self, worker: Worker) -> None:
        """A worker's block is about to run on this thread."""
        if self.watchdog is not None:
            self.watchdog.begin(hurry=worker in self._abandoned)

    def block_parks(self) -> None:
        """It touched the model, or ended."""
        if self.watchdog is not None:
            self.watchdog.end()

    def finish(self, worker: Worker) -> None:
        """The worker makes no further access."""
        self._do(lambda: self.core.finish(worker))

    def end(self, request: str) -> None:
        """The request takes part in no further round."""
        with self._changed:
            self.core.end(request)

    def exchange_held(
        self, request: str, leaves: Callable[[dict[int, str]], str], *, wait: bool
    ) -> None:
        """Learn what the earlier stages ship of a request's saves, and tell the later ones.

        Args:
            leaves: turns what the earlier stages ship into what this one does.
            wait: whether this rank has any leaf, and so cares what the earlier ones ship.

        Raises:
            DeadlineExceeded: an earlier stage did not say; the later ones are told nevertheless.
        """
        late: DeadlineExceeded | None = None
        if wait:
            try:
                self.until(
                    lambda: self.core.held(request) is not None,
                    f"what earlier stages hold of {request!r}",
                )
            except DeadlineExceeded as error:
                late = error  # the later stages wait for this one's word all the same
        with self._changed:
            below = self.core.held(request) or {}
        mine = leaves(below)
        self._do(lambda: self.core.say_held(request, mine))
        if late is not None:
            raise late

    def say_done(self, request: str) -> None:
        """This rank pulls nothing more of the request."""
        self._flush()
        self._do(lambda: self.core.say_done(request))

    def wait_drained(self) -> None:
        """Block until nothing of an ended request is left here."""
        self.until(self.core.drained, "the other stages to be done with ended requests")

    def status(self) -> dict[str, int]:
        """The counters that this rank's status shows."""
        with self._changed:
            entries, size = self.core.buffered()
            return {
                "buffer_entries": entries,
                "buffer_bytes": size,
                "pending_pulls": self.core.pending(),
                "pulls_total": self.core.counters.pulls,
                "pulled_bytes_total": self.pulled_bytes,
                "messages_total": self.core.counters.messages,
                "host_copies_total": self.host_copies,
            }

    def close(self) -> None:
        """Leave the column."""
        with self._changed:
            self._closed = True
            self.core.close()
        if self.watchdog is not None:
            self.watchdog.close()
        if self.transport is not None:
            self.transport.close()
