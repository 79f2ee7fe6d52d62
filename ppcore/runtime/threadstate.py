"""Keeping a parked worker's torch state apart from the forward's.

A worker is a greenlet on the forward's thread, so everything that torch keeps per thread is shared:
a block that parks inside ``torch.enable_grad()`` would leave gradients on in the forward, and would
find them off after it. What a block can hold open across a park is saved when it parks and put back
when it resumes: grad and inference mode, autocast, torch function and dispatch modes, hooks of saved
tensors, the transforms of ``torch.func``, the default device, and the ``contextvars`` context (greenlets
keep that one by themselves).

Random numbers belong here too. A block draws the same on every stage, whatever other requests do, so a
block that draws at all gets generators of its own (`Draws`), seeded by its request.

Not covered: process-wide settings (default dtype, deterministic algorithms, matmul precision, anomaly
detection, the levels of forward-mode differentiation), which belong to the engine whoever sets them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy
import torch
from torch.autograd import forward_ad
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _device, _python_dispatch

from ..schedule import made

_C = torch._C
_autograd = _C._autograd
_functorch = _C._functorch


class State(NamedTuple):
    """What torch keeps per thread, as far as a block can hold it open."""

    grad: bool
    inference: bool
    autocast: tuple
    functions: tuple
    dispatches: tuple
    hooks: tuple
    hooks_refused: str | None
    transforms: tuple
    device: tuple


#: Where `torch.set_default_device` keeps what it has entered.
_DEFAULT_DEVICE = torch._GLOBAL_DEVICE_CONTEXT


def capture() -> State:
    """This thread's state now.

    Twice for each turn that a worker has: a stack is looked into only where something is on it.
    """
    functions, dispatches = _len_torch_function_stack(), _C._len_torch_dispatch_stack()
    return made(
        State,
        (
            _C.is_grad_enabled(),
            _C.is_inference_mode_enabled(),
            _autocast(),
            tuple(map(_C._get_function_stack_at, range(functions))) if functions else (),
            tuple(map(_C._get_dispatch_stack_at, range(dispatches))) if dispatches else (),
            _HOOKS.all() if _autograd._top_saved_tensors_default_hooks(True) is not None else (),
            None if _autograd._saved_tensors_hooks_is_enabled() else _hooks_refused(),
            _TRANSFORMS.all() if _functorch.peek_interpreter_stack() is not None else (),
            (_device.CURRENT_DEVICE, _DEFAULT_DEVICE.__dict__.get("device_context")),
        ),
    )


def inferring() -> AbstractContextManager[Any]:
    """Inference mode. A thread that is in it is left alone: to enter costs as much as decoding a value."""
    inside = _C.is_inference_mode_enabled() and not _C.is_grad_enabled()
    return _NOTHING if inside else torch.inference_mode()


_NOTHING = contextlib.nullcontext()


def keep_inferring() -> None:
    """Inference mode for the rest of this thread, which does nothing that wants another."""
    _set_inference(True)


def _autocast() -> tuple:
    enabled, dtype = _C.is_autocast_enabled, _C.get_autocast_dtype
    return (
        (("cpu", enabled("cpu"), dtype("cpu")), ("cuda", enabled("cuda"), dtype("cuda"))),
        _C.is_autocast_cache_enabled(),
    )


class _Stack:
    """A stack that torch keeps for a thread, of which only the top can be seen.

    Args:
        top: what was put on it last; None where it is empty.
        pop: takes that off, and returns it.
        push: puts something on it.
    """

    def __init__(
        self, top: Callable[[], Any], pop: Callable[[], Any], push: Callable[[Any], None]
    ) -> None:
        self._top, self._pop, self._push = top, pop, push

    def take(self) -> tuple:
        """All that is on it, which it loses, the innermost last."""
        taken = []
        while self._top() is not None:
            taken.append(self._pop())
        return tuple(reversed(taken))

    def put(self, entries: tuple) -> None:
        """Put on it what was taken."""
        for entry in entries:
            self._push(entry)

    def all(self) -> tuple:
        """All that is on it, the innermost last."""
        found = self.take()
        self.put(found)
        return found


def _top_hooks() -> tuple | None:
    return _autograd._top_saved_tensors_default_hooks(True)


def _pop_hooks() -> tuple | None:
    top = _top_hooks()
    _autograd._pop_saved_tensors_default_hooks()
    return top


#: The pairs of hooks of saved tensors.
_HOOKS = _Stack(
    _top_hooks, _pop_hooks, lambda pair: _autograd._push_saved_tensors_default_hooks(*pair)
)
#: The layers of `torch.func`.
_TRANSFORMS = _Stack(
    _functorch.peek_interpreter_stack,
    _functorch.pop_dynamic_layer_stack,
    _functorch.push_dynamic_layer_stack,
)


def _hooks_refused() -> str:
    """What torch says to who sets hooks of saved tensors, where it does not let them."""
    return _autograd._saved_tensors_hooks_get_disabled_error_message()


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
    if here.hooks != to.hooks:
        _HOOKS.take()
        _HOOKS.put(to.hooks)
    if here.hooks_refused != to.hooks_refused:
        if to.hooks_refused is None:
            _autograd._saved_tensors_hooks_enable()
        else:
            _autograd._saved_tensors_hooks_disable(to.hooks_refused, False)
    if here.transforms or to.transforms:
        _TRANSFORMS.take()
        _TRANSFORMS.put(to.transforms)
    if here.device != to.device:
        _device.CURRENT_DEVICE, _DEFAULT_DEVICE.device_context = to.device
    if here.autocast != to.autocast:
        for kind, enabled, dtype in to.autocast[0]:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(to.autocast[1])
    if _C.is_grad_enabled() != to.grad:
        _C._set_grad_enabled(to.grad)


#: Nothing that a block may hold open. Inference mode is as it is.
_PLAIN: dict[str, Any] = {
    "grad": False,
    "functions": (),
    "dispatches": (),
    "hooks": (),
    "transforms": (),
    "device": (None, None),
}


def apart() -> AbstractContextManager[None]:
    """The runtime's own tensor operations, untouched by what the block holds open around them.

    A worker may park in here: what it finds when it resumes is again what it left.
    """
    if (
        _len_torch_function_stack()
        or _C._len_torch_dispatch_stack()
        or _functorch.peek_interpreter_stack() is not None
        or _C.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    ):
        return _apart()
    return _NOTHING


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    here = capture()
    kinds = tuple((kind, False, dtype) for kind, _, dtype in here.autocast[0])
    plain = here._replace(autocast=(kinds, here.autocast[1]), **_PLAIN)
    switch(here, plain)
    try:
        yield
    finally:
        switch(plain, here)


def decides() -> bool:
    """Whether what the block holds open decides what an operation does, beyond its arguments."""
    return bool(
        _C._len_torch_dispatch_stack()
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


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
