"""Engines that take turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

#: For a second after a step the ranks of a vLLM engine look for the next one without a pause, on cores
#: that another engine may need: two engines take turns this far apart.
TURN_S = 1.2


def turns(engines: Iterable[T], repetitions: int, *, warm_up: int) -> Iterator[tuple[T, bool]]:
    """Whose turn it is, and whether that counts: each one's once a repetition, and in every other one
    the last is first. ``warm_up`` repetitions before them do not count."""
    order = list(engines)
    for repetition in range(warm_up + repetitions):
        for engine in order if repetition % 2 else order[::-1]:
            time.sleep(TURN_S)
            yield engine, repetition >= warm_up
