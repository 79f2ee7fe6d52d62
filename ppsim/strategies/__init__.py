"""Strategies: who moves next. One algorithm a file, each with its paper and its guarantee."""

from .delay import DelayBounding
from .pct import PCT
from .random_walk import RandomWalk
from .replay import Replay

__all__ = ["PCT", "DelayBounding", "RandomWalk", "Replay"]
