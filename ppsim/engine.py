"""The engine's side: which requests a forward step takes, when one ends, and collecting.

What matters of vLLM's scheduler: every rank executes the same commands in the same order; up to P
steps are in flight; a request is in at most one of them; a finished request is named in the next
step, and collected by a command of its own, before or after that step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppcore.errors import PPError
from ppcore.saves import Merged, Shipment, merge

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
    """Wind up these requests."""

    requests: tuple[str, ...]


@dataclass(frozen=True)
class Shutdown:
    """Nothing follows."""


@dataclass
class Progress:
    """One request's run.

    Attributes:
        tokens: what was sampled, turn by turn.
        rounds: the round of each turn.
        recomputed: the turns before which it was preempted.
    """

    index: int
    limit: int
    ignore_eos: bool
    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)
    busy: bool = False
    over: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the client gets: saves by name, or why there are none."""

    merged: Merged | None
    problem: str = ""


class Engine:
    """The scheduler and the client of one run."""

    def __init__(self, world: World, batching: int) -> None:
        self.world = world
        self.batching = batching
        self.commands: list[Round | Collect | Shutdown] = []
        self.progress = {
            request.name: Progress(index, request.tokens, request.ignore_eos)
            for index, request in enumerate(world.case.requests)
        }
        self.outcomes: dict[str, Outcome] = {}
        self.outputs: dict[str, int] = {}
        self.rounds = 0
        self.dead = False
        self._results: list[tuple[Round, dict[str, int], set[str]]] = []
        self._in_flight = 0
        self._finished: list[str] = []
        self._shipments: dict[str, dict[int, Shipment]] = {}
        self._collected: dict[str, set[tuple[int, int]]] = {}

    def run(self) -> Steps:
        """The engine's loop."""
        world, stages = self.world, self.world.case.stages
        while not self.dead:
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
                    yield from self._collect(ended)
            elif all(p.over for p in self.progress.values()) and not self._in_flight:
                break
            else:
                yield lambda: bool(self._results) or self.dead
        if self.dead:
            yield self.world.settled
            left = tuple(name for name, p in self.progress.items() if not p.over and p.rounds)
            if left:
                for name in left:
                    self.outputs.setdefault(name, 0)
                self.commands.append(Collect(left))
        self.commands.append(Shutdown())
        world.commanded()

    def _collect(self, ended: tuple[str, ...]) -> Steps:
        self.commands.append(Collect(ended))
        self.world.commanded()
        if self._coin(2):
            yield None
        else:
            ranks = {(rank.stage, rank.column) for rank in self.world.ranks.values()}
            yield lambda: self.dead or all(self._collected.get(n) == ranks for n in ended)

    def _coin(self, bit: int) -> bool:
        """A choice that the case's ``batching`` makes, the same in every run of it."""
        if not self.batching:
            return False
        return bool((hash((self.batching, self.rounds, bit)) >> 9) & 1)

    def _choose(self) -> dict[str, Progress]:
        free = {n: p for n, p in self.progress.items() if not p.busy and not p.over}
        if not self.batching or not free:
            return free
        taken: dict[str, Progress] = {}
        for name, progress in free.items():
            lot = (hash((self.batching, self.rounds, progress.index)) >> 11) & 15
            if lot < 5:
                continue
            if lot == 15 and progress.rounds:
                progress.recomputed.add(len(progress.rounds))
            taken[name] = progress
        if not taken and not self._in_flight:
            return free
        return taken

    def _submit(self, batch: dict[str, Progress]) -> None:
        inputs = {name: feed(p) for name, p in batch.items()}
        for progress in batch.values():
            progress.busy = True
            progress.rounds.append(self.rounds)
        self.commands.append(Round(self.rounds, inputs, tuple(self._finished)))
        self._finished.clear()
        self.rounds += 1
        self._in_flight += 1
        self.world.commanded()

    def _update(self, command: Round, samples: dict[str, int], erred: set[str]) -> tuple[str, ...]:
        self._in_flight -= 1
        ended: list[str] = []
        for name in command.inputs:
            progress = self.progress[name]
            progress.busy = False
            progress.tokens.append(samples[name])
            stopped = name in erred and not progress.ignore_eos
            if stopped or len(progress.tokens) >= progress.limit:
                progress.over = True
                self.outputs[name] = term(*progress.tokens)
                ended.append(name)
        self._finished += ended
        return tuple(ended)

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
            try:
                merged = merge([shipments[s] for s in sorted(shipments)])
                self.outcomes[name] = Outcome(merged)
            except PPError as error:
                self.outcomes[name] = Outcome(None, f"{type(error).__name__}: {error}")

    def collected(self, name: str, stage: int, column: int) -> None:
        """A rank is through with a request."""
        self._collected.setdefault(name, set()).add((stage, column))
        self.world.stir_engine()


def feed(progress: Progress) -> int:
    """The model's input for the request's next turn."""
    turn, tokens = len(progress.rounds), progress.tokens
    if turn in progress.recomputed:
        return term(RECOMPUTE, progress.index, *tokens)
    return term(EMBED, progress.index, turn, tokens[-1] if tokens else 0)
