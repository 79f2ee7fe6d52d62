"""Strategies: who moves next. One algorithm a file, each with its paper and its guarantee.

A strategy sees the world before each event and names the runnable task that moves. `Recorder` notes
what any of them did, as a schedule that [`Replay`][ppsim.strategies.replay.Replay] follows and as the
few [`Switch`][ppsim.strategies.switches.Switch]es by which it differs from the base schedule.
"""

from .delay import DelayBounding
from .pct import PCT
from .pos import POS
from .random_walk import RandomWalk
from .replay import Divergence, Recorder, Replay
from .switches import Switch, Switches

__all__ = [
    "PCT", "POS", "DelayBounding", "Divergence", "RandomWalk", "Recorder", "Replay", "Switch",
    "Switches",
]  # fmt: skip
