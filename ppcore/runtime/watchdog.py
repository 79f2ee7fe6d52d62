"""An end for blocks that never come back.

A block runs on the thread of the model's forward, and has it until it touches the model again. One
that never does (``while True: pass``) would hold up every request of the engine, and vLLM would in the
end give up on the rank. A [`Watchdog`][ppcore.runtime.watchdog.Watchdog] is a thread that looks on: it
raises `BlockTimeout` in a block that has run for too long without touching the model, at the line where
it is.

It raises only where the block's own code runs, or what that calls, and never in the middle of what this
package or nnsight does for it: the protocol's state would be left half changed. What cannot be
interrupted is a single call that never returns to Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import nnsight

from ..errors import BlockTimeout

#: How often the thread looks, at most.
LOOK_S = 0.25
#: And when what a block is ended for was not its own code at the last look.
AGAIN_S = 0.01
#: How long a block has that another rank has ended already.
HURRY_S = 1.0

#: Code that does the block's bidding and is not to be interrupted. Of nnsight's not what binds the names of a
#: block: an endless loop may spend nearly all of its time there.
_SERVICE = (
    os.path.dirname(__file__) + os.sep,
    *(
        os.path.join(os.path.dirname(str(nnsight.__file__)), part) + os.sep
        for part in ("intervention", "modeling")
    ),
)
#: How nnsight names the file of a block.
BLOCK = "<edit-"


class Watchdog:
    """Ends blocks of one thread.

    Args:
        limit_s: how long a block may run without touching the model.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._thread = 0
        self._ends: float | None = None
        self._raised = False
        self._over = threading.Event()
        self._late = type(BlockTimeout.__name__, (BlockTimeout,), {"__init__": _saying(limit_s)})
        threading.Thread(target=self._look, name="ppcore watchdog", daemon=True).start()

    def begin(self, *, hurry: bool = False) -> None:
        """The block goes on, on this thread.

        Args:
            hurry: another rank has ended it.
        """
        with self._lock:
            self._thread = threading.get_ident()
            self._ends = time.monotonic() + (min(HURRY_S, self.limit_s) if hurry else self.limit_s)

    def end(self) -> None:
        """The block has touched the model, or ended."""
        with self._lock:
            self._ends = None
            raised, self._raised = self._raised, False
        if raised:  # it may not have got there
            _raise_in(self._thread, None)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While a block waits for another rank: that has a deadline of its own."""
        with self._lock:
            running, self._ends = self._ends is not None, None
        try:
            yield
        finally:
            if running:
                self.begin()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _look(self) -> None:
        usual = wait = min(LOOK_S, self.limit_s / 4)
        while not self._over.wait(wait):
            with self._lock:
                wait = usual
                if self._ends is None or time.monotonic() < self._ends:
                    continue
                if _in_block(sys._current_frames().get(self._thread)):
                    self._raised = True
                    _raise_in(self._thread, self._late)
                else:
                    wait = AGAIN_S


def _saying(limit_s: float) -> object:
    def __init__(self: BlockTimeout) -> None:
        super(BlockTimeout, self).__init__(
            f"the block ran for more than {limit_s:g} s without touching the model"
        )

    return __init__


def _in_block(frame: FrameType | None) -> bool:
    """Whether a thread runs a block's own code, or what that calls."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(BLOCK):
            return True
        if file.startswith(_SERVICE):
            return False
        frame = frame.f_back
    return False


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raise in another thread, at its next line; or take that back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
