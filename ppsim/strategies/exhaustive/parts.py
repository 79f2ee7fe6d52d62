"""A rank, or the engine, alone: what it does with each input, remembered.

Ranks and engine share nothing but queues: messages, hidden states, commands, results. So what a rank
does next follows from its own state and what it takes in, and need be found out once for each pair
of the two, however many states of the whole it occurs in. A `Space` numbers the states of one part by
their canonical digest and remembers every move between them. A move that is not known yet is made by
the real rank: a live one that is in that state, or one that is brought there by making the moves that
lead to it again.

A part is a `World` of which only one rank, or the engine, ever moves; what it tells the others is
caught on the way out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ppcore.messages import Done, Held, Message, Never, Pull, Pulls, Release, Reply, pulls_of

from ...cases import Case
from ...engine import Collect, Round
from ...failures import Crash, Failure
from ...link import Link
from ...properties import Properties
from ...rank import Rank
from ...world import Task, World
from .canonical import Canonical
from .footprint import Grants, Notes

#: An input to a part, or a step of one of its threads: ("step", task), ("take", peer, message), ...
Event = tuple[Any, ...]

#: Live parts that are kept to be moved on.
POOL = 256

#: What code under test that is wrong may raise.
CRASHES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip

IDLE, BUSY, ENDED, BLOCKED = range(4)


@dataclass(frozen=True, slots=True)
class Asker:
    """What of a rank says whether it may still ask a peer for a value (see `Properties`)."""

    known: frozenset[str]
    # Request -> block -> its next access; a request that has said done is absent.
    accesses: dict[str, dict[str, int]]
    keys: frozenset[Any]

    def may_ask(self, key: Any) -> bool:
        """Whether this rank may still ask for ``key``, by its own state alone."""
        request, block = key.worker
        if request not in self.known or key in self.keys:
            return True
        blocks = self.accesses.get(request)
        if blocks is None:
            return False
        reached = blocks.get(block)
        return reached is None or reached <= key.access


@dataclass(frozen=True, slots=True)
class Info:
    """What the whole needs to know of a part's state.

    Attributes:
        forward: IDLE never; BUSY can move, BLOCKED, ENDED.
        listeners: peer -> IDLE (takes a message), BUSY (in the middle of one), ENDED.
        settling: for the engine, whether it waits for all ranks to be idle.
        idle: for a rank, whether it waits for a command.
    """

    forward: int
    listeners: dict[int, int] = field(default_factory=dict)
    settling: bool = False
    idle: bool = False
    asker: Asker | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """What an event does to a part.

    Attributes:
        to: the number of the state that it leads to.
        outputs: what the others get to know, in order.
        alone: whether it commutes with all that anyone else can do before it.
        failure: what it shows to be wrong.
    """

    to: int
    outputs: tuple[Event, ...]
    alone: bool
    failure: Failure | None = None


class _Deferred(Properties):
    """Checks that do not look at other ranks; what they would look for there is put on record."""

    def __init__(self, world: Part) -> None:
        super().__init__(world)
        self._part = world
        self._left = 0

    def _may_ask(self, rank: Rank, peer: int, name: str, key: Any) -> bool:
        # The caller stops at the first peer that may ask: no to all but the last.
        peers = rank.core._requests[name].buffer[key].peers
        if not self._left:
            self._left = len(peers)
            self._part.outputs.append(("kept", key, tuple(sorted(peers))))
        self._left -= 1
        return self._left == 0


class Part(World):
    """A world of which one part moves."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.outputs: list[Event] = []

    def run_on(self, task: Task) -> None:
        """The task runs to its next yield."""
        try:
            task.wait = task.generator.send(None)
        except StopIteration:
            task.wait = None
            task.done = True

    def _wake(self, task: Task) -> None:
        """Whether a task can move is asked each time."""

    def commanded(self) -> None:
        """The engine's commands are picked up after its step."""

    def stirred(self, stage: int, column: int) -> None:
        """See `_wake`."""

    def stir_engine(self) -> None:
        """See `_wake`."""

    # --- for the space ------------------------------------------------------------------------

    def apply(self, event: Event) -> bool:
        """Take in an event; whether the move is one that commutes with all before it."""
        raise NotImplementedError

    def info(self) -> Info:
        """See `Info`."""
        raise NotImplementedError

    def roots(self) -> list[Any]:
        """Where what this part can reach begins."""
        raise NotImplementedError


class RankPart(Part):
    """One rank, with its forward and its listeners."""

    def __init__(self, case: Case, stage: int, mortal: bool, grants: Grants) -> None:
        super().__init__(case)
        self.stage = stage
        self.mortal = mortal
        self.grants = grants
        self.me = self.ranks[stage, 0]
        self.front = self.forwards[stage, 0]
        self.ears = {p: t for (p, s, _), t in self.listeners.items() if s == stage}
        self.properties = _Deferred(self)
        engine: Any = self.engine
        for name in ("sampled", "shipped", "collected"):
            setattr(engine, name, self._told(name))
        self.notes_of = Notes(self.me.core, self.me.link)
        # A thread that starts and finds nothing to do commutes with everything.
        self.run_on(self.front)
        for ear in self.ears.values():
            self.run_on(ear)

    def _told(self, name: str) -> Callable[..., None]:
        return lambda *given: self.outputs.append(("engine", name, given))

    def send(self, stage: int, column: int, peer: int, message: Message, token: int | None) -> None:
        self.properties.sent(stage, column, peer, message)
        self.outputs.append(("send", peer, (message, token)))

    def hand_on(self, stage: int, column: int, states: dict[str, int]) -> None:
        self.outputs.append(("hand", states))

    def broken(self, stage: int, column: int) -> None:
        self.outputs.append(("kill", None))

    def apply(self, event: Event) -> bool:
        match event:
            case ("step", -1):
                with self.notes_of:
                    self.run_on(self.front)
                return self._forward_alone()
            case ("step", peer):
                with self.notes_of:
                    self.run_on(self.ears[peer])
                return False
            case ("take", peer, (message, token)):
                alone = self._eager(peer, message)
                self.channels[peer, self.stage, 0].append((message, token))
                with self.notes_of:
                    self.run_on(self.ears[peer])
                self.notes_of.check(self.grants, message)
                return alone and not self.outputs
            case ("command", (command, outputs)):
                self.engine.commands.append(command)
                self.engine.outputs.update(outputs)
                if isinstance(command, Round):
                    for name in command.inputs:
                        self.engine.progress[name].rounds.append(command.number)
            case ("hand", states):
                self.me.inbox.append(states)
            case ("dead", stage):
                self.dead.add((stage, 0))
        return False

    def _forward_alone(self) -> bool:
        private = self.notes_of.private(self.grants)
        if any(output[0] in ("send", "kill") for output in self.outputs):
            return False
        return private and not (self.outputs and self.mortal)

    def _eager(self, peer: int, message: Message | None) -> bool:
        """Whether taking ``message`` now commutes with all that the others can do before it.

        A release or a pull of a value that is published: the only other ones that touch it are
        other peers' releases, and pulls of peers that have not released it. An answer for which the
        forward is blocked, or which nobody needs any more. A peer's last word of a request of which
        this rank has said its own.
        """
        core, link = self.me.core, self.me.link
        match message:
            case Pull() | Pulls():
                return all(self._published(peer, pull.key) for pull in pulls_of(message))
            case Release(keys=keys):
                return all(self._published(peer, key) for key in keys)
            case Reply(number=number) | Never(number=number):
                if self.grants.answers:
                    return False
                blocked = self._blocked(Link.wait)
                awaited = blocked is not None and number in blocked["numbers"]
                return awaited or not (number in link.origins or number in core._ahead)
            case Done(request=request):
                state = core._requests.get(request)
                return state is not None and state.said_done and not self.grants.afterlife
            case Held():
                return self._blocked(Link.exchange_held) is not None
        return False

    def _blocked(self, where: Callable[..., Any]) -> dict[str, Any] | None:
        """What the condition refers to for which the forward is blocked in ``where``, if it is."""
        wait: Any = self.front.wait
        if wait is None or wait():
            return None
        for _ in range(2):  # the link's own condition is inside of the one that it yields
            if wait.__qualname__.startswith(f"{where.__qualname__}."):
                return _cells(wait)
            wait = _cells(wait).get("condition")
            if wait is None:
                return None
        return None

    def _published(self, peer: int, key: Any) -> bool:
        state = self.me.core._requests.get(key.worker.request)
        entry = state.buffer.get(key) if state is not None else None
        return entry is not None and peer in entry.peers and not self.grants.clears

    def info(self) -> Info:
        listeners = {
            peer: ENDED if ear.done else BUSY if ear.wait is None else IDLE
            for peer, ear in self.ears.items()
        }
        wait = self.front.wait
        forward = ENDED if self.front.done else BUSY if wait is None or wait() else BLOCKED
        return Info(forward, listeners, idle=self.me.idle, asker=self._asker())

    def _asker(self) -> Asker:
        me = self.me
        accesses = {
            name: {block: worker.next_access for block, worker in state.workers.items()}
            for name, state in me.core._requests.items()
            if not state.said_done
        }
        keys = set(me.link.live)
        keys.update(key for _, key, _ in me.link.lost)
        for workers in me.carried.values():
            for seated in workers:
                if seated.held is not None and seated.seat.decision is not None:
                    keys.add(seated.seat.decision.key)
        return Asker(frozenset(me.known), accesses, frozenset(keys))

    def roots(self) -> list[Any]:
        return [
            self.me, self.front.generator, self.front.wait, self.front.done,
            [(ear.generator, ear.wait is None, ear.done) for ear in self.ears.values()],
            self.engine.commands, self.engine.outputs, self.dead, self.properties._pulled,
        ]  # fmt: skip


def _cells(function: Any) -> dict[str, Any]:
    """The variables that a nested function refers to."""
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


class EnginePart(Part):
    """The engine."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._said = 0

    def settled(self) -> bool:
        """The whole says when this holds."""
        return True

    def apply(self, event: Event) -> bool:
        engine = self.engine
        match event:
            case ("step", _):
                self.run_on(self._engine_task)
                for command in engine.commands[self._said :]:
                    outputs: dict[str, int] = {}
                    if isinstance(command, Collect):
                        outputs = {
                            n: engine.outputs[n] for n in command.requests if n in engine.outputs
                        }
                    self.outputs.append(("command", (command, outputs)))
                self._said = len(engine.commands)
                return True
            case ("engine", name, given):
                getattr(engine, name)(*given)
            case ("dead", _):
                engine.dead = True
        return False

    def info(self) -> Info:
        task = self._engine_task
        settling = getattr(task.wait, "__name__", "") == "settled"
        forward = ENDED if task.done else BUSY if task.wait is None or task.wait() else BLOCKED
        return Info(forward, settling=settling)

    def roots(self) -> list[Any]:
        task, engine = self._engine_task, self.engine
        return [task.generator, task.wait, task.done, *(
            value for name, value in sorted(vars(engine).items()) if name != "world"
        )]  # fmt: skip


class Payloads:
    """Numbers for what travels between parts; things that spell alike have one number."""

    def __init__(self, canonical: Canonical) -> None:
        self._canonical = canonical
        self._numbers: dict[bytes, int] = {}
        self.things: list[Any] = []

    def number(self, thing: Any) -> int:
        """The number of a payload."""
        digest = self._canonical.digest([thing])
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self.things)
            self.things.append(thing)
        return number


class Space:
    """The states of one part that were met, and the moves between them.

    Args:
        make: a new part in its first state.
    """

    def __init__(self, make: Callable[[], Part], canonical: Canonical, payloads: Payloads) -> None:
        self._make = make
        self._canonical = canonical
        self._payloads = payloads
        self._numbers: dict[bytes, int] = {}
        # State -> the state and the event from which it was met.
        self._from: list[tuple[int, Event]] = []
        self.digests: list[bytes] = []
        self.infos: list[Info] = []
        self.moves: list[dict[Event, Move]] = []
        self._pool: OrderedDict[int, Part] = OrderedDict()
        self.remade = 0
        self._settle(make(), (-1, ()))

    def move(self, state: int, event: Event) -> Move:
        """What ``event`` does in ``state``."""
        found = self.moves[state].get(event)
        if found is None:
            found = self.moves[state][event] = self._make_move(state, event)
        return found

    def _make_move(self, state: int, event: Event) -> Move:
        part = self._live(state)
        try:
            alone = self._apply(part, event)
        except Failure as failure:
            return Move(-1, (), False, failure)
        except CRASHES as error:
            return Move(-1, (), False, Crash("crash", f"{type(error).__name__}: {error}", error))
        number = self._payloads.number
        outputs = tuple(
            output if output[0] == "kept" else (*output[:-1], number(output[-1]))
            for output in part.outputs
        )
        return Move(self._settle(part, (state, event)), outputs, alone)

    def _apply(self, part: Part, event: Event) -> bool:
        part.outputs = []
        if event[0] != "step":
            event = (*event[:-1], self._payloads.things[event[-1]])
        return part.apply(event)

    def _settle(self, part: Part, came: tuple[int, Event]) -> int:
        """The number of the state that a part is in."""
        digest = self._canonical.digest(part.roots())
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self.infos)
            self._from.append(came)
            self.digests.append(digest)
            self.infos.append(part.info())
            self.moves.append({})
        self._pool[number] = part
        self._pool.move_to_end(number)
        if len(self._pool) > POOL:
            self._pool.popitem(last=False)
        return number

    def _live(self, state: int) -> Part:
        """A part in ``state``, which is the caller's to move."""
        events: list[Event] = []
        part = self._pool.pop(state, None)
        while part is None and state >= 0:
            state, event = self._from[state]
            events.append(event)
            part = self._pool.pop(state, None) if state >= 0 else None
        if part is None:
            part = self._make()
            events.pop()
            self.remade += 1
        for event in reversed(events):
            self._apply(part, event)
        return part
