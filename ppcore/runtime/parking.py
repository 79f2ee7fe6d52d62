"""Parking a worker in the middle of a torch call.

A lazy mostly parks its worker from plain Python. Where an operation needs the data at once (under
autocast, where gradients are wanted, where a shape depends on the data), it parks inside of that
operation: torch's C++ frames lie on the worker's stack, and torch keeps pointers into them for the
thread, which the forward uses meanwhile.

- What C++ warns with is an object in such a frame. While the worker is parked the thread has the handler
  that it has outside of all calls. (In a torch whose library does not export it, it stays.)
- A call by way of ``torch.ops`` leaves a frame of pybind11, which ends the process if two of them end in
  another order than the reverse of their beginnings. Nothing moves it away: the call is refused. So is
  what runs inside of ``backward()``, of which a thread has one at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ..errors import BlockError


def _warning_handlers() -> tuple[Callable[[], int | None], Callable[[int], None]] | None:
    """C++'s getter and setter of this thread's warning handler; None in a torch that has them elsewhere."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        get = library._ZN3c1012WarningUtils19get_warning_handlerEv
        put = library._ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE
    except (OSError, AttributeError):
        return None
    get.restype, put.argtypes, put.restype = ctypes.c_void_p, [ctypes.c_void_p], None
    return get, put


_HANDLERS = _warning_handlers()
#: The handler outside of all calls: no frame of torch's lies below an import.
_OUTSIDE = _HANDLERS[0]() if _HANDLERS else None

_OPERATORS = frozenset((OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__))


@contextlib.contextmanager
def parking() -> Iterator[None]:
    """Around the switch from a worker that waits for data.

    Raises:
        BlockError: the worker is inside of what cannot be parked.
    """
    _check(sys._getframe())
    if _HANDLERS is None or _OUTSIDE is None:
        yield
        return
    get, put = _HANDLERS
    inside = get()
    if inside is None or inside == _OUTSIDE:
        yield
        return
    put(_OUTSIDE)
    try:
        yield
    finally:
        put(inside)


def _check(frame: FrameType | None) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise BlockError(
            "backward() came to a value of a later stage, which cannot be waited for inside of it: "
            "read the value before"
        )
    while frame is not None:
        if frame.f_code in _OPERATORS:
            operator = frame.f_locals["self"]
            raise BlockError(
                f"torch.ops.{operator} came to a value of a later stage, which cannot be waited for "
                "inside of it: call the torch function of that name"
            )
        frame = frame.f_back
