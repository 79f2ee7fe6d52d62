"""The graph of the states of a whole case, depth first.

A state is a tuple of numbers: of each rank's state, of the engine's, of what is in each channel. Its
successors are looked up in the parts' spaces, so most of them cost a few dictionary look-ups.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ppcore.messages import Failed

from ...cases import Case
from ...engine import Engine
from ...failures import Failure, Leak
from ...properties import Properties
from ...strategies.replay import Replay
from ...world import World
from .canonical import Canonical
from .footprint import Granted, Grants
from .parts import BUSY, IDLE, EnginePart, Event, Move, Payloads, RankPart, Space

#: The number of a rank that is dead: nothing of its state can matter any more.
DEAD = -1

State = tuple[int, ...]
#: (part, event, name of the task)
Step = tuple[int, Event, str]


class Cut(Exception):
    """The search ran out of time or space."""


@dataclass
class Graph:
    """What a search found.

    Attributes:
        edges: for each state, those that can follow it.
        ends: the states in which nothing can move, as digests.
    """

    edges: list[list[int]] = field(default_factory=list)
    failure: Failure | None = None
    schedule: list[str] = field(default_factory=list)
    ends: set[bytes] = field(default_factory=set)


class Search:
    """A search through all states of one case.

    Args:
        reduce: follow only one of several steps that commute.
        grants: what may happen.
    """

    def __init__(
        self,
        case: Case,
        *,
        reduce: bool,
        grants: Grants,
        end: float,
        limit: int,
    ) -> None:
        if case.columns != 1:
            raise ValueError("columns differ in nothing but their gathers: explore one")
        if any(
            fault.kind != "raise" and (fault.kind, fault.at) != ("die", 0) for fault in case.faults
        ):
            raise ValueError("the only fault that can be explored is a death at any time")
        self.case = case
        self.reduce = reduce
        self.grants = grants
        self.end = end
        self.limit = limit
        self.graph = Graph()
        self.stages = stages = case.stages
        self.mortal = {fault.stage for fault in case.faults if fault.kind == "die"}
        self.canonical = canonical = Canonical(
            [*case.requests, *case.faults], (World, Engine, Properties, Case)
        )
        self.payloads = Payloads(canonical)
        self.spaces = [
            Space(self._rank(stage), canonical, self.payloads) for stage in range(stages)
        ]
        self.spaces.append(Space(lambda: EnginePart(case), canonical, self.payloads))
        # Channel (from, to) -> its place in a state.
        self.channels = {
            pair: stages + 1 + index
            for index, pair in enumerate(
                (a, b) for a in range(stages) for b in range(stages) if a != b
            )
        }
        self.into = [
            [place for (_, b), place in self.channels.items() if b == stage]
            for stage in range(stages)
        ]
        self.queues: list[tuple[int, ...]] = [()]
        self._queue_numbers: dict[tuple[int, ...], int] = {(): 0}
        self.marker = self.payloads.number((None, None))
        self.first: State = (0,) * (stages + 1 + len(self.channels))
        self.numbers: dict[State, int] = {self.first: 0}
        # State -> the state and the task from which it was met.
        self.came: list[tuple[int, str]] = [(-1, "")]
        self.graph.edges.append([])

    def _rank(self, stage: int) -> Any:
        mortal = stage in self.mortal
        return lambda: RankPart(self.case, stage, mortal, self.grants)

    # --- one state ----------------------------------------------------------------------------

    def _steps(self, state: State) -> list[Step]:
        """What can happen next."""
        found: list[Step] = []
        stages = self.stages
        engine = state[stages]
        info = self.spaces[stages].infos[engine]
        if info.forward == BUSY and (not info.settling or self._settled(state)):
            found.append((stages, ("step", -1), "engine"))
        for stage in range(stages):
            if state[stage] == DEAD:
                continue
            info = self.spaces[stage].infos[state[stage]]
            if info.forward == BUSY:
                found.append((stage, ("step", -1), f"f{stage}.0"))
            for peer, ear in info.listeners.items():
                if ear == BUSY:
                    found.append((stage, ("step", peer), f"l{stage}.0<{peer}"))
                elif ear == IDLE:
                    queue = self.queues[state[self.channels[peer, stage]]]
                    if queue:
                        found.append((stage, ("take", peer, queue[0]), f"l{stage}.0<{peer}"))
        return found

    def _settled(self, state: State) -> bool:
        return all(
            state[stage] == DEAD or self.spaces[stage].infos[state[stage]].idle
            for stage in range(self.stages)
        )

    def _deaths(self, state: State) -> list[int]:
        return [stage for stage in self.mortal if state[stage] != DEAD] if self.mortal else []

    def _queue(self, queue: tuple[int, ...]) -> int:
        number = self._queue_numbers.get(queue)
        if number is None:
            number = self._queue_numbers[queue] = len(self.queues)
            self.queues.append(queue)
        return number

    def _after(self, state: State, step: Step, move: Move) -> State:
        """The state that a move leads to.

        Raises:
            Failure: it shows something to be wrong.
        """
        part, event, _ = step
        now = list(state)
        now[part] = move.to
        if event[0] == "take":
            place = self.channels[event[1], part]
            now[place] = self._queue(self.queues[now[place]][1:])
        for output in move.outputs:
            self._deliver(now, part, output)
        return tuple(now)

    def _deliver(self, now: list[int], part: int, output: Event) -> None:
        engine = self.stages
        match output:
            case ("send", peer, payload):
                if now[peer] != DEAD:
                    place = self.channels[part, peer]
                    now[place] = self._queue((*self.queues[now[place]], payload))
                    message = self.payloads.things[payload][0]
                    if not self.grants.raises and type(message) is Failed:
                        raise Granted("raises")
            case ("hand", _):
                self._input(now, part + 1, output)
            case ("command", _):
                for stage in range(engine):
                    self._input(now, stage, output)
            case ("engine", _, _):
                self._input(now, engine, output)
            case ("kept", key, peers):
                self._kept(now, part, key, peers)
            case ("kill", _):
                self._kill(now, part)

    def _input(self, now: list[int], part: int, event: Event) -> None:
        if now[part] != DEAD:
            move = self.spaces[part].move(now[part], event)
            if move.failure is not None:
                raise move.failure
            now[part] = move.to

    def _kill(self, now: list[int], dead: int) -> None:
        now[dead] = DEAD
        for place in self.into[dead]:
            now[place] = 0
        told = ("dead", self.payloads.number(dead))
        for part in range(self.stages + 1):
            self._input(now, part, told)
        for peer in range(self.stages):
            if peer != dead and now[peer] != DEAD:
                place = self.channels[dead, peer]
                now[place] = self._queue((*self.queues[now[place]], self.marker))

    def _kept(self, now: list[int], stage: int, key: Any, peers: tuple[int, ...]) -> None:
        """``bounded``: somebody may still ask for what is published, or is about to say no more."""
        for peer in peers:
            if now[peer] == DEAD or now[self.channels[peer, stage]]:
                return
            info = self.spaces[peer].infos[now[peer]]
            ear = self.spaces[stage].infos[now[stage]].listeners[peer]
            if info.forward == BUSY or ear == BUSY:
                return
            if info.asker is None or info.asker.may_ask(key):
                return
        raise Leak("bounded", f"stage {stage} keeps {key} for nobody")

    # --- all of them --------------------------------------------------------------------------

    def run(self) -> Graph:
        """Visit every state.

        Raises:
            Cut: there is no time left.
            Unsound, Granted: the reduction does not hold for this case.
        """
        graph, numbers = self.graph, self.numbers
        stack: list[State] = [self.first]
        steps = 0
        while stack:
            state = stack.pop()
            here = numbers[state]
            steps += 1
            if not steps & 255 and time.process_time() > self.end:
                raise Cut("out of time")
            if len(numbers) > self.limit:
                raise Cut("out of space")
            following = self._follow(state, here)
            if following is None:
                return graph
            edges = graph.edges[here]
            for after, name in following:
                number = numbers.get(after)
                if number is None:
                    number = numbers[after] = len(graph.edges)
                    self.came.append((here, name))
                    graph.edges.append([])
                    stack.append(after)
                edges.append(number)
        return graph

    def _follow(self, state: State, here: int) -> list[tuple[State, str]] | None:
        """The states that are to follow this one; None when something is wrong."""
        steps = self._steps(state)
        deaths = self._deaths(state)
        found: list[tuple[State, str]] = []
        spaces = self.spaces
        if self.reduce:
            for step in steps:
                if step[0] == self.stages and deaths:
                    continue  # the engine's step and a death in the other order: another run
                move = spaces[step[0]].move(state[step[0]], step[1])
                if move.alone and move.failure is None:
                    steps, deaths = [step], []
                    break
        for step in steps:
            move = spaces[step[0]].move(state[step[0]], step[1])
            try:
                if move.failure is not None:
                    raise move.failure
                found.append((self._after(state, step, move), step[2]))
            except Failure as failure:
                self._wrong(failure, [*self._schedule(here), step[2]])
                return None
        if not steps:
            self.graph.ends.add(self._digest(state))
            if self._wrong(None, self._schedule(here)) is not None:
                return None
        for stage in deaths:
            now = list(state)
            self._kill(now, stage)
            found.append((tuple(now), f"die{stage}.0"))
        return found

    def _schedule(self, number: int) -> list[str]:
        names: list[str] = []
        while number:
            number, name = self.came[number]
            names.append(name)
        return [*self._start(), *reversed(names)]

    def _start(self) -> list[str]:
        stages = range(self.stages)
        return [
            *(f"f{s}.0" for s in stages),
            *(f"l{s}.0<{p}" for s in stages for p in stages if p != s),
        ]

    def _digest(self, state: State) -> bytes:
        """A state's digest, which does not depend on the order of the search."""
        parts = [
            b"" if number == DEAD else space.digests[number]
            for space, number in zip(self.spaces, state, strict=False)
        ]
        queued = [self.queues[number] for number in state[self.stages + 1 :]]
        things = [[self.payloads.things[payload] for payload in queue] for queue in queued]
        return self.canonical.digest([parts, things])

    def _wrong(self, expected: Failure | None, schedule: list[str]) -> Failure | None:
        """Lead a whole world along ``schedule``; its failure, if it has one.

        A failure that only the parts see, or a schedule that the whole cannot follow, is a fault of
        this search.
        """
        how = Replay(schedule)
        # No further: a death that has not come yet could come after the schedule.
        events = len(schedule) if self.mortal else None
        world = World(self.case, record=True).run(how, events=events)
        found = world.failure
        if found is None and (expected is not None or world.schedule[: len(schedule)] != schedule):
            raise AssertionError(
                f"the parts say {expected}, the whole says nothing; {len(schedule)} of {world.events}"
            )
        if found is None and how.divergence is not None:
            raise AssertionError(f"the whole cannot follow: {how.divergence}")
        if found is not None:
            self.graph.failure, self.graph.schedule = found, world.schedule
        return found
