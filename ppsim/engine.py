"""The engine's side: which requests a forward step takes, when one ends, and collecting.

What matters of vLLM's scheduler: every rank executes the same commands in the same order; up to P
steps are in flight; a request is in at most one of them; a finished request is named in the next
step, and collected by a command of its own, before or after that step.

A request with ``n > 1`` is several *sequences*, each a request of its own to the scheduler and the
ranks; they are collected together, once the last has ended. A sequence ends by its length, by a token
that is the end (sampled, or forced because its block raised), by a stop string, or because the client
goes away. The last two are decided outside of the scheduler, which hears of it some steps later: what
is in flight then still runs on every rank, and its samples are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from ppcore.errors import PPError
from ppcore.saves import Merged, Shipment, merge

from .cases import Request
from .terms import EMBED, RECOMPUTE, term

if TYPE_CHECKING:
    from .seated import Steps
    from .world import World


@dataclass(frozen=True)
class Round:
    """One forward step: what goes in for each request, and who finished since the last one."""

    number: int
    inputs: dict[str, int]
    finished: tuple[str, ...]


@dataclass(frozen=True)
class Collect:
    """Wind up these requests, each with all its sequences.

    Attributes:
        served: whether they have an output, for blocks that wait for ``tracer.result``.
    """

    requests: tuple[str, ...]
    served: bool = True


@dataclass(frozen=True)
class Shutdown:
    """Nothing follows."""


@dataclass
class Progress:
    """One sequence's run.

    Attributes:
        tokens: what was sampled, turn by turn.
        rounds: the round of each turn.
        recomputed: the turns before which it was preempted.
        cut: it ended from outside, after the turns that it happened to have by then.
        aborted: its client went away.
    """

    index: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)
    busy: bool = False
    over: bool = False
    cut: bool = False
    aborted: bool = False

    def preempt(self) -> None:
        """See `Waiting`."""
        if self.rounds:
            self.recomputed.add(len(self.rounds))

    def sampled(self, token: int, erred: bool) -> bool:
        """Take a turn's token; whether the scheduler ends the sequence with it."""
        self.tokens.append(token)
        request = self.request
        end = erred or token % 8 < request.eos
        return (end and not request.ignore_eos) or len(self.tokens) >= request.tokens

    @property
    def kept(self) -> list[int]:
        """The tokens that the client gets: up to a stop string."""
        return self.tokens[: self.request.stop or None]

    @property
    def stopped(self) -> bool:
        """Whether the client has seen a stop string."""
        return 0 < self.request.stop <= len(self.tokens)


@dataclass(frozen=True)
class Outcome:
    """What the client gets: saves by name, or why there are none."""

    merged: Merged | None
    problem: str = ""


class Engine:
    """The scheduler and the client of one run.

    Attributes:
        progress: of each sequence.
        outcomes: request -> what its client got.
        outputs: request -> the term of its output.
    """

    def __init__(self, world: World, batching: int) -> None:
        self.world = world
        self.batching = batching
        self.commands: list[Round | Collect | Shutdown] = []
        self.progress = {
            name: Progress(index, request)
            for index, (name, request) in enumerate(world.case.sequences().items())
        }
        self.outcomes: dict[str, Outcome] = {}
        self.outputs: dict[str, int] = {}
        self.rounds = 0
        self.dead = False
        self._results: list[tuple[Round, dict[str, int], set[str]]] = []
        self._in_flight = 0
        self._finished: list[str] = []
        self._gone: list[str] = []
        # Whether ranks keep something that only the next step tells them to forget.
        self._untold = False
        # Request -> how each of its sequences goes.
        self._sequences = {
            request.name: [self.progress[name] for name in request.sequences()]
            for request in world.case.requests
        }
        # Those with a stop string.
        self._stopping = [
            self._sequences[request.name] for request in world.case.requests if request.stop
        ]
        self._shipments: dict[str, dict[int, Shipment]] = {}
        self._collected: dict[str, set[tuple[int, int]]] = {}

    def run(self) -> Steps:
        """The engine's loop."""
        world, stages = self.world, self.world.case.stages
        while not self.dead:
            yield from self._cut()
            batch = self._choose() if self._in_flight < stages else {}
            if batch:
                self._submit(batch)
                yield None
            elif self._results:
                ended = self._update(*self._results.pop(0))
                if ended:
                    if self._coin(3):  # asynchronous: the next step may come before the collect
                        batch = self._choose() if self._in_flight < stages else {}
                        if batch:
                            self._submit(batch)
                            yield None
                    yield from self._collect(self._whole(ended))
            elif not self._in_flight:
                if self._untold or (self._finished and self._coin(6)):
                    self._submit({})  # a step for nobody, which names who has finished
                    yield None
                    continue
                break
            else:
                yield lambda: bool(self._results or self._gone) or self.dead
        if self.dead:
            yield self.world.settled
            left = tuple(
                request.name
                for request in world.case.requests
                if any(not p.over and p.rounds for p in self._sequences[request.name])
            )
            if left:
                for name in left:
                    self.outputs.setdefault(name, 0)
                self.commands.append(Collect(left))
        self.commands.append(Shutdown())
        world.commanded()

    # --- ends ---------------------------------------------------------------------------------

    def abort(self, request: str) -> None:
        """The client of a request goes away."""
        self._gone.append(request)
        self.world.stir_engine()

    def _cut(self) -> Steps:
        """End what ends from outside: requests whose client is gone, sequences with a stop string."""
        gone, self._gone = self._gone, []
        for request in self.world.case.requests if gone else ():
            if request.name in gone:
                left = [p for p in self._sequences[request.name] if not p.over]
                for progress in left:
                    progress.cut = progress.aborted = True
                    self._end(progress)
                if left and request.traced:
                    # The client's stream frees what it held, after the abort.
                    yield from self._collect((request.name,), served=False)
                elif left:
                    self._untold = True
        for sequences in self._stopping:
            heard = [
                progress
                for progress in sequences
                if progress.stopped and not progress.over and not self._late(progress)
            ]
            for progress in heard:
                progress.cut = True
                self._end(progress)
            yield from self._collect(self._whole(heard))

    def _late(self, progress: Progress) -> bool:
        """Whether the scheduler has not heard yet of a stop string."""
        spare = len(progress.tokens) - progress.request.stop
        return self.batching > 0 and (self.batching >> (spare % 4)) & 1 == 1

    def _end(self, progress: Progress) -> None:
        progress.over = True
        name = list(self.progress)[progress.index]
        if progress.rounds:
            self._finished.append(name)

    def _whole(self, ended: list[Progress]) -> tuple[str, ...]:
        """The requests of which all sequences have ended, with one of these."""
        found: dict[str, None] = {}
        for progress in ended:
            request = progress.request
            sequences = self._sequences[request.name]
            if all(other.over for other in sequences):
                self.outputs[request.name] = term(*[t for p in sequences for t in p.kept])
                found[request.name] = None
        return tuple(found)

    def _collect(self, requests: tuple[str, ...], *, served: bool = True) -> Steps:
        if not requests:
            return
        self.commands.append(Collect(requests, served))
        self.world.commanded()
        if self._coin(2):
            yield None
        else:
            count, collected = len(self.world.ranks), self._collected
            yield lambda: self.dead or all(len(collected.get(n, ())) == count for n in requests)

    # --- steps --------------------------------------------------------------------------------

    def _coin(self, bit: int) -> bool:
        """A choice that the case's ``batching`` makes, the same in every run of it."""
        return coin(self.batching, self.rounds, bit)

    def _choose(self) -> dict[str, Progress]:
        left = {n: p for n, p in self.progress.items() if not p.busy and not p.over}
        free = {n: p for n, p in left.items() if p.request.after <= self.rounds}
        if not free and not self._in_flight and not self._results:
            free = left  # nobody else is there: the rest arrives now
        return choose(free, self.batching, self.rounds, idle=not self._in_flight)

    def _submit(self, batch: dict[str, Progress]) -> None:
        inputs = {name: feed(p) for name, p in batch.items()}
        for progress in batch.values():
            progress.busy = True
            progress.rounds.append(self.rounds)
        self.commands.append(Round(self.rounds, inputs, tuple(self._finished)))
        self._finished.clear()
        self._untold = False
        self.rounds += 1
        self._in_flight += 1
        self.world.commanded()

    def _update(self, command: Round, samples: dict[str, int], erred: set[str]) -> list[Progress]:
        self._in_flight -= 1
        ended: list[Progress] = []
        for name in command.inputs:
            progress = self.progress[name]
            progress.busy = False
            if not progress.over and progress.sampled(samples[name], name in erred):
                self._end(progress)
                ended.append(progress)
        return ended

    # --- what ranks report --------------------------------------------------------------------

    def sampled(self, command: Round, samples: dict[str, int], erred: set[str]) -> None:
        """The last stage finished a step."""
        self._results.append((command, samples, erred))
        self.world.stir_engine()

    def shipped(self, name: str, stage: int, shipment: Shipment) -> None:
        """A stage's share of a request's saves."""
        shipments = self._shipments.setdefault(name, {})
        shipments[stage] = shipment
        if len(shipments) == self.world.case.stages:
            self.world.properties.home(name, list(shipments.values()))
            try:
                merged = merge([shipments[s] for s in sorted(shipments)])
                self.outcomes[name] = Outcome(merged)
            except PPError as error:
                self.outcomes[name] = Outcome(None, f"{type(error).__name__}: {error}")

    def collected(self, name: str, stage: int, column: int) -> None:
        """A rank is through with a request."""
        self._collected.setdefault(name, set()).add((stage, column))
        self.world.stir_engine()


class Waiting(Protocol):
    """What may go into the next step."""

    index: int

    def preempt(self) -> None:
        """It is computed anew in its next turn, if it has had any."""


W = TypeVar("W", bound=Waiting)


def coin(batching: int, step: int, bit: int) -> bool:
    """A choice that a case's ``batching`` makes, the same in every run of it."""
    return bool(batching) and bool((hash((batching, step, bit)) >> 9) & 1)


def lingers(batching: int, step: int) -> bool:
    """Whether ranks with nothing else to do stay behind their forward in this step: not every driver's can."""
    return not coin(batching, step, 4)


def choose(free: dict[str, W], batching: int, step: int, *, idle: bool) -> dict[str, W]:
    """Who of ``free`` goes into a step: all without ``batching``, else by lot; some are preempted.

    Args:
        idle: nothing else is in flight, so that somebody has to go.
    """
    if not batching or not free:
        return free
    taken: dict[str, W] = {}
    for name, waiting in free.items():
        lot = (hash((batching, step, waiting.index)) >> 11) & 15
        if lot < 5:
            continue
        if lot == 15:
            waiting.preempt()
        taken[name] = waiting
    return free if idle and not taken else taken


def feed(progress: Progress) -> int:
    """The model's input for the sequence's next turn."""
    turn, tokens = len(progress.rounds), progress.tokens
    if turn in progress.recomputed:
        return term(RECOMPUTE, progress.index, *tokens)
    return term(EMBED, progress.index, turn, tokens[-1] if tokens else 0)
