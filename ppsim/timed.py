"""A world with a clock: how long a run takes on a given machine and network.

A discrete-event simulation around the same core as every world. Each thread has a time of its own, and
the earliest moves; what it does takes the time that [`Costs`][ppsim.costs.Costs] says, and what it sends
is there a latency, and the payload's time on the wire, later. So a wait lasts as long as what is waited
for takes, and what goes on meanwhile costs nothing.

A rank has one processor: what its listeners do while its forward computes, the forward loses.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from ppcore.core import Core, Decision, Verdict
from ppcore.effects import Effect
from ppcore.messages import Key, Message, Reply, Worker, pulls_of
from ppcore.saves import Shipment
from ppcore.schedule import Schedule

from .cases import Case
from .costs import Costs, Model
from .engine import Round
from .link import Wait
from .rank import Rank
from .seated import Seated, Steps
from .terms import DERIVE
from .world import Task, World

#: Events after which a run counts as one that does not end: a prediction is of whole benchmarks.
LIMIT = 100_000_000

#: What a block derives of a value: a copy of a layer's hidden states, or one number.
COPY, NUMBER = 1, 2

#: Bytes of a payload beside its numbers, as the runtime's codec spells a tensor.
_DESCRIBED = 18


class TimedCore(Core):
    """The core, and what the runtime does around each of its answers."""

    world: TimedWorld

    def start(self, worker: Worker) -> None:
        self.world.spend(self.world.costs.request_s)
        super().start(worker)

    def access(self, worker: Worker, location: str, occurrence: int) -> Decision:
        decision = super().access(worker, location, occurrence)
        costs = self.world.costs
        local = decision.verdict is Verdict.LOCAL
        self.world.spend(costs.visit_s if local else costs.lazy_s)
        return decision

    def publish(self, key: Key, location: str, token: Any, size_bytes: int) -> list[Effect]:
        if token is not None:
            size = self.world.model.size(location, self.turn(key.worker.request))
            self.world.spend(self.world.costs.keep(size))
        return super().publish(key, location, token, size_bytes)

    def take(self, peer: int, message: Message, token: Any = None) -> list[Effect]:
        self.world.spend(self.world.costs.message_s)
        return super().take(peer, message, token)


class TimedRank(Rank):
    """A rank whose forward takes time."""

    world: TimedWorld

    def __init__(self, world: TimedWorld, case: Case, core: Core, stage: int, column: int) -> None:
        super().__init__(world, case, core, stage, column)
        # When what is in the inbox is there.
        self.arrivals: deque[float] = deque()
        #: Of the step that is computed.
        self.tokens = 0
        self._turns: Counter[str] = Counter()

    def round(self, command: Round) -> Steps:
        yield from self._told()
        self.tokens = sum(self.world.model.tokens(self._turns[name]) for name in command.inputs)
        self._turns.update(command.inputs)
        yield from super().round(command)

    def collect(self, request: str, *, served: bool) -> Steps:
        yield from self._told()
        yield from super().collect(request, served=served)

    def _ship(self, *args: Any) -> Generator[Wait, None, Shipment]:
        shipment = yield from super()._ship(*args)
        self.world.spend(self.world.costs.leaf_s * len(shipment.leaves))
        return shipment

    def _told(self) -> Steps:
        self.world.not_before(self.world.issued[self.commands - 1])
        yield None

    def _receive(self) -> Generator[Wait, None, dict[str, int]]:
        states = yield from super()._receive()
        self.world.not_before(self.arrivals.popleft())
        yield None
        return states

    def _awaited(self, location: str, batch: list[tuple[str, list[Seated]]]) -> bool:
        return True

    def _visit(
        self, location: str, states: dict[str, int], batch: list[tuple[str, list[Seated]]]
    ) -> Steps:
        self.world.spend(self.world.model.visit_s(location, self.tokens))
        yield None
        yield from super()._visit(location, states, batch)


class TimedWorld(World):
    """One run of a case, timed; it chooses itself who moves.

    Args:
        case: what runs.
        model: what the case's values and steps are.
        costs: the machine and the network.

    Attributes:
        now: the time at which the thread that moves has got, in seconds.
        bytes: that crossed as payloads of replies.
        waited_s: how long forwards were blocked for pulls, all of them together.
    """

    def __init__(self, case: Case, model: Model, costs: Costs) -> None:
        self.model = model
        self.costs = costs
        self.now = 0.0
        self.bytes = 0
        self.waited_s = 0.0
        # When each of the engine's commands is there.
        self.issued: list[float] = []
        self.timed: dict[tuple[int, int], TimedRank] = {}
        self._times: list[float] = []
        self._moved: Task | None = None
        # The forward that computes while its rank's listener moves.
        self._beside: Task | None = None
        self._spent = 0.0
        self._arrivals: dict[tuple[int, int, int], deque[float]] = defaultdict(deque)
        self._asked: dict[tuple[int, int, int], tuple[str, str, int]] = {}
        super().__init__(case, limit=LIMIT)
        self._computes = {
            task: self.forwards[stage, column]
            for (_, stage, column), task in self.listeners.items()
        }

    def _rank(
        self, stage: int, column: int, plan: Schedule, homes: Mapping[str, Iterable[int]]
    ) -> Rank:
        core = TimedCore(stage, plan, homes)
        core.world = self
        rank = self.timed[stage, column] = TimedRank(self, self.case, core, stage, column)
        return rank

    def seconds(self) -> float:
        """Run; how long it took until the client had everything.

        Raises:
            Failure: the run is not what one rank gives.
        """
        self.run(self)
        if self.failure is not None:
            raise self.failure
        traced = any(request.blocks for request in self.case.requests)
        return self.issued[-1] - self._command_s() + (self.costs.trace_s if traced else 0.0)

    # --- time ---------------------------------------------------------------------------------

    def spend(self, seconds: float) -> None:
        """The thread that moves is busy for so long."""
        self.now += seconds
        self._spent += seconds

    def not_before(self, when: float) -> None:
        """The thread that moves goes on at ``when`` at the earliest."""
        self.now = max(self.now, when)

    def choose(self, world: World) -> int:
        """The earliest thread."""
        times = self._times
        if self._moved is not None:
            times[self._moved.number] = self.now
        if self._beside is not None:
            times[self._beside.number] += self._spent
        position, task = min(
            enumerate(self.runnable), key=lambda found: (times[found[1].number], found[1].number)
        )
        self._moved, self._spent, self.now = task, 0.0, times[task.number]
        forward = self._computes.get(task)
        self._beside = forward if forward is not None and forward.wait is None else None
        return position

    def _command_s(self) -> float:
        """What the engine says reaches a rank so much later, and the other way round."""
        return self.costs.command_s if self.case.stages > 1 else 0.0

    # --- threads ------------------------------------------------------------------------------

    def _task(self, name: str, generator: Generator[Wait, None, None]) -> Task:
        self._times.append(0.0)
        return super()._task(name, generator)

    def _wake(self, task: Task) -> None:
        waited = task.wait is not None
        super()._wake(task)
        if waited and task.wait is None:
            begun, late = self._times[task.number], self._late(task)
            self._times[task.number] = max(begun, self.now + late)

    def _late(self, task: Task) -> float:
        return self._command_s() if task is self._engine_task else 0.0

    def _listen(self, stage: int, column: int, peer: int) -> Generator[Wait, None, None]:
        arrivals = self._arrivals[peer, stage, column]
        for wait in super()._listen(stage, column, peer):
            if wait is None:
                yield None
                continue
            if arrivals:
                self.not_before(arrivals[0])
            yield wait
            self.not_before(arrivals.popleft())

    def stirred(self, stage: int, column: int) -> None:
        task = self.forwards[stage, column]
        begun, pulling = self._times[task.number], self.ranks[stage, column].link.waiting
        super().stirred(stage, column)
        if pulling:
            self.waited_s += max(0.0, self._times[task.number] - begun)

    # --- what crosses -------------------------------------------------------------------------

    def commanded(self) -> None:
        while len(self.issued) < len(self.engine.commands):
            self.issued.append(self.now + self._command_s())
        super().commanded()

    def send(self, stage: int, column: int, peer: int, message: Message, token: int | None) -> None:
        self.spend(self.costs.message_s)
        size = 0
        for pull in pulls_of(message):
            turn = self.ranks[stage, column].core._pulled[pull.number].available.turn
            self._asked[stage, column, pull.number] = pull.location, pull.expression, turn
        if isinstance(message, Reply):
            location, expression, turn = self._asked[peer, column, message.number]
            size = self._payload(location, expression, turn)
            self.bytes += size
        arrivals, listener = (
            self._arrivals[stage, peer, column],
            self.listeners[stage, peer, column],
        )
        arrivals.append(self.now + self.costs.wire(size))
        waited = listener.wait is not None
        super().send(stage, column, peer, message, token)
        if waited:
            self._times[listener.number] = max(self._times[listener.number], arrivals[0])

    def _payload(self, location: str, expression: str, turn: int) -> int:
        if f"{DERIVE}.{NUMBER}" in expression.split(","):
            return self.model.number_bytes + _DESCRIBED
        return self.model.size(location, turn) + _DESCRIBED

    def hand_on(self, stage: int, column: int, states: dict[str, int]) -> None:
        rank = self.timed[stage + 1, column]
        size = self.model.hidden_bytes(self.timed[stage, column].tokens)
        rank.arrivals.append(self.now + self.costs.wire(size))
        super().hand_on(stage, column, states)
