"""One rank's end of the protocol in the simulator: `ppcore.runtime.link.Link` without torch.

Methods that decide something and carry it out are generators: they yield where the runtime lets its
lock go, which is where another thread of the rank, or another rank, can come in between. A yielded
None means "I can go on", a yielded callable "not before this holds".
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ppcore.core import STATIC, Available, Core
from ppcore.effects import Abandoned, Compute, Dropped, Effect, Landed, Send, Serve
from ppcore.errors import DeadlineExceeded, Diverged, Missed, PeerDied, Unreachable
from ppcore.messages import Key, Message, Never, Reply, Worker

from .terms import CALL, term
from .values import Base, evaluate, parameter

if TYPE_CHECKING:
    from .world import World

#: What a thread yields: nothing, or what it waits for.
Wait = Callable[[], bool] | None


class Link:
    """The driver of one rank's `Core`.

    Attributes:
        landed: pull number -> its term, until no lazy needs it.
        refused: pull number -> why it is answered never.
        results: calls that were computed here -> their terms, until this rank's worker gets there.
        abandoned: workers that raised on another rank, where and with which error.
    """

    def __init__(self, core: Core, world: World, stage: int, column: int) -> None:
        self.core = core
        self.world = world
        self.stage = stage
        self.column = column
        self.landed: dict[int, int] = {}
        self.refused: dict[int, str] = {}
        self.results: dict[Key, int] = {}
        self.abandoned: dict[Worker, Abandoned] = {}
        self.lost: list[tuple[int, Key, list[int]]] = []
        # Pull number -> what it was asked for, for checks that do not ask the core.
        self.origins: dict[int, tuple[str, Available]] = {}
        self.live: dict[Key, int] = {}
        # What this rank's forward visits.
        self.locations = frozenset(world.visits[stage])
        # How often this round's forward has visited each location here.
        self.visited: dict[str, int] = {}
        # Whether the forward thread is blocked here, and whether its deadline is over.
        self.waiting = False
        self.expired = False

    # --- carrying out what the core says ------------------------------------------------------

    def carry_out(self, effects: Sequence[Effect]) -> Iterable[Wait]:
        """Do what the core said: all but evaluating at once, as the runtime does under its lock.

        So messages leave in the order in which they were decided. What a peer asked for is evaluated
        after the lock is let go: others may come in before.
        """
        if not effects:
            return ()
        slow: list[Serve | Compute] = []
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                assert isinstance(effect, Send)
                peer, message, token = effect
                self.world.send(self.stage, self.column, peer, message, token)
            elif kind is Serve or kind is Compute:
                slow.append(effect)  # type: ignore[arg-type]
            else:
                self._at_once(effect)
        return self._answer_each(slow) if slow else ()

    def _answer_each(self, slow: list[Serve | Compute]) -> Iterator[Wait]:
        for effect in slow:
            yield None
            if isinstance(effect, Serve):
                self._serve(effect)
            else:
                yield from self._compute(effect)

    def _compute(self, effect: Compute) -> Iterator[Wait]:
        key, path = effect.key, effect.location
        argument = evaluate(effect.call, effect.of[0]) if effect.of else effect.token
        result = term(CALL, len(path), argument)
        if self.core.awaits(key):
            self.results[key] = result
        yield None
        token = result if self.core.asked_for(key) else None
        yield None
        yield from self.carry_out(self.core.computed(key, path, token, 1))

    def _at_once(self, effect: Effect) -> None:
        match effect:
            case Landed():
                if effect.number not in self.origins:
                    pass  # its base is forgotten: nobody would ever take it out again
                elif effect.reason is not None:
                    self.refused[effect.number] = effect.reason
                else:
                    self.landed[effect.number] = effect.token
            case Abandoned():
                self.abandoned.setdefault(effect.worker, effect)
            case Dropped():
                for worker in [w for w in self.abandoned if w.request == effect.request]:
                    del self.abandoned[worker]
                for key in [key for key in self.results if key.worker.request == effect.request]:
                    del self.results[key]
        self.world.stirred(self.stage, self.column)

    def send(self, peer: int, message: Message, token: int | None = None) -> None:
        """Put a message on its way; how long that takes is the scheduler's choice."""
        self.world.send(self.stage, self.column, peer, message, token)

    def _serve(self, effect: Serve) -> None:
        message: Reply | Never = Reply(effect.number)
        value = None
        token = effect.token
        if isinstance(token, str):
            token = parameter(token)
        if isinstance(token, int):
            value = evaluate(effect.expression, token)
        else:
            message = Never(effect.number, f"failed: no term: {effect.token!r}")
        self.core.sent_reply(effect.peer, message)
        self.send(effect.peer, message, value)

    def take(self, peer: int, message: Message, token: int | None) -> Iterable[Wait]:
        """A message arrived (on the thread that listens to ``peer``)."""
        effects = self.core.take(peer, message, token)
        self.world.stirred(self.stage, self.column)
        return self.carry_out(effects)

    def peer_died(self, peer: int, why: str) -> Iterable[Wait]:
        """The connection to ``peer`` broke."""
        effects = self.core.peer_died(peer, why)
        self.world.stirred(self.stage, self.column)
        return self.carry_out(effects)

    def ended_elsewhere(self, worker: Worker) -> str | None:
        """The error with which another rank ended this worker, once it has got as far here."""
        found = self.abandoned.get(worker)
        if found is None:
            return None
        if self.core.reached(worker, found.access) or self.core.ended(worker.request):
            return found.error
        return None

    # --- forcing ------------------------------------------------------------------------------

    def request(self, wanted: list[tuple[Base, str]]) -> Generator[Wait, None, list[int]]:
        """Ask for expressions of bases without waiting; the numbers of the pulls, in order."""
        yield None
        numbers: list[int] = []
        effects: list[Effect] = []
        for base, text in wanted:
            number, more = self.core.pull(base.key, base.location, text, base.owner, base.available)
            if number not in base.numbers:
                base.numbers.append(number)
            numbers.append(number)
            self.origins.setdefault(number, (base.key.worker.request, base.available))
            effects += more
        yield from self.carry_out(effects)
        return numbers

    def ready(self, numbers: list[int]) -> bool:
        """Whether every one of these pulls is answered."""
        landed, refused = self.landed, self.refused
        for number in numbers:  # noqa: SIM110 (asked again at every message)
            if number not in landed and number not in refused:
                return False
        return True

    def may_wait(self, numbers: Iterable[int]) -> bool:
        """Whether the wait rule lets this rank's forward wait for these pulls."""
        return self.core.may_wait(numbers)

    def wait(self, numbers: list[int]) -> Generator[Wait, None, None]:
        """Block the forward until these pulls are answered; the wait rule must allow it."""
        self.core.wait(numbers)
        self.world.properties.blocks(self, numbers)
        return self._until(lambda: self.ready(numbers), self.origins[numbers[0]][0], "a pull")

    def _until(
        self, condition: Callable[[], bool], request: str, what: str
    ) -> Generator[Wait, None, None]:
        self.waiting = True
        yield lambda: self.expired or condition()
        self.waiting = False
        if self.expired:
            self.expired = False
            if not condition():
                waits = self.core.waits() or [
                    f"stage {self.stage} (round {self.core.round}) waits for {what}"
                ]
                text = f"waited too long for {what}; {'; '.join(waits)}"
                self.world.properties.expired(self, request, text)
                raise DeadlineExceeded(text)

    def values(self, numbers: list[int]) -> list[int]:
        """The answers to these pulls.

        Raises:
            Unreachable, Diverged, PeerDied: the owner cannot produce one.
        """
        self.world.properties.takes(self, numbers)
        found: list[int] = []
        for number in numbers:
            reason = self.refused.get(number)
            if reason is not None:
                kind, _, text = reason.partition(": ")
                raise {"diverged": Diverged, "died": PeerDied}.get(kind, Unreachable)(text)
            found.append(self.landed[number])
        return found

    def fetch(self, wanted: list[tuple[Base, str]]) -> Generator[Wait, None, list[int]]:
        """The terms, outside any worker.

        Raises:
            Missed: the wait rule does not allow to wait for one.
        """
        numbers = yield from self.request(wanted)
        if not self.may_wait(numbers):
            raise Missed(f"stage {self.stage} needs {wanted[0][0].location!r} too early")
        if not self.ready(numbers):
            yield from self.wait(numbers)
        return self.values(numbers)

    def base(self, key: Key, location: str, owner: int, available: Available) -> Base:
        """A new remote read."""
        self.live[key] = self.live.get(key, 0) + 1
        return Base(self, key, location, owner, available)

    def forgotten(self, base: Base) -> None:
        """A destructor's word that ``base`` is needed no more."""
        self.forget(base.owner, base.key, base.numbers)
        left = self.live.get(base.key, 0) - 1
        if left > 0:
            self.live[base.key] = left
        else:
            self.live.pop(base.key, None)

    def forget(self, owner: int, key: Key, numbers: list[int]) -> None:
        """This rank will not ask for ``key``."""
        self.lost.append((owner, key, numbers))

    # --- what the rank's loop calls -----------------------------------------------------------

    def flush(self) -> Generator[Wait, None, None]:
        """Tell owners what this rank can force no more."""
        if not self.lost:
            return
        lost, self.lost = self.lost, []
        released: list[tuple[int, Key]] = []
        for owner, key, numbers in lost:
            if key.access != STATIC:
                released.append((owner, key))
            for number in numbers:
                self.landed.pop(number, None)
                self.refused.pop(number, None)
                self.origins.pop(number, None)
        if released:
            yield None
            yield from self.carry_out(self.core.release(released))

    def publish(self, key: Key, location: str, value: int) -> Generator[Wait, None, None]:
        """This rank's worker read ``value``: keep it as it is now for whoever asks."""
        yield None
        if not self.core.asked_for(key):
            self.core.publish(key, location, None, 0)
            return
        yield None
        yield from self.carry_out(self.core.publish(key, location, value, 1))

    def give(
        self, key: Key, path: str, home: int, argument: int | None, of: Base | None, text: str
    ) -> Generator[Wait, None, None]:
        """This rank has the argument of a call, or it is an expression of another call's result."""
        yield None
        keys = (of.key,) if of is not None else ()
        yield from self.carry_out(self.core.give(key, path, home, text, argument, keys))

    def failed(self, worker: Worker, error: str) -> Generator[Wait, None, None]:
        """The worker raised here: tell every rank."""
        yield None
        yield from self.carry_out(self.core.fail(worker, error))

    def finish(self, worker: Worker) -> Generator[Wait, None, None]:
        """The worker makes no further access."""
        yield None
        yield from self.carry_out(self.core.finish(worker))

    def say_done(self, request: str) -> Generator[Wait, None, None]:
        """This rank pulls nothing more of the request."""
        yield from self.flush()
        yield None
        yield from self.carry_out(self.core.say_done(request))

    def exchange_held(
        self, request: str, leaves: Callable[[dict[int, str]], str], *, wait: bool
    ) -> Generator[Wait, None, None]:
        """See `ppcore.runtime.link.Link.exchange_held`."""
        late = None
        if wait:
            what = f"what earlier stages hold of {request!r}"
            try:
                yield from self._until(lambda: self.core.held(request) is not None, request, what)
            except DeadlineExceeded as error:
                late = error
        mine = leaves(self.core.held(request) or {})
        yield None
        yield from self.carry_out(self.core.say_held(request, mine))
        if late is not None:
            raise late
