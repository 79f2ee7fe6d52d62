"""P x T ranks in one process, under one scheduler that owns everything that could go either way.

A *task* is a thread: each rank's forward, each rank's listener to each peer, the engine, a fault
that waits to strike. Tasks are generators; one event is one task running to its next yield, which is
where a real thread lets a lock go, sends, or waits. A *strategy* chooses which runnable task moves.
Nothing else in a run is free: a message is late because its listener was not chosen.

A run ends when no task can move. If that is before every request was answered, it is a hang, and
[`World.report`][ppsim.world.World.report] prints who waits for whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ppcore.core import Core
from ppcore.messages import WORDS, Message, Never, Probe, Pull, Reply, spell
from ppcore.schedule import Schedule

from . import cases, faults
from .cases import Case
from .engine import Engine
from .failures import Crash, Failure, Liveness
from .link import Wait
from .properties import CHECKED, Properties
from .rank import Rank

_NUMBERED = (Pull, Probe, Reply, Never)
#: Of each kind of message: the length of its word, whether it has a number, and whether it is checked.
_KINDS: Final = {
    kind: (len(word), kind in _NUMBERED, kind in CHECKED) for kind, word in WORDS.items()
}

#: Events after which a run counts as one that does not end.
LIMIT = 60_000


class Task:
    """A thread.

    Attributes:
        name: ``f1.0`` the forward of stage 1, column 0; ``l1.0<0`` its listener to stage 0;
            ``engine``; ``die1.0`` a fault.
        wait: what it waits for; None while it can move.
    """

    __slots__ = ("done", "generator", "name", "number", "wait")

    def __init__(self, number: int, name: str, generator: Generator[Wait, None, None]) -> None:
        self.number = number
        self.name = name
        self.generator = generator
        self.wait: Wait = None
        self.done = False


class Strategy(Protocol):
    """Chooses which task moves; see `ppsim.strategies`."""

    def choose(self, world: World) -> int:
        """The position in ``world.runnable`` of the task that moves."""


@dataclass(frozen=True)
class Note:
    """Something to draw: an event of the protocol, where and when."""

    event: int
    kind: str
    stage: int
    column: int
    peer: int
    text: str


class World:
    """One run of a case.

    Attributes:
        runnable: the tasks that can move, in an order that depends on the run alone.
        forwards: (stage, column) -> the rank's forward.
        listeners: (peer, stage, column) -> the rank's listener to the peer.
        hash: of everything that happened so far.
        schedule: the names of the tasks that moved, where ``record`` is set.
        notes: what to draw, where ``record`` is set.
    """

    def __init__(self, case: Case, *, record: bool = False, limit: int = LIMIT) -> None:
        self.case = case
        self.requests = case.sequences()
        self._sequences = {request.name: request.sequences() for request in case.requests}
        self.visits = cases.visits(case)
        self.record = record
        self.limit = limit
        self.schedule: list[str] = []
        self.notes: list[Note] = []
        self.events = 0
        self.hash = 0
        self.failure: Failure | None = None
        self.dead: set[tuple[int, int]] = set()
        self._held: set[tuple[int, int, int]] = set()
        self._gathers: dict[tuple[int, int], dict[int, str]] = {}
        self._mark = 0
        self.properties = Properties(self)
        plan, homes = cases.schedule(case), cases.homes(case)
        self.ranks: dict[tuple[int, int], Rank] = {}
        for column in range(case.columns):
            for stage in range(case.stages):
                self.ranks[stage, column] = self._rank(stage, column, plan, homes)
        self.channels: dict[tuple[int, int, int], deque[tuple[Message | None, int | None]]] = {}
        self.engine = Engine(self, case.batching)
        self.tasks: list[Task] = []
        self.runnable: list[Task] = []
        self._engine_task = self._task("engine", self.engine.run())
        self.forwards: dict[tuple[int, int], Task] = {}
        self.listeners: dict[tuple[int, int, int], Task] = {}
        for (stage, column), rank in self.ranks.items():
            self.forwards[stage, column] = self._task(f"f{stage}.{column}", rank.forward())
        for stage, column in self.ranks:
            for peer in range(case.stages):
                if peer != stage:
                    self.channels[peer, stage, column] = deque()
                    name = f"l{stage}.{column}<{peer}"
                    listener = self._listen(stage, column, peer)
                    self.listeners[peer, stage, column] = self._task(name, listener)
        # Both, for one look-up a message.
        self._lines = {name: (self.channels[name], task) for name, task in self.listeners.items()}
        for fault in case.faults:
            if fault.kind != "raise":
                self._task(faults.task(fault), faults.strike(self, fault))

    def _rank(
        self, stage: int, column: int, plan: Schedule, homes: Mapping[str, Iterable[int]]
    ) -> Rank:
        return Rank(self, self.case, Core(stage, plan, homes), stage, column)

    def rank(self, stage: int, column: int) -> Rank:
        """The rank at (stage, column)."""
        return self.ranks[stage, column]

    def sequences(self, request: str) -> list[str]:
        """The names of what is sampled for a request."""
        return self._sequences[request]

    # --- running ------------------------------------------------------------------------------

    def _task(self, name: str, generator: Generator[Wait, None, None]) -> Task:
        task = Task(len(self.tasks), name, generator)
        self.tasks.append(task)
        self.runnable.append(task)
        return task

    def run(self, strategy: Strategy, *, events: int | None = None) -> World:
        """Run to the end, or for so many events.

        What went wrong, if anything did, is in ``failure`` afterwards.
        """
        try:
            self._move(strategy, self.limit if events is None else events)
            if events is None and self.runnable:
                raise Liveness("ends", f"still running after {self.limit} events")
            self.properties.at_rest()
        except Failure as failure:
            self.failure = self.properties.unexcused(failure)
        except Exception as error:  # the code under test failed by itself
            self.failure = Crash("crash", f"{type(error).__name__}: {error}", error)
        finally:
            for task in self.tasks:
                task.generator.close()
        return self

    def _move(self, strategy: Strategy, events: int) -> None:
        """So many events, or all that there are."""
        runnable, choose, record, digest = self.runnable, strategy.choose, self.record, self.hash
        advance = next
        try:
            for moved in range(1, events + 1):
                task = runnable[choose(self)]
                self.events, self._mark = moved, 0
                if record:
                    self.schedule.append(task.name)
                try:
                    wait = advance(task.generator)
                except StopIteration:
                    task.done = True
                    self._drop(task)
                else:
                    if wait is not None and not wait():
                        task.wait = wait
                        runnable.remove(task)
                digest = hash((digest, task.number, self._mark, len(runnable)))
                if not runnable:
                    break
        finally:
            self.hash = digest

    def _drop(self, task: Task) -> None:
        if task in self.runnable:
            self.runnable.remove(task)

    def _wake(self, task: Task) -> None:
        wait = task.wait
        if wait is not None and wait():
            task.wait = None
            self.runnable.append(task)

    # --- what tasks tell each other -----------------------------------------------------------

    def stirred(self, stage: int, column: int) -> None:
        """Something changed on a rank: its forward may have waited for that."""
        task = self.forwards[stage, column]
        if task.wait is not None:
            self._wake(task)

    def stir_engine(self) -> None:
        """Something that the engine may wait for happened."""
        self._wake(self._engine_task)

    def commanded(self) -> None:
        """There is a new command."""
        for task in self.forwards.values():
            if task.wait is not None:
                self._wake(task)

    def send(self, stage: int, column: int, peer: int, message: Message, token: int | None) -> None:
        """Put a message into the channel to ``peer``."""
        self._sent(stage, column, peer, message)
        queue, listener = self._lines[stage, peer, column]
        queue.append((message, token))
        if listener.wait is not None:
            self._wake(listener)

    def _sent(self, stage: int, column: int, peer: int, message: Message) -> None:
        """Check a message, and note it in the event's hash."""
        length, numbered, checked = _KINDS[type(message)]
        if checked:
            self.properties.sent(stage, column, peer, message)
        number = message.number if numbered else -1  # type: ignore[union-attr]
        self._mark = hash((self._mark, peer, length, number))
        if self.record:
            self.notes.append(Note(self.events, "send", stage, column, peer, spell(message)))

    def _listen(self, stage: int, column: int, peer: int) -> Generator[Wait, None, None]:
        name, held = (peer, stage, column), self._held
        channel = self.channels[name]
        link = self.ranks[stage, column].link

        def arrived() -> bool:
            return bool(channel) and not (held and name in held)

        while True:
            yield arrived
            if held and name in held:
                continue  # held since it was chosen
            message, token = channel.popleft()
            if message is None:
                yield from link.peer_died(peer, "connection lost")
                return
            if self.record:
                self.notes.append(Note(self.events, "take", stage, column, peer, spell(message)))
            yield from link.take(peer, message, token)
            del message, token  # the state of this thread does not depend on what it took before

    def hand_on(self, stage: int, column: int, states: dict[str, int]) -> None:
        """A stage's hidden states go to the next one."""
        self.ranks[stage + 1, column].inbox.append(states)
        self._wake(self.forwards[stage + 1, column])

    def gather(self, stage: int, column: int, number: int, location: str) -> None:
        """A column takes part in its stage's ``number``-th collective."""
        joined = self._gathers.setdefault((stage, number), {})
        joined[column] = location
        if len(set(joined.values())) > 1:
            raise Liveness(
                "columns-agree", f"the columns of stage {stage} gather different values: {joined}"
            )
        for other in range(self.case.columns):
            self._wake(self.forwards[stage, other])

    def gathered(self, stage: int, number: int) -> bool:
        """Whether every column of the stage has joined."""
        return len(self._gathers[stage, number]) == self.case.columns

    # --- faults -------------------------------------------------------------------------------

    def hold(self, channel: tuple[int, int, int]) -> None:
        """What is in the channel (peer, stage, column), and what is sent, is not delivered."""
        self._held.add(channel)

    def let_go(self, channel: tuple[int, int, int]) -> None:
        """The channel delivers again."""
        self._held.discard(channel)
        self._wake(self.listeners[channel])

    def kill(self, where: tuple[int, int]) -> None:
        """A rank is gone: its process, and its ends of all links."""
        stage, column = where
        if where in self.dead:
            return
        self.dead.add(where)
        forward = self.forwards[where]
        gone = [self.listeners[p, stage, column] for p in range(self.case.stages) if p != stage]
        for task in (forward, *gone):
            task.done = True
            task.wait = None
            self._drop(task)
        if self.record:
            self.notes.append(Note(self.events, "die", stage, column, stage, "dies"))
        for peer in range(self.case.stages):
            if peer != stage:
                self.channels[stage, peer, column].append((None, None))
                self._wake(self.listeners[stage, peer, column])
        self._engine_down()

    def broken(self, stage: int, column: int) -> None:
        """A rank's forward failed because of a rank that is gone: that ends its process too."""
        self.kill((stage, column))

    def _engine_down(self) -> None:
        self.engine.dead = True
        self.stir_engine()
        for task in self.forwards.values():
            self._wake(task)

    def severed(self, stage: int, column: int) -> bool:
        """Whether what this rank's forward needs of other forwards will never come."""
        gone = self.dead
        if not gone:
            return False
        if (stage - 1, column) in gone:
            return True
        return any((stage, other) in gone for other in range(self.case.columns))

    def settled(self) -> bool:
        """Whether every rank that lives has nothing left to do."""
        return all(rank.idle for where, rank in self.ranks.items() if where not in self.dead)

    # --- reports ------------------------------------------------------------------------------

    def report(self) -> str:
        """Who waits for what: the rank, its round, its place, its protocol waits."""
        lines: list[str] = []
        for (stage, column), rank in self.ranks.items():
            if (stage, column) in self.dead:
                lines.append(f"rank {(stage, column)}: dead")
                continue
            forward = self.forwards[stage, column]
            doing = "ended" if forward.done else "waits" if forward.wait else "can move"
            at = "" if forward.done else f" in {_innermost(forward.generator)}"
            lines.append(f"rank {(stage, column)}: round {rank.core.round}, forward {doing}{at}")
            lines += [f"  {line}" for line in rank.core.waits()]
            for name, workers in rank.carried.items():
                for worker in workers:
                    if worker.alive:
                        parked = worker.pending or worker.held
                        what = parked.location if parked else f"pulls {worker.seat.pulls}"
                        clock = (
                            rank.core.clock(worker.worker) if name in rank.core.requests else "-"
                        )
                        lines.append(f"  worker {worker.worker} at {clock} parked on {what}")
        for (peer, stage, column), channel in self.channels.items():
            if channel:
                lines.append(f"channel {peer}->{stage} (column {column}): {len(channel)} messages")
        return "\n".join(lines)


def run(case: Case, strategy: Strategy, *, record: bool = False, limit: int = LIMIT) -> World:
    """Run a case under a strategy."""
    return World(case, record=record, limit=limit).run(strategy)


def _innermost(generator: Any) -> str:
    """Where a suspended thread stands: the function that waits, and its line."""
    while getattr(generator, "gi_yieldfrom", None) is not None:
        inner = generator.gi_yieldfrom
        if not hasattr(inner, "gi_frame"):
            break
        generator = inner
    frame = getattr(generator, "gi_frame", None)  # compiled ones have none
    return f"{generator.__name__}:{frame.f_lineno}" if frame is not None else "?"
