"""A worker on one simulated rank: `ppcore.runtime.mediator.PPMediator` over a generator.

The block's generator takes the place of nnsight's greenlet. What becomes of everything that it asks
for is decided by the real `ppcore.seat.Seat` and `ppcore.core.Core`; the order of the calls is the
runtime's.

No handler of an error yields: compiled (see `ppsim.compiled`), a thread that stopped inside of one does
not go on rightly.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Final

from ppcore.core import ALWAYS, ANSWER, LOCAL, STATIC, Available, Calling, Verdict
from ppcore.errors import PPError
from ppcore.messages import Key, Worker
from ppcore.schedule import REPLICATED, Place, made
from ppcore.seat import STAY, WAIT, Seat

from .blocks import (
    NONE,
    Access,
    BlockRaised,
    BlockStopped,
    Force,
    Frame,
    OutOfOrder,
    Parameter,
    Use,
)
from .programs import Block
from .terms import CALL, term
from .values import Base, Box, Node, Visit, parameter

if TYPE_CHECKING:
    from .link import Link, Wait

#: The errors that end a worker, and not the simulation.
ENDINGS: Final = (BlockRaised, BlockStopped, OutOfOrder, PPError)

Steps = Generator["Wait", None, None]


class Seated(Frame):
    """One block of one request on one rank.

    Attributes:
        pending: the access that this rank's forward can serve, if the worker is parked on one.
        held: the access that it is parked on otherwise.
        alive: whether the block has statements left to run.
        exception: what ended it.
        told: whether another rank ended it.
        how: how it ended, for comparison with the reference.
    """

    def __init__(
        self, link: Link, worker: Worker, block: Block, containers: Mapping[str, int] = NONE
    ) -> None:
        super().__init__(block, containers)
        self.link = link
        self.worker = worker
        self.seat = Seat(link.core, worker)
        self.pending: Access | None = None
        self.held: Access | None = None
        self.started = False
        self.alive = False
        self.exception: Exception | None = None
        self.told = False
        self.how = ""
        self._running = self.run()
        self._unfinished: Force | Use | None = None
        self._plan: list[tuple[Node, Base, str]] = []
        self._numbers: list[int] = []
        # The call that is made, and what it is answered with.
        self._call: Calling | None = None
        self._called: Box | None = None
        # What it has seen of the visits at one place, which other stages make.
        self._place: Place | None = None
        self._seen: dict[str, Box] = {}
        # One tensor to the block however often it reads a parameter, and one pull.
        self._parameters: dict[str, Box] = {}

    def relaxed(self, location: str) -> int:
        core = self.link.core
        return core.wanted(self.worker, location) if core.knows(location) else 0

    # --- running the block --------------------------------------------------------------------

    def start(self) -> Steps:
        """Run the block up to its first park."""
        yield None
        self.started = self.alive = True
        self.link.core.start(self.worker)
        failure: Exception | None = None
        try:
            yield from self._go(None)
        except ENDINGS as error:
            failure = error.with_traceback(None)  # its frames hold boxes
        if failure is not None:
            yield from self._failed(failure)

    def _go(self, value: Box | None) -> Steps:
        """Run on with ``value``, until the worker has to park or has ended."""
        seat = self.seat
        failure: Exception | None = None
        try:
            while True:
                if self._unfinished is None:
                    want = self._running.send(value)
                    if isinstance(want, Access):
                        yield None
                        passed = self._passed(want)
                        verdict = seat.ask(want.location, want.occurrence, passed=passed)
                        if verdict is not ANSWER:
                            yield from self._park(verdict, want)
                            return
                        value = self._answer(want)
                        continue
                    if isinstance(want, Parameter):
                        value = self._parameter(want.location)
                        continue
                    yield from self._begin(want)
                if not (yield from self._complete()):
                    seat.need(self._numbers)
                    return
                value = self._result()
        except StopIteration:
            self.alive = False
            self.how = self.how or "done"
        except ENDINGS as error:
            self.alive = False
            self._unfinished = None
            self._plan = []
            failure = error.with_traceback(None)  # its frames hold boxes
        if failure is None or isinstance(failure, BlockStopped):
            yield from self.link.finish(self.worker)
        # Otherwise telling the others finishes it: they must hear "failed" before "never".
        if failure is not None:
            raise failure

    def _failed(self, error: Exception) -> Steps:
        """The worker raised: it tells the other ranks and ends here."""
        cause = self.link.abandoned.get(self.worker)
        if isinstance(error, PPError) and cause is not None:
            # What it waited for will not come because it raised elsewhere: that is the error.
            yield from self.abandon(cause.error)
            return
        if not isinstance(error, BlockStopped) and not self.told:
            yield from self.link.failed(self.worker, ending(error))
        self.end(error)

    def end(self, error: Exception) -> None:
        """The block ended with ``error``."""
        # The traceback would keep boxes alive.
        self.exception = error.with_traceback(None)
        self.how = ending(error)
        self.pending = self.held = self._unfinished = self._call = self._called = None
        self._plan = []
        self.alive = False
        self._running.close()

    def _begin(self, want: Force | Use) -> Steps:
        """Ask for what a force, or a call, needs here."""
        nodes: list[Node]
        if isinstance(want, Force):
            nodes = want.nodes
        else:
            nodes = yield from self._name(want)
        self._unfinished = want
        self._plan = plan(nodes)
        self._numbers = []
        if self._plan:
            wanted = [(base, text) for _, base, text in self._plan]
            self._numbers = yield from self.link.request(wanted)

    def _name(self, want: Use) -> Generator[Wait, None, list[Node]]:
        """Name a call; what this rank needs for its part of it."""
        core, path = self.link.core, want.path
        yield None
        after = [node.base.available for node in want.node.unsettled() if node.base is not None]
        # What columns gather inside a module is gathered on the forward's threads.
        collective = self.link.world.case.columns > 1
        call = core.call(self.worker, path, core.home(path), collective, after)
        key, caller, home, when = self._call = call
        if core.stage == home != caller:
            receipt = Node(None, self.link.base(key, path, caller, when))
            return [receipt]
        if core.stage != home:
            self._called = Box(Node(None, self.link.base(key, path, home, when)))
        return [want.node] if core.stage == caller and _there(want.node, home) is None else []

    def _parameter(self, location: str) -> Box:
        """A parameter of a module: its value where the module is real, elsewhere a lazy."""
        core = self.link.core
        home = core.home(location.rpartition(".")[0])
        if core.stage in home:
            return Box(Node(parameter(location)))
        if location not in self._parameters:
            key = Key(self.worker, STATIC)
            base = self.link.base(key, location, min(home), ALWAYS)
            self._parameters[location] = Box(Node(None, base))
        return self._parameters[location]

    def _complete(self) -> Generator[Wait, None, bool]:
        """Wait for what was asked for, if that is allowed here; whether it is all here now."""
        numbers, link = self._numbers, self.link
        if not link.may_wait(numbers):
            return False
        if not link.ready(numbers):
            yield from link.wait(numbers)
        for (node, _, _), value in zip(self._plan, link.values(numbers), strict=True):
            node.settle(value)
        self._plan = []
        want = self._unfinished
        if isinstance(want, Use) and self._call is not None:
            call, self._call = self._call, None
            yield from self._make(want, call)
        return True

    def _make(self, want: Use, call: Calling) -> Steps:
        """This rank's part of a call: compute it, give its arguments away, take its result."""
        key, caller, home, _ = call
        link, path = self.link, want.path
        if link.stage == caller == home:
            result = term(CALL, len(path), want.node.evaluate())
            yield from link.publish(key, path, result)
            self._called = Box(Node(result))
        elif link.stage == caller:
            there = _there(want.node, home)
            if there is None:
                yield from link.give(key, path, home, want.node.evaluate(), None, "")
            else:
                yield from link.give(key, path, home, None, *there)
        elif link.stage == home:
            self._called = Box(Node(link.results.pop(key)))

    def _result(self) -> Box | None:
        want, self._unfinished = self._unfinished, None
        if isinstance(want, Use):
            box, self._called = self._called, None
            assert box is not None
            return box
        return None

    # --- what becomes of what it asks for -----------------------------------------------------

    def _park(self, verdict: Verdict, access: Access) -> Steps:
        """Leave the worker parked on an access."""
        if verdict is LOCAL:
            if access.node is not None and access.node.value is None:
                wanted = [(base, text) for _, base, text in plan([access.node])]
                if wanted:
                    yield from self.link.request(wanted)
            self.pending = access
        else:
            self.held = access

    def _passed(self, access: Access) -> bool:
        """Whether this rank's forward is already beyond the visit that an access asks for."""
        if access.location not in self.link.locations:
            return False
        return self._at(access.location) > access.occurrence

    def _at(self, location: str) -> int:
        """Which occurrence the visit that this rank's forward is at, or comes to next, is."""
        link = self.link
        found = link.core.occurrence(self.worker.request, location, link.visited.get(location, 0))
        assert found is not None
        return found

    def _answer(self, access: Access) -> Box | None:
        """What the worker is sent for an access that another stage serves."""
        decision = self.seat.decision
        assert decision is not None
        location = access.location
        self.hit()
        if decision.place != self._place:
            self._place = decision.place
            self._seen.clear()
        if access.node is not None:
            self._seen[location] = Box(access.node)
            return None
        box = self._seen.get(location)
        if box is not None:
            self.link.forget(decision.owner, decision.key, [])
        else:
            when = made(Available, (decision.place.turn, decision.owner))
            base = self.link.base(decision.key, location, decision.owner, when)
            box = self._seen[location] = Box(Node(None, base))
        return box

    # --- the model's side ---------------------------------------------------------------------

    def ready(self, location: str) -> bool:
        """Whether the worker is parked on the visit that this rank's forward is at."""
        pending = self.pending
        return (
            pending is not None
            and pending.location == location
            and (location == "result" or pending.occurrence == self._at(location))
        )

    def handle(self, location: str, visit: Visit) -> Steps:
        """The forward is at a visit that the worker is parked on: serve it."""
        link = self.link
        failure: Exception | None = None
        try:
            while self.ready(location):
                access = self.pending
                decision = self.seat.decision
                assert access is not None and decision is not None
                self.hit()
                known = link.core.knows(location)
                if known or location in REPLICATED:
                    yield None
                    link.core.served(self.worker, decision.place)
                    self._seen.clear()
                if access.node is None:
                    value = visit.value
                    if visit.box is None:
                        visit.box = Box(Node(value), visit)
                    box = visit.box
                    if known:
                        yield from link.publish(decision.key, location, value)
                else:
                    box = None
                    wanted = plan([access.node])
                    if wanted:
                        values = yield from link.fetch([(base, text) for _, base, text in wanted])
                        for (node, _, _), landed in zip(wanted, values, strict=True):
                            node.settle(landed)
                    visit.value = access.node.evaluate()
                    visit.box = None
                self.pending = None
                del access
                yield from self._go(box)
        except ENDINGS as error:
            failure = error.with_traceback(None)  # its frames hold boxes
        if failure is not None:
            yield from self._failed(failure)
        visit.box = None

    # --- turns and ends -----------------------------------------------------------------------

    def advance(self) -> Steps:
        """A turn of the request has opened here, or the request has ended."""
        seat = self.seat
        failure: Exception | None = None
        try:
            while True:
                yield None
                move = seat.go_on()
                if move is STAY:
                    return
                if move is WAIT:
                    yield from self.link.wait(list(seat.pulls))
                    seat.take()
                    yield from self._go(None)
                else:
                    access, self.held = self.held, None
                    assert access is not None
                    passed = self._passed(access)
                    yield None
                    verdict = seat.retry(passed=passed)
                    if verdict is ANSWER:
                        yield from self._go(self._answer(access))
                    else:
                        yield from self._park(verdict, access)
                    del access
        except ENDINGS as error:
            failure = error.with_traceback(None)  # its frames hold boxes
        if failure is not None:
            yield from self._failed(failure)

    def abandon(self, error: str) -> Steps:
        """Another rank ended this worker."""
        self.told = True
        self.end(BlockRaised(error))
        self.seat.take()
        yield from self.link.finish(self.worker)

    def clear(self) -> None:
        """Let go of everything that the block held."""
        self.names.clear()
        self.saves.clear()
        self.recordings.clear()
        self._seen.clear()
        self._parameters.clear()

    def unwind(self) -> None:
        """The request is over: a worker that still waits ends as nnsight ends it."""
        if not self.alive or self.exception is not None:
            return
        if self.pending is None and self.held is None:
            self.how = "stuck"  # in a force: the end of the request completes every one of those
        elif self.iteration == 0:
            self.end(OutOfOrder("order"))
        else:
            self.how = "cut"
        self.pending = self.held = None
        self.alive = False
        self._running.close()


def _there(node: Node, home: int) -> tuple[Base, str] | None:
    """A call's result that this rank has given to ``home``, and what ``node`` is made of it."""
    shipped = node.shipped()
    base = shipped[0].base if shipped is not None else None
    if base is None or base.owner != home or base.available != ALWAYS or base.key.access == STATIC:
        return None
    return base, shipped[1]  # type: ignore[index]


def ending(error: Exception) -> str:
    """How a block that ended with ``error`` ended, in a word."""
    match error:
        case BlockStopped():
            return "stop"
        case OutOfOrder():
            return "order"
        case BlockRaised():
            return str(error) if ":" in str(error) else f"raise:{error}"
    return f"{type(error).__name__}: {error}"


def plan(nodes: list[Node]) -> list[tuple[Node, Base, str]]:
    """What to pull for these nodes: (the node that the answer settles, the base, the expression)."""
    found: list[tuple[Node, Base, str]] = []
    for node in nodes:
        if node.value is not None:
            continue
        shipped = node.shipped()
        if shipped is not None:
            assert shipped[0].base is not None
            found.append((node, shipped[0].base, shipped[1]))
        else:
            for leaf in node.unsettled():
                assert leaf.base is not None
                found.append((leaf, leaf.base, ""))
    return found
