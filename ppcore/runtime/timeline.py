"""What a rank did and when, for a viewer of Chrome traces.

A timeline is recorded by subclasses of the link and of the worker, which a rank is built from when one is
asked for; without one there is nothing to switch off. An event costs one tuple. Times are of the
clock that counts since the machine started, which all processes of a machine share; a rank on another
machine adds the difference of the two machines' wall clocks (see `clock_offset_ns`).

What is recorded: rounds; handoffs (a worker is given a value of this stage's forward, and runs); parked
spans (from where a worker stops until it goes on, with what it stopped for); waits of the forward itself;
pulls, from the request to the value; and serving a peer's pull.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from nnsight.intervention.interleaver import Event as Wanted

from ..effects import Compute, Describe, Effect, Landed, Serve
from ..messages import Worker
from .lazy import Base
from .link import Forcing, Link
from .mediator import PPMediator
from .ranks import boot_id

#: Events of one rank that nobody has taken yet; of what comes after only the number is kept.
LIMIT = 500_000


class Event(NamedTuple):
    """One thing that happened on a rank.

    Attributes:
        kind: "round", "handoff", "runs", "parked", "wait", "pull", "serve", "lost".
        track: what it happened on: "forward", "listener", or a worker.
        name: the location, or what was waited for; of "lost", how many events are missing.
        began_ns, ended_ns: on the timeline's clock, nanoseconds.
        link: names a pull on both of its ends: (stage that asked, column, number); None otherwise.
    """

    kind: str
    track: str
    name: str
    began_ns: int
    ended_ns: int
    link: tuple[int, int, int] | None = None


class Timeline:
    """The events of one rank.

    Args:
        column: this rank's tensor-parallel column.
        offset_ns: what to add to this machine's clock.
    """

    def __init__(self, column: int, offset_ns: int = 0) -> None:
        self.column = column
        self.offset_ns = offset_ns
        self._events: list[Event] = []
        self._lost, self._lost_since_ns = 0, 0

    def now_ns(self) -> int:
        """The time on the timeline's clock."""
        return time.monotonic_ns() + self.offset_ns

    def add(
        self,
        kind: str,
        track: str,
        name: str,
        began_ns: int,
        link: tuple[int, int, int] | None = None,
    ) -> None:
        """Something that began then ends now."""
        if len(self._events) >= LIMIT:
            self._lost_since_ns = self._lost_since_ns if self._lost else began_ns
            self._lost += 1
            return
        self._events.append(Event(kind, track, name, began_ns, self.now_ns(), link))

    def take(self) -> list[Event]:
        """The events since the last time, in the order in which they ended.

        Where some are missing, the last one is "lost", as long as they were.
        """
        events, self._events = self._events, []
        if self._lost:
            name, since = str(self._lost), self._lost_since_ns
            events.append(Event("lost", "forward", name, since, self.now_ns()))
            self._lost = 0
        return events


def clock_offset_ns(gather: Callable[[Any], list]) -> int:
    """What this rank adds to its clock so that all ranks' clocks agree.

    Zero on the machine of the first rank. On another the difference of the wall clocks decides, so that
    ranks agree as well as the machines' time service does.
    """
    try:
        machine = boot_id()
    except OSError:
        machine = ""
    start = time.time_ns() - time.monotonic_ns()
    first_machine, first_start = gather((machine, start))[0]
    return 0 if machine == first_machine else start - first_start


class TimedLink(Link):
    """A link that records rounds, waits, pulls and what it serves.

    Args:
        timeline: where to; everything else is the link's.
    """

    def __init__(self, *args: Any, timeline: Timeline, **kwargs: Any) -> None:
        self.timeline = timeline
        self._round_began_ns = 0
        # Pull number -> what it is for, and when it was asked for.
        self._asked: dict[int, tuple[str, int]] = {}
        super().__init__(*args, **kwargs)

    def open_round(self, requests: list[str], *, leaves: bool = False) -> None:
        self._round_began_ns = self.timeline.now_ns()
        super().open_round(requests, leaves=leaves)

    def close_round(self) -> None:
        super().close_round()
        if self._round_began_ns:
            name = f"round {self.core.round}"
            self.timeline.add("round", "forward", name, self._round_began_ns)
            self._round_began_ns = 0

    def until(self, condition: Callable[[], bool], what: str) -> None:
        began = self.timeline.now_ns()
        try:
            super().until(condition, what)
        finally:
            self.timeline.add("wait", "forward", what, began)

    def request(self, wanted: list[tuple[Base, str]]) -> list[int]:
        began = self.timeline.now_ns()
        with self._changed:
            before = [tuple(base.numbers) for base, _ in wanted]
            numbers = super().request(wanted)
            for number, (base, _), asked in zip(numbers, wanted, before, strict=True):
                if number in asked:
                    continue
                if self.ready([number]):  # it was asked for ahead, and is here
                    self._came(number, base.location, began)
                else:
                    self._asked.setdefault(number, (base.location, began))
        return numbers

    def _came(self, number: int, name: str, began: int) -> None:
        asked = (self.core.stage, self.timeline.column, number)
        self.timeline.add("pull", "pulls", name, began, asked)

    def _carry_out(self, effects: Iterable[Effect]) -> list[Serve | Describe | Compute]:
        effects = list(effects)
        for effect in effects:
            if isinstance(effect, Landed) and effect.number in self._asked:
                self._came(effect.number, *self._asked.pop(effect.number))
        return super()._carry_out(effects)

    def _answer(self, effect: Serve | Describe | Compute) -> None:
        began = self.timeline.now_ns()
        super()._answer(effect)
        if isinstance(effect, Compute):
            self.timeline.add("serve", "listener", f"{effect.location} ({effect.key})", began)
            return
        name = effect.call if isinstance(effect, Describe) else str(effect.key)
        asked = (effect.peer, self.timeline.column, effect.number)
        self.timeline.add("serve", "listener", name, began, asked)


class TimedMediator(PPMediator):
    """A worker that records when it runs and what it is parked on."""

    #: When it parked last, and on what.
    _parked: tuple[int, str] | None = None

    def _resume(self, *args: Any) -> Any:
        timeline, track = self.link.timeline, _track(self.worker_id)
        if self._parked is not None:
            began, name = self._parked
            timeline.add("parked", track, name, began)
        began = timeline.now_ns()
        self._parked = None
        try:
            pending = super()._resume(*args)
        finally:
            timeline.add("runs", track, "block", began)
        if self.alive:
            self._parked = (timeline.now_ns(), _reason(pending))
        return pending

    def _handle(self, provider: str, value: Any) -> Any:
        began = self.link.timeline.now_ns()
        try:
            return super()._handle(provider, value)
        finally:
            self.link.timeline.add("handoff", "forward", provider, began)


def _track(worker: Worker) -> str:
    return f"worker {worker.request}" + (f" {worker.block}" if worker.block else "")


def _reason(pending: Any) -> str:
    if isinstance(pending, Forcing):
        return "a value of a later stage"
    provider = getattr(pending, "provider", "")
    verb = {Wanted.VALUE: "reads", Wanted.SWAP: "writes", Wanted.SKIP: "skips"}.get(
        getattr(pending, "event", None), ""
    )
    return f"{verb} {provider}".strip() or "its end"
