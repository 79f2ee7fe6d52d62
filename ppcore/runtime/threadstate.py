"""Keeping a parked worker's torch state apart from the forward's.

A worker is a greenlet on the forward's thread, so everything that torch keeps per thread is shared:
a block that parks inside ``torch.enable_grad()`` would leave gradients on in the forward, and would
find them off after it. What a block can hold open across a park is saved when it parks and put back
when it resumes: grad and inference mode, autocast, torch function and dispatch modes, the default
device, and the ``contextvars`` context (greenlets keep that one by themselves).

Random numbers belong here too. A block draws the same on every stage, whatever other requests do, so a
block that draws at all gets generators of its own (`Draws`), seeded by its request.

Not covered: process-wide settings (default dtype, deterministic algorithms, matmul precision), which
belong to the engine whoever sets them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy
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


def _set_inference(enabled: bool) -> None:
    # torch sets inference mode through an object that puts back, when it goes, what it found. Of two
    # that go in the order they came, the second found what the first had set.
    first = _C._InferenceMode(enabled)
    second = _C._InferenceMode(enabled)
    del first
    del second


def switch(here: State, to: State) -> None:
    """Make ``to`` this thread's state; ``here`` is what it is now."""
    if here.inference != to.inference:
        _set_inference(to.inference)
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


class Draws:
    """The random generators of one worker: torch's CPU generator, ``random`` and numpy's.

    Args:
        seed: what they start from.
    """

    def __init__(self, seed: int) -> None:
        self._mine: Any = None
        self._theirs: Any = None
        self._seed = seed

    @staticmethod
    def _read() -> tuple:
        return torch.get_rng_state(), random.getstate(), numpy.random.get_state()

    @staticmethod
    def _write(state: tuple) -> None:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])

    def enter(self) -> None:
        """The worker is about to run."""
        self._theirs = self._read()
        if self._mine is None:
            torch.default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            numpy.random.seed(self._seed % (1 << 32))
        else:
            self._write(self._mine)

    def leave(self) -> None:
        """The worker parked or ended."""
        self._mine = self._read()
        self._write(self._theirs)


#: Names that show that code may draw random numbers.
_DRAWING = frozenset(
    """rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ multinomial
    normal normal_ uniform_ poisson dropout Dropout manual_seed seed random shuffle choice sample
    default_rng gumbel_softmax random_ exponential_ log_normal_ cauchy_ geometric_""".split()
)


def may_draw(code: CodeType, scope: Mapping[str, Any]) -> bool:
    """Whether a block, or a function that it reaches by name, mentions a random draw."""
    seen: set[CodeType] = set()
    stack = [code]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        names = set(current.co_names) | set(current.co_freevars)
        if names & _DRAWING:
            return True
        stack.extend(const for const in current.co_consts if isinstance(const, CodeType))
        for name in names:
            try:
                value = scope[name]
            except (KeyError, TypeError):
                continue
            if isinstance(value, FunctionType) and not value.__module__.startswith("torch"):
                stack.append(value.__code__)
            elif isinstance(value, torch.nn.Module) and any(
                isinstance(m, torch.nn.modules.dropout._DropoutNd) for m in value.modules()
            ):
                return True
    return False


class Kept:
    """The state of one worker between its turns on the thread.

    Args:
        draws: the worker's random generators, if it may draw.
    """

    __slots__ = ("_inside", "_outside", "draws")

    def __init__(self, draws: Draws | None = None) -> None:
        self.draws = draws
        self._inside: State | None = None
        self._outside: State | None = None

    def enter(self) -> None:
        """The worker is about to run: remember the forward's state, put back the worker's."""
        self._outside = capture()
        if self._inside is not None and self._inside != self._outside:
            switch(self._outside, self._inside)
        if self.draws is not None:
            self.draws.enter()

    def leave(self) -> None:
        """The worker parked or ended: remember its state, put back the forward's."""
        assert self._outside is not None
        if self.draws is not None:
            self.draws.leave()
        self._inside = capture()
        if self._inside != self._outside:
            switch(self._inside, self._outside)
