"""What goes wrong in a run, as tasks of the world: the schedule places each of their moves; and drawing it.

A fault strikes after some moves of its own, so that a strategy which chooses among tasks also chooses
when it strikes, and a replay that names tasks replays it. A block that raises on one rank is no task:
its step is fixed (see `ppsim.blocks.Frame`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .cases import Case, Fault, Request, visits
from .programs import Append, Cache, Call, Put, Raise, Read, Save, Stop, walk

if TYPE_CHECKING:
    from .seated import Steps
    from .world import World

#: How many moves a message is held back for a wait that might outlast its deadline.
PATIENCE = 200


def task(fault: Fault) -> str:
    """The name of the fault's task."""
    where = f"{fault.stage}.{fault.column}"
    match fault.kind:
        case "abort":
            return f"abort{fault.request}"
        case "die":
            return f"die{where}"
    return f"{fault.kind}{where}<{fault.peer}"


def strike(world: World, fault: Fault) -> Steps:
    """The fault's moves."""
    for _ in range(fault.at):
        yield None
    channel = fault.peer, fault.stage, fault.column
    match fault.kind:
        case "abort":
            world.engine.abort(fault.request)
        case "die":
            world.kill((fault.stage, fault.column))
        case "stall":
            world.hold(channel)
            for _ in range(fault.moves):
                yield None
            world.let_go(channel)
        case "late":
            world.hold(channel)
            link = world.rank(fault.stage, fault.column).link
            for _ in range(PATIENCE):
                yield None
                if link.waiting:
                    link.expired = True
                    world.stirred(fault.stage, fault.column)
                    yield None
                    break
            world.let_go(channel)


#: Statements that leave something.
_KEEPING = (Save, Append, Put, Cache, Stop, Raise)


def drawn(draw: random.Random, made: Case, kinds: set[str], by: float) -> Iterator[Fault]:
    """Faults of these kinds; ``by`` is how much of a long run's moves there are until they strike."""

    def moves(most: int) -> int:
        return 1 + int(draw.random() ** (2 if by < 1 else 1) * most * by)

    stage, column = draw.randrange(made.stages), draw.randrange(made.columns)
    request, step = draw.choice(made.requests), None
    block = [*walk(request.blocks[-1][1])] if request.blocks else []
    reads = [(at, s.location) for at, s in enumerate(block) if isinstance(s, Read)]
    calls = [at for at, s in enumerate(block) if isinstance(s, Call)]
    lot = draw.random()
    if calls and "raise" in kinds and made.stages > 2 and lot < 0.6:
        # Before a call that a stage between the others may have to give: it is made on some, then.
        step, stage = draw.randrange(calls[0] + 1), draw.randrange(1, made.stages - 1)
    elif reads and lot < 0.7:
        # Otherwise, mostly where the block has something to do, or is about to.
        step, location = reads[-1] if kinds == {"die"} else draw.choice(reads)
        stage = next((n for n, found in enumerate(visits(made)) if location in found), stage)
    peer = draw.choice([other for other in range(made.stages) if other != stage])
    if kinds == {"raise"} and draw.random() < 0.25:
        kinds = {"raise", "abort"}
    if "raise" in kinds and request.blocks:
        if step is None:
            step = int(draw.random() ** 2 * (len(block) + 1))
        columns = range(made.columns) if draw.random() < 0.5 else (column,)
        for where in columns:
            yield Fault("raise", stage, where, step, request.name)
        if len(kinds) == 1 and draw.random() < 0.8:
            # Some of the others hear of it late.
            for far in range(made.stages):
                if far != stage and draw.random() < 0.5:
                    lasts = draw.randrange(5, 60)
                    yield Fault("stall", far, column, draw.randrange(3), "", stage, lasts)
    if "abort" in kinds:
        # What a registered block leaves is kept for a collect, which an aborted trace brings too, but
        # not a request without a trace.
        quiet = not kinds & {"raise", "late"}
        for other in made.requests:
            if draw.random() < 0.6 and (other.traced or (quiet and not _keeps(other))):
                yield Fault("abort", at=moves(80), request=other.name)
    if "stall" in kinds:
        yield Fault("stall", stage, column, moves(40), "", peer, moves(120))
    elif "late" in kinds and made.columns == 1:
        # Mostly a later stage waits for an earlier one.
        if draw.random() < 0.7:
            peer, stage = sorted((peer, stage))
        yield Fault("late", stage, column, moves(20), "", peer)
    if "die" in kinds and (len(kinds) == 1 or draw.random() < 0.4):
        yield Fault("die", stage, column, 1 + int(draw.random() * 60 * by))


def _keeps(request: Request) -> bool:
    """Whether the request's blocks may leave something, saves or an error."""
    return any(isinstance(s, _KEEPING) for _, block in request.blocks for s in walk(block))
