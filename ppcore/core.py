"""The protocol of one rank, as a state machine without I/O.

Theory of operation
-------------------
Every rank of a column runs every block; a rank's forward visits only its own stage's modules. What
crosses between ranks is the data of reads, never control. This module makes every decision that
this takes, and touches nothing: payloads are opaque tokens, messages go out as effects, time does
not exist. The runtime drives it with gloo and greenlets, the simulator with a queue.

*Places.* A worker's **clock** is the place (turn, index) of the last visit it was served. An access
asks for a place; four things can be true of it, and [`Core.access`][ppcore.core.Core.access] says
which:

=========  =========================================================================================
``LOCAL``  this rank's forward will visit it: wait for the visit
``ANSWER`` another stage visits it, in a turn that is open here: carry on at once with a lazy (a
           read) or with nothing (a write, which is absorbed)
``GATE``   another stage visits it, in a turn that is not open here yet; or a later stage does, and
           this rank's forward has served the worker in that turn (on one rank the forward would be
           past this stage; a worker that ran on inside the handoff could still edit what the forward
           goes on with), or this rank will leave its round (then there is time behind its forward,
           which other ranks wait for): park until the next turn is open, or it has left its round
``NEVER``  it lies behind the worker's clock: one rank would have passed it, so it cannot be served
=========  =========================================================================================

*Waits.* A rank may block its forward thread only for a place strictly smaller than its own (round,
stage). Waits then follow a well-founded order and cannot form a cycle. Everything else parks the
worker, and the forward goes on. A parked worker is completed when its request's next turn opens
here (the value is older than that round by then) or when its request has ended (everything is). A rank
that has nothing else to do *leaves* its round: behind its own forward, and before the next, it stands
behind every stage of the round, and completes there what they produce. An
answer that comes earlier changes nothing: what a block can still do in a step must not depend on when
a message arrives, or the columns of a stage would part.

*Values.* The owner publishes what its worker read, under the access's name. A published value lives
until every peer has released it or the request has drained. A pull of a value that is not published
yet waits at the owner; one that can never be published is answered *never*, with the reason.

*Ahead.* A block that looks at one value after the other makes a row of pulls; what the row tells of those
to come is asked for with the last (see [`ppcore.series`][]). These are pulls like others, made early: for
the owner there is no difference, and here an answer waits until the block makes the pull. A guess that
was wrong costs a message and changes nothing.

*Calls.* A module that a block calls is real on some stage, its *home*. The arguments are complete
where the worker's clock stands, the *caller*: that stage gives them to the home, which computes at
once and publishes the result. So a call's result, like a read's, can be had from the place at which
the block has made the call, whenever the home's own forward comes by.

*The end.* When a request has ended here, this rank may still pull; then it says *done*. When it has
heard *done* from every peer too, all that is left of the request goes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .effects import Abandoned, Compute, Describe, Dropped, Effect, Landed, Send, Serve
from .messages import (
    Call,
    Done,
    Failed,
    Held,
    Key,
    Message,
    Never,
    Probe,
    Pull,
    Pulls,
    Release,
    Reply,
    Worker,
    pulls_of,
)
from .schedule import BEFORE, REPLICATED, Place, Schedule, made
from .series import MOST, Series, stem

#: The turn of what comes after a request's last turn.
END: Final = 1 << 62

#: The access number of what does not depend on the run: a parameter. Its owner can always serve it,
#: so it may be waited for anywhere.
STATIC: Final = -1


class Verdict(enum.Enum):
    """What becomes of an access; see the module docstring."""

    LOCAL = "local"
    ANSWER = "answer"
    GATE = "gate"
    NEVER = "never"


LOCAL: Final = Verdict.LOCAL
ANSWER: Final = Verdict.ANSWER
GATE: Final = Verdict.GATE
NEVER: Final = Verdict.NEVER


class Decision:
    """The answer to one access.

    Attributes:
        verdict: what the worker does now.
        key: the access's name, the same on every rank.
        place: where in the run it belongs.
        owner: the stage that can produce the value; this stage when nobody else can.
    """

    # No named tuple: nobody compares decisions, and machine code makes one of these in half the time.
    __slots__ = ("key", "owner", "place", "verdict")

    def __init__(self, verdict: Verdict, key: Key, place: Place, owner: int) -> None:
        self.verdict = verdict
        self.key = key
        self.place = place
        self.owner = owner

    def __repr__(self) -> str:
        return f"Decision({self.verdict}, {self.key}, {self.place}, owner={self.owner})"


class Available(NamedTuple):
    """From when on a value can be had: its owner produces it in this turn, on this stage."""

    turn: int
    stage: int


#: Available at any time.
ALWAYS: Final = Available(-1, -1)


class Calling(NamedTuple):
    """What becomes of a module's call; the same on every rank, but for ``available``.

    Attributes:
        key: the result's name.
        caller: the stage that has the arguments.
        home: the stage that computes, and publishes the result.
        available: from when on this rank can have the result; on the home, from when on the arguments
            are here.
    """

    key: Key
    caller: int
    home: int
    available: Available


#: What a caller publishes for the home of a call, once it has sent the arguments: a receipt.
GIVEN: Final = 0


# --- state ------------------------------------------------------------------------------------


class _Entry:
    """A published value."""

    __slots__ = ("location", "peers", "size_bytes", "token")

    def __init__(self, location: str, token: Any, size_bytes: int, peers: set[int]) -> None:
        self.location = location
        self.token = token
        self.size_bytes = size_bytes
        # Invariant: never empty while the entry is in the buffer.
        self.peers = peers


class _Worker:
    __slots__ = (
        "called", "clock", "finished", "next_access", "served_turn", "touched", "ungiven"
    )  # fmt: skip

    def __init__(self, clock: Place) -> None:
        # The visit that was served last; nothing before it can be served any more.
        self.clock = clock
        # The last turn in which this rank's forward served the worker; -1 before the first.
        self.served_turn = -1
        # The next access's number. Invariant: the same on every rank at the same line.
        self.next_access = 0
        # No access with a number at or above this is made any more.
        self.finished = False
        # When the last collective call can be had; a later one comes after it.
        self.called: Available | None = None
        # The call that this rank has named and not given to its home yet.
        self.ungiven: int | None = None
        # The location that each access touched, for comparing with what peers ask for.
        self.touched: list[str] = []

    def location(self, access: int) -> str | None:
        """What an access touched; None for one that is not made yet, and for `STATIC`."""
        return self.touched[access] if 0 <= access < len(self.touched) else None


class _Request:
    __slots__ = (
        "buffer", "done", "ended", "failed", "held", "names", "released", "rounds", "said_done",
        "series", "waiting", "workers",
    )  # fmt: skip

    def __init__(self) -> None:
        # The round of each turn. Invariant: strictly increasing.
        self.rounds: list[int] = []
        self.workers: dict[str, _Worker] = {}
        self.buffer: dict[Key, _Entry] = {}
        # Pulls that came before their value.
        self.waiting: dict[Key, list[tuple[int, Pull]]] = {}
        # What this rank has asked for: a name is asked for once.
        self.names: dict[Key, dict[tuple[str, str], int]] = {}
        # (block, stem of the locations, expression) -> how this rank's worker has pulled them.
        self.series: dict[tuple[str, str, str], Series] = {}
        # Peers that will not ask for a value that is not published yet.
        self.released: dict[Key, set[int]] = {}
        self.held: dict[int, str] = {}
        # Block -> the first access that it does not make on a stage, since it raised there; the stage.
        self.failed: dict[str, tuple[int, int]] = {}
        self.ended = False
        self.said_done = False
        self.done: set[int] = set()


class _Asked(NamedTuple):
    """A pull or probe, to whom, and from when on what it asks for can be had."""

    owner: int
    message: Pull | Probe
    available: Available


@dataclass(slots=True)
class Counters:
    """Running totals of one rank, for its status.

    Attributes:
        pulls: pulls that this rank has asked for.
        messages: messages that this rank has sent.
    """

    pulls: int = 0
    messages: int = 0


class Core:
    """The protocol state of the rank at ``stage`` of one column.

    Args:
        stage: this rank's pipeline stage.
        schedule: the order of visits of the whole model, the same on every rank.
        homes: module path -> the stages on which the module is real.
    """

    def __init__(self, stage: int, schedule: Schedule, homes: Mapping[str, Iterable[int]]) -> None:
        self.stage = stage
        self.schedule = schedule
        self.stages = schedule.stages
        self.peers = tuple(other for other in range(self.stages) if other != stage)
        self.homes = {path: frozenset(stages) for path, stages in homes.items()}
        self.counters = Counters()
        self.dead: set[int] = set()
        # The round that is open, or the last one that was.
        self.round = -1
        # Where this rank's forward stands, for what it may wait for: (round, stage).
        self._here = (-1, stage)
        # Whether this rank will leave the round that is open.
        self._will_leave = False
        self._requests: dict[str, _Request] = {}
        self._numbers = 0
        # What is asked for and not answered, by number.
        self._asked: dict[int, _Asked] = {}
        # The pulls that `names` lists, answered or not.
        self._pulled: dict[int, _Asked] = {}
        # Pulls that nobody here has made yet, asked for ahead -> their answer, once it is here.
        self._ahead: dict[int, Landed | None] = {}

    # --- rounds and requests ------------------------------------------------------------------

    def open_round(self, requests: Iterable[str]) -> list[Effect]:
        """A forward step begins, in which ``requests`` take part: each one's next turn is open."""
        self.round += 1
        self._here = (self.round, self.stage)
        self._will_leave = False
        for name in requests:
            request = self._request(name)
            if request.ended:
                raise AssertionError(f"{name!r} takes part in a round after its end")
            request.rounds.append(self.round)
        return []

    def will_leave_round(self) -> None:
        """This rank will leave the round that has just opened: what later stages visit in it waits for that."""
        self._will_leave = True

    def leave_round(self) -> list[Effect]:
        """This rank's forward step is over, and what it handed on has arrived.

        Until the next round opens it stands behind every stage of this one: it may wait for them, and its
        workers go on to what they visit.
        """
        self._here = (self.round, self.stages)
        return []

    @property
    def between(self) -> bool:
        """Whether this rank has left its last round and opened no other."""
        return self._here[1] == self.stages

    def turn(self, request: str) -> int:
        """The request's last opened turn; -1 before the first."""
        found = self._requests.get(request)
        return len(found.rounds) - 1 if found is not None else -1

    def end(self, request: str) -> None:
        """The request takes part in no further round: whatever it waits for is older than now."""
        self._request(request).ended = True

    def ended(self, request: str) -> bool:
        """Whether the request has ended on this rank."""
        found = self._requests.get(request)
        return found is not None and found.ended

    def say_done(self, request: str) -> list[Effect]:
        """This rank will pull nothing more of ``request``: tell everyone, once.

        A request that is drained already stays forgotten: the last done may have come on another thread
        since the caller looked.
        """
        state = self._requests.get(request)
        if state is None or state.said_done:
            return []
        state.said_done = True
        for names in state.names.values():
            self._not_wanted(names.values())
        effects: list[Effect] = [
            effect for name in state.workers for effect in self.finish(Worker(request, name))
        ]
        effects += self._send_all(Done(request))
        return effects + self._drop_if_drained(request)

    def _request(self, name: str) -> _Request:
        found = self._requests.get(name)
        if found is None:
            found = self._requests[name] = _Request()
        return found

    def _drop_if_drained(self, name: str) -> list[Effect]:
        state = self._requests[name]
        if not state.said_done or not state.done.issuperset(set(self.peers) - self.dead):
            return []
        for key in list(state.names):
            self.forget(key)
        del self._requests[name]
        return [Dropped(name)]

    # --- workers ------------------------------------------------------------------------------

    def start(self, worker: Worker) -> None:
        """A block begins to run for a request; its clock stands before the open turn's visits."""
        request = self._request(worker.request)
        turn = max(0, len(request.rounds) - 1)
        request.workers[worker.block] = _Worker(clock=Place(turn, BEFORE))

    def _worker(self, worker: Worker) -> _Worker:
        return self._requests[worker.request].workers[worker.block]

    def clock(self, worker: Worker) -> Place:
        """Where the worker stands."""
        return self._worker(worker).clock

    def wanted(self, worker: Worker, location: str) -> int:
        """The occurrence of ``location`` that a relaxed request made now would ask for."""
        clock = self._worker(worker).clock
        if clock.turn == END:
            # After the result: what one rank has counted are the turns that there were.
            clock = Place(len(self._requests[worker.request].rounds), BEFORE)
        return self.schedule.before(location, clock)

    def knows(self, location: str) -> bool:
        """Whether a turn's forward visits ``location`` on any stage."""
        return location in self.schedule

    def occurrence(self, request: str, location: str, visited: int) -> int | None:
        """Which occurrence of ``location`` this stage's next visit of it is, to ``request``.

        Args:
            visited: how often this stage has visited it in the request's open turn.

        Returns:
            The number, from 0; None where no stage's forward visits the location.
        """
        turn = self.turn(request)
        return self.schedule.local_occurrence(location, self.stage, turn, visited)

    def access(self, worker: Worker, location: str, occurrence: int) -> Decision:
        """Name and place the worker's next access, and say what becomes of it.

        Asked again for an access that was gated, it gets a new decision under the same name: see
        [`again`][ppcore.core.Core.again].
        """
        state = self._worker(worker)
        key = made(Key, (worker, state.next_access))
        state.next_access += 1
        state.touched.append(location)
        return self._decide(state, key, location, occurrence)

    def again(self, key: Key, location: str, occurrence: int) -> Decision:
        """Decide anew for an access that was gated."""
        return self._decide(self._worker(key.worker), key, location, occurrence)

    def _decide(self, state: _Worker, key: Key, location: str, occurrence: int) -> Decision:
        found = self.schedule.visit(location, occurrence)
        if found is None:
            if location in REPLICATED:
                return Decision(LOCAL, key, Place(END, BEFORE), self.stage)
            # No forward visits it. Where the module is real the worker waits as it would on one
            # rank, in vain; elsewhere it must not run on either.
            home = self.home(location.rpartition(".")[0])
            return Decision(LOCAL if self.stage in home else NEVER, key, state.clock, self.stage)
        place, owner = found
        if place < state.clock:
            return Decision(NEVER, key, place, owner)
        if location in self.schedule.skips:
            # What lies inside of what is skipped is not visited in this turn.
            place = self.schedule.beyond(location, place)
        if owner == self.stage:
            return Decision(LOCAL, key, place, owner)
        request = self._requests[key.worker.request]
        turn, opened = place.turn, len(request.rounds)
        if turn >= opened or (
            owner > self.stage
            and turn == opened - 1
            and (self._will_leave or state.served_turn == turn)
            and not (request.ended or self.between)
        ):
            return Decision(GATE, key, place, owner)
        state.clock = place
        return Decision(ANSWER, key, place, owner)

    def served(self, worker: Worker, place: Place) -> None:
        """The forward served the worker's local access at ``place``."""
        state = self._worker(worker)
        if place < state.clock:
            raise AssertionError(f"{worker} was served {place} behind its clock {state.clock}")
        state.clock = place
        state.served_turn = place.turn

    def home(self, path: str) -> frozenset[int]:
        """The stages on which the module at ``path`` is real; all of them when it is unknown."""
        return self.homes.get(path, frozenset(range(self.stages)))

    def call(
        self,
        worker: Worker,
        path: str,
        home: frozenset[int],
        collective: bool = False,
        after: Iterable[Available] = (),
    ) -> Calling:
        """Name a call of the module at ``path``, which is real on ``home``, and say who does what.

        Args:
            collective: whether the module may only run on the forward's thread, with the other columns
                of its stage. Then its home computes it when its own worker gets there.
            after: for such a call, when its arguments can be had.
        """
        state = self._worker(worker)
        key = Key(worker, state.next_access)
        state.next_access += 1
        state.touched.append(path)
        turn, index = state.clock
        # After the end everything can be had everywhere.
        caller = self.schedule.stage_of(index) if turn != END else min(home)
        computes = caller if caller in home else min(home)
        if collective:
            return Calling(key, computes, computes, self._due(worker, computes, after))
        if caller == self.stage != computes:
            state.ungiven = key.access
            return Calling(key, caller, computes, ALWAYS)
        return Calling(key, caller, computes, Available(turn, caller))

    def _due(self, worker: Worker, owner: int, after: Iterable[Available]) -> Available:
        """From when on the worker's collective call of this moment can be had from ``owner``.

        Not before ``owner`` has the values ``after`` that the call needs. Nor before its worker has got
        this far: past the visits and the calls before this one, each of which it may have to wait for
        (a branch on the result of a later stage parks it until that has arrived).
        """
        state = self._worker(worker)
        clock, needed = state.clock, [*after]
        if clock.turn <= self.turn(worker.request):
            needed.append(Available(clock.turn, self.schedule.stage_of(clock.index)))
        if state.called is not None:
            needed.append(state.called)
        state.called = found = self.available(owner, clock.turn, needed)
        return found

    def reached(self, worker: Worker, access: int) -> bool:
        """Whether the worker is past every access before number ``access`` on this rank.

        The access that it is parked on has its number already, and is not behind it.
        """
        state = self._requests.get(worker.request)
        seat = state.workers.get(worker.block) if state is not None else None
        return seat is not None and seat.next_access > access

    def finish(self, worker: Worker) -> list[Effect]:
        """The worker makes no further access: pulls that wait for one are answered never."""
        request = self._requests.get(worker.request)
        if request is None or worker.block not in request.workers:
            return []
        request.workers[worker.block].finished = True
        effects: list[Effect] = []
        for key in [key for key in request.waiting if key.worker == worker]:
            for peer, pull in request.waiting.pop(key):
                effects += self._refuse(peer, pull)
        return effects

    # --- waits --------------------------------------------------------------------------------

    def available(self, owner: int, turn: int, after: Iterable[Available] = ()) -> Available:
        """When ``owner`` can produce a value of ``turn`` that depends on the values ``after``.

        A value that needs one of a later stage, or turn, is produced when that one has reached the
        owner: in the owner's next turn.
        """
        best = Available(turn, owner)
        for other in after:
            if (other.turn, other.stage) > (best.turn, best.stage):
                best = (
                    Available(other.turn + 1, owner)
                    if other.stage > owner
                    else Available(other.turn, owner)
                )
        return best

    def may_block(self, request: str, when: Available) -> bool:
        """Whether this rank's forward thread may wait for a value that is available ``when``.

        The wait rule: only for a place strictly smaller than its own (round, stage).
        """
        if when.turn < 0:
            return True
        state = self._requests.get(request)
        if state is None:
            return False
        if state.ended:
            return True
        if when.turn >= len(state.rounds):
            return False
        return (state.rounds[when.turn], when.stage) < self._here

    def may_wait(self, numbers: Iterable[int]) -> bool:
        """Whether the wait rule lets this rank's forward thread wait for these pulls.

        It goes by when a value can be counted on, and not by whether it has come: what a block can still
        do in a step must not depend on when a message arrives.
        """
        dead = self.dead
        for number in numbers:
            asked = self._pulled.get(number)
            if asked is None or asked.owner in dead or asked.available.stage in dead:
                continue  # a probe, or its request is gone, or nothing better can come
            assert isinstance(asked.message, Pull)
            if not self.may_block(asked.message.key.worker.request, asked.available):
                return False
        return True

    def wait(self, numbers: Iterable[int]) -> None:
        """This rank's forward thread blocks until these pulls are answered."""
        if not self.may_wait(numbers):
            raise AssertionError(f"a wait against the rule: {'; '.join(self.waits())}")

    # --- values: this rank asks ---------------------------------------------------------------

    def pull(
        self, key: Key, location: str, expression: str, owner: int, available: Available
    ) -> tuple[int, list[Effect]]:
        """Ask ``owner`` for ``expression`` of a value, unless that is asked for already.

        ``available`` says from when on the value can be had.

        What the pulls so far make likely is asked for ahead: see `ppcore.series`. It is there for a pull
        of that name, and as if it were not until there is one.

        Returns the pull's number and what to do.
        """
        names = self._request(key.worker.request).names.setdefault(key, {})
        name = (location, expression)
        number = names.get(name)
        asks: list[_Asked] = []
        effects: list[Effect] = []
        if number is None:
            asks = [self._numbered(key, location, expression, owner, available)]
            number = names[name] = asks[0].message.number
        elif number in self._ahead:
            effects = self._wanted(number, available)
        else:
            return number, []
        self.counters.pulls += 1
        if available.stage == owner and key.access != STATIC and owner not in self.dead:
            asks += self._read_ahead(key, location, expression, owner, available)
        return number, effects + self._ask(asks) if asks else effects

    def _numbered(
        self, key: Key, location: str, expression: str, owner: int, available: Available
    ) -> _Asked:
        self._numbers += 1
        message = Pull(self._numbers, key, location, expression)
        asked = self._pulled[message.number] = made(_Asked, (owner, message, available))
        return asked

    def _wanted(self, number: int, available: Available) -> list[Effect]:
        """What was asked for ahead is pulled now."""
        asked = self._pulled[number] = self._pulled[number]._replace(available=available)
        landed = self._ahead.pop(number)
        if landed is not None:
            return [landed]
        self._asked[number] = asked
        return []

    def _not_wanted(self, numbers: Iterable[int]) -> None:
        """None of these will be pulled: if their answers come they are nobody's."""
        for number in numbers:
            if number in self._ahead:
                del self._ahead[number]

    def _read_ahead(
        self, key: Key, location: str, expression: str, owner: int, available: Available
    ) -> list[_Asked]:
        """What the worker will pull next, as far as its series of pulls tells."""
        request = self._requests[key.worker.request]
        worker = request.workers.get(key.worker.block)
        if worker is None:
            return []
        name = (key.worker.block, stem(location), expression)
        series = request.series.get(name)
        if series is None:
            if len(request.series) == MOST:
                request.series.clear()
            request.series[name] = Series(key.access, location)
            return []
        asks: list[_Asked] = []
        for access, following in series.goes_on(key.access, location):
            later = made(Key, (key.worker, access))
            names = request.names.setdefault(later, {})
            if (
                access < worker.next_access
                or (following, expression) in names
                or self.schedule.owners(following) != (owner,)
            ):
                break
            # Whoever pulls it says when it can be had; nobody waits for it before.
            asked = self._numbered(later, following, expression, owner, available)
            number = names[following, expression] = asked.message.number
            self._ahead[number] = None
            asks.append(asked)
        return asks

    def probe(self, owner: int, call: str) -> tuple[int, list[Effect]]:
        """Ask ``owner`` what structure a call of one of its modules would return (opaque text).

        Any rank can answer this at any time, so it may be waited for anywhere.
        """
        self._numbers += 1
        return self._numbers, self._ask([_Asked(owner, Probe(self._numbers, call), ALWAYS)])

    def _ask(self, asks: list[_Asked]) -> list[Effect]:
        """Ask one owner for all of these, in one message."""
        owner, message, available = asks[0]
        for gone in (owner, available.stage):
            if gone in self.dead:
                reason = f"died: stage {gone} is gone ({describe(message)})"
                return [Landed(message.number, reason=reason)]
        if self._never_given(owner, message, available):
            return [self._without_arguments(message)]
        for asked in asks:
            self._asked[asked.message.number] = asked
        if len(asks) > 1:
            pulls = tuple(pull for asked in asks for pull in pulls_of(asked.message))
            return self._send(owner, Pulls(pulls))
        return self._send(owner, message)

    def forget(self, key: Key) -> None:
        """Nobody here holds what was pulled of ``key`` any more: asked again, it is pulled again."""
        state = self._requests.get(key.worker.request)
        if state is not None:
            numbers = state.names.pop(key, {}).values()
            self._not_wanted(numbers)
            for number in numbers:
                del self._pulled[number]

    def release(self, keys: Iterable[tuple[int, Key]]) -> list[Effect]:
        """This rank can force these values (owner, key) no more: one message an owner."""
        by_owner: dict[int, list[Key]] = {}
        for owner, key in keys:
            state = self._requests.get(key.worker.request)
            if state is None:
                continue
            self._not_wanted(state.names.get(key, {}).values())
            if not state.said_done and owner not in self.dead:
                by_owner.setdefault(owner, []).append(key)
        effects: list[Effect] = []
        for owner, released in sorted(by_owner.items()):
            effects += self._send(owner, Release(tuple(sorted(released))))
        return effects

    # --- values: this rank is asked -----------------------------------------------------------

    def asked_for(self, key: Key) -> bool:
        """Whether any peer may still ask for ``key``; when none can there is nothing to publish.

        A pull that waits here has an answer even if its peer has released the value since: each pull
        has one.
        """
        state = self._requests.get(key.worker.request)
        if self.stages == 1 or state is None:
            return False
        if key in state.waiting:
            return True
        return not state.released.get(key, set()).issuperset(self.peers)

    def publish(self, key: Key, location: str, token: Any, size_bytes: int) -> list[Effect]:
        """This rank's worker read ``key``: keep what it read, and answer who asked already."""
        return self._publish(key, location, token, size_bytes, set(self.peers))

    def give(
        self, key: Key, path: str, home: int, call: str, token: Any, of: tuple[Key, ...]
    ) -> list[Effect]:
        """This rank has the arguments of a call: its home computes it now.

        Args:
            token: the arguments that are sent along.
            of: results of calls that this rank has given to the same home, and can still force: they
                are arguments too, and need not cross.
        """
        self._worker(key.worker).ungiven = None
        effects = self._send(home, Call(key, path, call, of), token)
        return effects + self._publish(key, path, GIVEN, 0, {home})

    def awaits(self, key: Key) -> bool:
        """Whether this rank's own worker may still get to the call ``key``, which is computed here."""
        state = self._requests.get(key.worker.request)
        return state is not None and not state.said_done

    def computed(self, key: Key, path: str, token: Any, size_bytes: int) -> list[Effect]:
        """A call that this rank was given is done: its result is published."""
        if key.worker.request not in self._requests:
            return []  # everyone was done with the request meanwhile
        return self._publish(key, path, token, size_bytes, set(self.peers))

    def _publish(
        self, key: Key, location: str, token: Any, size_bytes: int, peers: set[int]
    ) -> list[Effect]:
        state = self._requests[key.worker.request]
        effects: list[Effect] = []
        for peer, pull in state.waiting.pop(key, ()):
            effects += self._answer(peer, pull, location, token)
        peers = peers - state.released.pop(key, set()) - state.done - self.dead
        if peers:
            state.buffer[key] = _Entry(location, token, size_bytes, peers)
        return effects

    def _answer(self, peer: int, pull: Pull, location: str, token: Any) -> list[Effect]:
        if pull.location != location:
            return self._send(peer, Never(pull.number, self._diverged(pull, location)))
        return [made(Serve, (peer, pull.number, pull.key, pull.expression, token))]

    def _diverged(self, pull: Pull, location: str) -> str:
        return (
            f"diverged: access {pull.key} is {pull.location!r} on the rank that asked and "
            f"{location!r} on stage {self.stage}; the block's control flow depends on the rank"
        )

    def _refuse(self, peer: int, pull: Pull) -> list[Effect]:
        state = self._requests.get(pull.key.worker.request)
        worker = state.workers.get(pull.key.worker.block) if state is not None else None
        touched = worker.location(pull.key.access) if worker is not None else None
        if touched is not None and touched != pull.location:
            return self._send(peer, Never(pull.number, self._diverged(pull, touched)))
        if touched is None:
            why = "the block ended there before it got that far"
        else:
            why = "its visit never came, or nobody could ask for it any more"
        reason = (
            f"unreachable: stage {self.stage} cannot produce {pull.location!r} ({pull.key}): {why}"
        )
        return self._send(peer, Never(pull.number, reason))

    def take(self, peer: int, message: Message, token: Any = None) -> list[Effect]:
        """A message arrived from ``peer``, with its payload if it has one."""
        match message:
            case Pull():
                return self._take_pull(peer, message)
            case Pulls():
                return [e for pull in message.pulls for e in self._take_pull(peer, pull)]
            case Reply():
                return self._answered(made(Landed, (message.number, token, None)))
            case Release():
                for key in message.keys:
                    self._take_release(peer, key)
                return []
            case Done():
                return self._take_done(peer, message.request)
            case Held():
                self._request(message.request).held[peer] = message.leaves
                return []
            case Never():
                return self._answered(Landed(message.number, reason=message.reason))
            case Call():
                # The caller may be ahead, with a request that is not open here yet. A result for which
                # it is too late is refused to whoever asks for it.
                state = self._request(message.key.worker.request)
                if state.said_done:
                    return []
                of = tuple(state.buffer[key].token for key in message.of)
                return [Compute(peer, message.key, message.location, message.call, token, of)]
            case Probe():
                return [Describe(peer, message.number, message.call)]
            case Failed():
                return self._take_failed(peer, message)
            case _:
                return []

    def _answered(self, landed: Landed) -> list[Effect]:
        """The answer to a pull or probe is here, unless it is no longer asked for."""
        if self._asked.pop(landed.number, None) is None:
            return []
        if landed.number in self._ahead:
            self._ahead[landed.number] = landed
            return []
        return [landed]

    def _take_failed(self, peer: int, failed: Failed) -> list[Effect]:
        # A call that was not made there has no arguments: its home will not hear of it.
        state = self._request(failed.worker.request)
        block, found = failed.worker.block, (failed.access, peer)
        state.failed[block] = min(found, state.failed.get(block, found))
        effects: list[Effect] = [Abandoned(failed.worker, failed.access, failed.error)]
        for number, (owner, asked, when) in list(self._asked.items()):
            if self._never_given(owner, asked, when):
                del self._asked[number]
                effects.append(self._without_arguments(asked))
        return effects

    def _never_given(self, owner: int, asked: Pull | Probe, when: Available) -> bool:
        """Whether a call's caller need not have made it, since the block has raised before that somewhere.

        The caller may have been told before it got there; then nobody tells the home.
        """
        if isinstance(asked, Probe) or when.stage in (owner, ALWAYS.stage):
            return False
        (request, block), access = asked.key
        failed = self._request(request).failed.get(block)
        return failed is not None and failed[0] <= access

    def _without_arguments(self, asked: Pull | Probe) -> Landed:
        assert isinstance(asked, Pull)
        _, stage = self._request(asked.key.worker.request).failed[asked.key.worker.block]
        why = f"the block raised on stage {stage} before it made the call"
        return Landed(asked.number, reason=f"unreachable: {describe(asked)}: {why}")

    def _take_pull(self, peer: int, pull: Pull) -> list[Effect]:
        if pull.key.access == STATIC:
            return [Serve(peer, pull.number, pull.key, pull.expression, pull.location)]
        state = self._request(pull.key.worker.request)
        entry = state.buffer.get(pull.key)
        if entry is not None:
            return self._answer(peer, pull, entry.location, entry.token)
        worker = state.workers.get(pull.key.worker.block)
        if state.said_done or (worker is not None and worker.finished):
            return self._refuse(peer, pull)
        if worker is not None and peer in state.released.get(pull.key, ()):
            return self._refuse(peer, pull)
        state.waiting.setdefault(pull.key, []).append((peer, pull))
        return []

    def _take_release(self, peer: int, key: Key) -> None:
        # A peer that runs ahead may release what this rank has not opened yet. Nothing comes back to
        # life here: a peer says no more of a request after its done, and channels keep order.
        state = self._request(key.worker.request)
        entry = state.buffer.get(key)
        if entry is None:
            state.released.setdefault(key, set()).add(peer)
            return
        entry.peers.discard(peer)
        if not entry.peers:
            del state.buffer[key]

    def _take_done(self, peer: int, name: str) -> list[Effect]:
        state = self._request(name)
        state.done.add(peer)
        for key in list(state.buffer):
            self._take_release(peer, key)
        effects: list[Effect] = []
        for key in list(state.waiting):
            # The peer needs no answer any more; it is told all the same, so that each pull has one.
            for pull in [pull for asker, pull in state.waiting[key] if asker == peer]:
                effects += self._refuse(peer, pull)
            state.waiting[key] = [found for found in state.waiting[key] if found[0] != peer]
            if not state.waiting[key]:
                del state.waiting[key]
        return effects + self._drop_if_drained(name)

    # --- failure ------------------------------------------------------------------------------

    def fail(self, worker: Worker, error: str) -> list[Effect]:
        """The worker raised here: it ends on every rank with that error."""
        state = self._worker(worker)
        # In the middle of a call: whoever waits for its result waits in vain.
        access = state.next_access if state.ungiven is None else state.ungiven
        message = Failed(worker, access, error)
        return [*self._send_all(message), *self.finish(worker)]

    def peer_died(self, peer: int, why: str) -> list[Effect]:
        """The link to ``peer`` is gone: every wait on it ends with an error that names it."""
        if peer in self.dead:
            return []
        self.dead.add(peer)
        effects: list[Effect] = []
        for number, (owner, asked, when) in list(self._asked.items()):
            if peer in (owner, when.stage):
                reason = f"died: stage {peer} is gone ({why}); asked for {describe(asked)}"
                effects += self._answered(Landed(number, reason=reason))
        for name in list(self._requests):
            effects += self._take_done(peer, name)
        return effects

    # --- the end ------------------------------------------------------------------------------

    def say_held(self, request: str, leaves: str) -> list[Effect]:
        """Tell the later stages which leaves of the request's saves this rank ships."""
        message = Held(request, leaves)
        later = [peer for peer in self.peers if peer > self.stage]
        return [effect for peer in later for effect in self._send(peer, message)]

    def held(self, request: str) -> dict[int, str] | None:
        """What every earlier stage holds of the saves, or None while one has not said."""
        state = self._request(request)
        below = {*self.peers[: self.stage]} - self.dead
        if not below.issubset(state.held):
            return None
        return {peer: state.held[peer] for peer in below}

    def unheard(self, request: str) -> list[int]:
        """The earlier stages that have not said yet what they hold."""
        state = self._request(request)
        return [peer for peer in self.peers if peer < self.stage and peer not in state.held]

    # --- sending, and what can be seen from outside -------------------------------------------

    def _send(self, peer: int, message: Message, token: Any = None) -> list[Effect]:
        if peer in self.dead:
            return []
        self.counters.messages += 1
        return [made(Send, (peer, message, token))]

    def _send_all(self, message: Message) -> list[Effect]:
        return [effect for peer in self.peers for effect in self._send(peer, message)]

    def sent_reply(self, peer: int, message: Reply | Never) -> None:
        """The driver answers ``peer``, for a `Serve` or a `Describe`."""
        self.counters.messages += 1

    def close(self) -> None:
        """This rank leaves the column; nothing happens here any more."""

    @property
    def requests(self) -> list[str]:
        """The requests of which anything is left here."""
        return list(self._requests)

    def workers(self, request: str) -> list[Worker]:
        """The request's workers, in the order they started."""
        state = self._requests.get(request)
        return [Worker(request, block) for block in state.workers] if state is not None else []

    def buffered(self) -> tuple[int, int]:
        """How many values are published here, and their bytes."""
        entries = [entry for state in self._requests.values() for entry in state.buffer.values()]
        return len(entries), sum(entry.size_bytes for entry in entries)

    def pending(self) -> int:
        """How many pulls wait: asked for by this rank, or by peers here."""
        waiting = sum(len(w) for state in self._requests.values() for w in state.waiting.values())
        return len(self._asked) + waiting

    def drained(self) -> bool:
        """Whether nothing is left of an ended request here, and nothing of it is under way to here."""
        return not any(state.ended for state in self._requests.values()) and not any(
            isinstance(asked.message, Pull)
            and asked.message.key.worker.request not in self._requests
            for asked in self._asked.values()
        )

    def waits(self) -> list[str]:
        """The wait-for edges of this rank, one line each."""
        lines = [
            f"stage {self.stage} (round {self.round}) waits for {describe(asked)} from stage {owner}"
            + (f", due in turn {when.turn}" if when.turn >= 0 else "")
            for number, (owner, asked, when) in self._asked.items()
            if number not in self._ahead
        ]
        for state in self._requests.values():
            for key, found in state.waiting.items():
                for peer, pull in found:
                    lines.append(
                        f"stage {peer} waits for {pull.location!r} ({key}) from stage {self.stage}, "
                        f"whose worker has not read it yet (round {self.round})"
                    )
        return lines


def describe(message: Pull | Probe) -> str:
    """What a pull or a probe asks for, in words."""
    if isinstance(message, Probe):
        return f"the structure of {message.call}"
    expression = f", {message.expression}" if message.expression else ""
    return f"{message.location!r} ({message.key}{expression})"
