"""nnsight's set of saved values, without the ids of values that are gone.

nnsight marks a saved value by its id. When the value dies, its id may be given to another one, and a
name bound to that counts as saved too: on one rank only, by chance, while every rank has to report the
same names. This set forgets an id when its value dies; a value that cannot be watched (a list, a
number) is kept alive instead, for as long as its id is in the set.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from nnsight.tracing.tracer import _local, _saves, inc


class LiveSaves(set):
    """Ids of values that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, Any] = {}

    def add(self, marked: int, /) -> None:
        """``marked`` is the id of a value that is alive at this moment: its marker holds it."""
        super().add(marked)
        value = ctypes.cast(marked, ctypes.py_object).value
        try:
            self._kept[marked] = weakref.ref(value, lambda _: self.discard(marked))
        except TypeError:
            self._kept[marked] = value

    def discard(self, marked: object, /) -> None:
        super().discard(marked)
        self._kept.pop(marked, None)  # type: ignore[call-overload]

    def clear(self) -> None:
        super().clear()
        self._kept.clear()


def watch_saves() -> None:
    """Use such a set on this thread from now on, which runs blocks: it counts as inside a trace."""
    if not getattr(_local, "depth", 0):
        inc()
    if not isinstance(_saves(), LiveSaves):
        _local.saves = LiveSaves()


def forget_all() -> None:
    """No value counts as saved on this thread any more."""
    _saves().clear()
