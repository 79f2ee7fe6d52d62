"""One worker's seat on one rank: what it is parked on, and what lets it go on.

This is the part of the rank's loop that concerns a single worker. The driver (nnsight's mediator, or
the simulator's host) runs the worker until it parks, tells the seat what it parked on, and does what
the seat answers:

* [`ask`][ppcore.seat.Seat.ask] for a location: leave it parked until this rank's forward gets there
  (``LOCAL``), answer it and run on (``ANSWER``), or leave it parked for something else;
* [`need`][ppcore.seat.Seat.need] data of another stage: leave it parked;
* [`go_on`][ppcore.seat.Seat.go_on] when a turn of its request has opened or the request has ended:
  wait for its pulls and run on (``WAIT``), treat what it asked for by the new verdict (``RETRY``), or
  leave it parked (``STAY``).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

from .core import GATE, LOCAL, NEVER, Core, Decision, Verdict
from .messages import Worker


class Move(enum.Enum):
    """What a parked worker does now; see the module docstring."""

    STAY = "stay"
    WAIT = "wait"
    RETRY = "retry"


STAY: Final = Move.STAY
WAIT: Final = Move.WAIT
RETRY: Final = Move.RETRY


class Seat:
    """A worker's state on one rank.

    Attributes:
        decision: what the core said of the access that the worker parked on last.
        pulls: the pulls whose values the worker needs; empty when it needs none.
    """

    def __init__(self, core: Core, worker: Worker) -> None:
        self.core = core
        self.worker = worker
        self.decision: Decision | None = None
        self.pulls: tuple[int, ...] = ()
        # Invariant: set exactly while the worker is parked on a location that this rank's forward
        # will not serve it, with its occurrence.
        self.held: tuple[str, int] | None = None

    def ask(self, location: str, occurrence: int, *, passed: bool) -> Verdict:
        """The worker parked on ``location``.

        Args:
            passed: whether this rank's forward is already beyond that visit.
        """
        self.decision = self.core.access(self.worker, location, occurrence)
        return self._judge(location, occurrence, passed)

    def retry(self, *, passed: bool) -> Verdict:
        """Treat the held location by its new decision, after ``RETRY``."""
        assert self.held is not None
        location, occurrence = self.held
        return self._judge(location, occurrence, passed)

    def _judge(self, location: str, occurrence: int, passed: bool) -> Verdict:
        assert self.decision is not None
        verdict = self.decision.verdict
        if verdict is LOCAL and passed:
            verdict = NEVER
        self.held = (location, occurrence) if verdict is GATE or verdict is NEVER else None
        return verdict

    def need(self, pulls: Sequence[int]) -> None:
        """The worker parked until these pulls are answered."""
        self.pulls = tuple(pulls)

    @property
    def waits(self) -> bool:
        """Whether the worker is parked for a turn, or for what a later stage makes."""
        return bool(self.pulls) or self._gated() is not None

    def _gated(self) -> tuple[str, int] | None:
        """What the worker is parked on until a turn opens, with its occurrence; None if on nothing."""
        gated = self.decision is not None and self.decision.verdict is GATE
        return self.held if gated else None

    def take(self) -> tuple[int, ...]:
        """The pulls that the worker waited for; it goes on now."""
        pulls, self.pulls = self.pulls, ()
        return pulls

    def go_on(self) -> Move:
        """A turn of the worker's request has opened here, or the request has ended."""
        if self.pulls:
            return WAIT if self.core.may_wait(self.pulls) else STAY
        gated = self._gated()
        if gated is None or self.decision is None:
            return STAY
        again = self.core.again(self.decision.key, *gated)
        if again.verdict is GATE:
            return STAY
        self.decision = again
        return RETRY
