"""Keeping a parked worker's torch state apart from the forward's.

A worker is a greenlet on the forward's thread, so everything that torch keeps per thread is shared:
a block that parks inside ``torch.enable_grad()`` would leave gradients on in the forward, and would
find them off after it. What a block can hold open across a park is saved when it parks and put back
when it resumes: grad and inference mode, autocast, torch function and dispatch modes, the default
device, and the ``contextvars`` context (greenlets keep that one by themselves).

Not covered: process-wide settings (default dtype, deterministic algorithms, matmul precision), which
belong to the engine whoever sets them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _device, _python_dispatch

_C = torch._C


class State(NamedTuple):
    """What torch keeps per thread, as far as a block can hold it open."""

    grad: bool
    inference: bool
    autocast: tuple
    functions: tuple
    dispatches: tuple
    device: Any


#: Device types whose autocast state is kept apart.
_AUTOCAST = ("cpu", "cuda")


def capture() -> State:
    """This thread's state now."""
    return State(
        _C.is_grad_enabled(),
        _C.is_inference_mode_enabled(),
        _autocast(),
        _function_modes(),
        _dispatch_modes(),
        _device.CURRENT_DEVICE,
    )


def _autocast() -> tuple:
    return (
        tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST
        ),
        torch.is_autocast_cache_enabled(),
    )


def _function_modes() -> tuple:
    count = _len_torch_function_stack()
    return tuple(_C._get_function_stack_at(i) for i in range(count)) if count else ()


def _dispatch_modes() -> tuple:
    count = _C._len_torch_dispatch_stack()
    return tuple(_C._get_dispatch_stack_at(i) for i in range(count)) if count else ()


def switch(here: State, to: State, guards: list) -> None:
    """Make ``to`` this thread's state; ``here`` is what it is now.

    ``guards`` keeps what must live for as long as the state does: torch sets inference mode through
    an object that puts the old mode back when it goes.
    """
    if here.inference != to.inference:
        guards.append(_C._InferenceMode(to.inference))
    if here.functions != to.functions:
        for _ in range(len(here.functions)):
            _pop_mode()
        for mode in to.functions:
            _push_mode(mode)
    if here.dispatches != to.dispatches:
        for _ in range(len(here.dispatches)):
            _python_dispatch._pop_mode()
        for mode in to.dispatches:
            _python_dispatch._push_mode(mode)
    if here.device is not to.device:
        _device.CURRENT_DEVICE = to.device
    if here.autocast != to.autocast:
        for kind, enabled, dtype in to.autocast[0]:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(to.autocast[1])
    if _C.is_grad_enabled() != to.grad:
        _C._set_grad_enabled(to.grad)


class Kept:
    """The state of one worker between its turns on the thread."""

    __slots__ = ("_guards", "_inside", "_outside")

    def __init__(self) -> None:
        self._inside: State | None = None
        self._outside: State | None = None
        self._guards: list = []

    def enter(self) -> None:
        """The worker is about to run: remember the forward's state, put back the worker's."""
        self._outside = capture()
        if self._inside is not None and self._inside != self._outside:
            guards: list = []
            switch(self._outside, self._inside, guards)
            self._guards = guards

    def leave(self) -> None:
        """The worker parked or ended: remember its state, put back the forward's."""
        assert self._outside is not None
        self._inside = capture()
        if self._inside != self._outside:
            guards: list = []
            switch(self._inside, self._outside, guards)
            self._guards, old = guards, self._guards
            del old
            # A guard of an earlier switch may have put its own old mode back as it went.
            now = capture()
            if now != self._outside:
                switch(now, self._outside, self._guards)
