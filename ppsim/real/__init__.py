"""The second mode: the same cases and schedules, over the real runtime.

`ppsim.fuzz` and `ppsim.shrink` run cases through one function; in this mode it is
[`run`][ppsim.real.run]. A case's programs become nnsight blocks (`translate`), which run on the ranks of
a column in this process (`stage`, `world`) with a model whose arithmetic is exact (`exact`), and what
comes home is compared with plain nnsight on one rank (`execute`, `outcome`). It needs torch and nnsight.
"""

from __future__ import annotations

from typing import Any

from ppsim import world as core
from ppsim.cases import Case
from ppsim.strategies import Switches
from ppsim.world import Strategy, World

from . import execute, translate


def run(case: Case, how: Strategy, *, record: bool = False) -> World:
    """Run a case on the real runtime and compare it with one rank.

    Returns:
        The world that it ran in: one of `ppsim.real.world`, which tells and draws itself as the core's
        does. A case that cannot be run here, since a loop of it may turn for ever or it is known to differ,
        has a run of the core in its place, without a failure.
    """
    if translate.known_to_differ(case) or not translate.ends(case):
        done = core.run(case, Switches())
        done.failure = None
        return done
    world: Any = execute.execute(case, how, record=record)
    found: World = world
    return found


def source(case: Case) -> str:
    """The case as an nnsight program, to be read."""
    return translate.source(execute.plain(case))
