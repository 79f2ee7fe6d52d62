"""What goes wrong in a run, as tasks of the world: the schedule places each of their moves.

A fault strikes after some moves of its own, so that a strategy which chooses among tasks also chooses
when it strikes, and a replay that names tasks replays it. A block that raises on one rank is no task:
its step is fixed (see `ppsim.blocks.Frame`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cases import Fault

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
                if link.waiting and world.channels[channel]:
                    link.expired = True
                    world.stirred(fault.stage, fault.column)
                    yield None
                    break
            world.let_go(channel)
