"""A greenlet that parks inside a torch context neither changes the outer state nor loses its own."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy
import pytest
import torch
from greenlet import getcurrent, greenlet
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from ppcore.runtime.threadstate import Draws, Kept, apart, inferring, keep_inferring, may_draw


class CountsFunctions(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        type(self).seen += 1
        return func(*args, **(kwargs or {}))


class CountsOperations(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        type(self).seen += 1
        return func(*args, **(kwargs or {}))


def count_functions() -> int:
    before = CountsFunctions.seen
    torch.add(torch.tensor(1), 1)
    return CountsFunctions.seen - before


def count_operations() -> int:
    before = CountsOperations.seen
    torch.add(torch.tensor(1), 1)
    return CountsOperations.seen - before


PACKED: list[torch.Tensor] = []


def pack(tensor: torch.Tensor) -> torch.Tensor:
    PACKED.append(tensor)
    return tensor


def saved_tensors_hooks() -> AbstractContextManager:
    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)


def count_packed() -> int:
    before = len(PACKED)
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones(2, requires_grad=True).exp()
    return len(PACKED) - before


def may_set_hooks() -> bool:
    try:
        with saved_tensors_hooks():
            return True
    except RuntimeError:
        return False


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def bfloat16_product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager], Callable[[], Any]]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "enable_grad": (torch.enable_grad, torch.is_grad_enabled),
    "inference_mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "inference_mode off": (lambda: torch.inference_mode(False), torch.is_inference_mode_enabled),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), bfloat16_product),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), bfloat16_product),
    "function mode": (CountsFunctions, count_functions),
    "dispatch mode": (CountsOperations, count_operations),
    "device": (
        lambda: torch.device("meta"),
        lambda: torch.zeros(1).device.type,
    ),
    "default device": (
        default_device,
        lambda: (_device.CURRENT_DEVICE, torch.get_default_device()),
    ),
    "saved-tensor hooks": (saved_tensors_hooks, count_packed),
    "no saved-tensor hooks": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("refused"),
        may_set_hooks,
    ),
    "set_grad_enabled": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
}
#: What the forward may hold open around the worker.
OUTSIDE: dict[str, Callable[[], AbstractContextManager]] = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "mode": CountsFunctions,
}


class Worker:
    """A block as the mediator drives one: entered and left around every switch."""

    def __init__(self, run: Callable[[], Any], draws: Draws | None = None) -> None:
        self.kept = Kept(draws)
        self.greenlet = greenlet(run)

    def resume(self) -> Any:
        self.greenlet.parent = getcurrent()
        self.kept.enter()
        try:
            return self.greenlet.switch()
        finally:
            self.kept.leave()


def park(value: Any = None) -> None:
    getcurrent().parent.switch(value)


def everything() -> dict[str, Any]:
    return {name: observe() for name, (_, observe) in CONTEXTS.items()}


@pytest.fixture(autouse=True)
def state_as_it_was() -> Iterator[None]:
    before = everything()
    yield
    after = everything()
    torch.set_grad_enabled(True)
    assert after == before


@pytest.mark.parametrize("outside", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize(("make", "observe"), CONTEXTS.values(), ids=CONTEXTS)
def test_a_worker_parked_in_a_context_keeps_it_and_the_forward_never_sees_it(
    make: Callable, observe: Callable, outside: Callable
) -> None:
    def block() -> None:
        with make():
            park(observe())
            park(observe())
        park(observe())

    with outside():
        before = everything()
        with make():
            inside = observe()
        worker = Worker(block)
        found = [worker.resume()]
        assert everything() == before
        found.append(worker.resume())
        assert everything() == before
        left = worker.resume()
        assert everything() == before
        worker.resume()
        assert everything() == before
    assert found == [inside, inside]
    assert left == before[next(name for name, known in CONTEXTS.items() if known[1] is observe)]


@pytest.mark.parametrize(("make", "observe"), CONTEXTS.values(), ids=CONTEXTS)
def test_two_workers_parked_in_contexts_keep_apart(make: Callable, observe: Callable) -> None:
    with make():
        inside = observe()
    outside = observe()

    def within() -> None:
        with make():
            for _ in range(3):
                park(observe())

    def without() -> None:
        for _ in range(3):
            park(observe())

    one, two = Worker(within), Worker(without)
    seen = [(one.resume(), two.resume()) for _ in range(3)]
    assert seen == [(inside, outside)] * 3
    one.resume(), two.resume()
    assert observe() == outside


def norm(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def parking_norm(x: torch.Tensor) -> torch.Tensor:
    park()
    found = norm(x)
    park()
    return found


ROWS = torch.arange(6.0).reshape(3, 2)
TRANSFORMS: dict[str, Callable[[Callable], torch.Tensor]] = {
    "vmap": lambda f: torch.vmap(f)(ROWS),
    "grad": lambda f: torch.func.grad(f)(ROWS),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(f))(ROWS),
    "grad of vmap": lambda f: torch.func.grad(lambda rows: torch.vmap(f)(rows).sum())(ROWS),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_worker_parked_inside_of_a_transform_keeps_it_and_the_forward_never_sees_it(
    transform: Callable,
) -> None:
    def forward() -> None:
        assert everything() == before
        assert torch.rand(2).shape == (2,)  # vmap refuses it
        assert torch.equal(torch.func.grad(norm)(ROWS), 2 * ROWS)

    before = everything()
    workers = [Worker(lambda: park(transform(parking_norm))) for _ in range(2)]
    for worker in workers * 2:
        assert worker.resume() is None
        forward()
    for worker in workers:
        assert torch.equal(worker.resume(), transform(norm))
        forward()


def test_what_the_runtime_does_for_a_block_is_apart_from_what_the_block_holds_open() -> None:
    plain = everything()
    for make, _ in CONTEXTS.values():
        with make():
            before = everything()
            with apart():
                found = everything()
            assert everything() == before
            for name in ("autocast", "function mode", "dispatch mode", "device"):
                assert found[name] == plain[name]


def test_a_worker_may_park_apart() -> None:
    def block() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with apart():
                park(bfloat16_product())
                park(bfloat16_product())
            park(bfloat16_product())

    before = everything()
    worker = Worker(block)
    for expected in (torch.float32, torch.float32, torch.bfloat16):
        assert worker.resume() == expected
        assert everything() == before
    worker.resume()


def test_contexts_nest_over_parks_in_any_order() -> None:
    def observe() -> tuple[bool, str, bool]:
        autocast = torch.is_autocast_enabled("cpu")
        return torch.is_grad_enabled(), torch.zeros(1).device.type, autocast

    def block() -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            park()
            with torch.enable_grad(), torch.device("meta"):
                park()
                park(observe())
            park(observe())

    before = everything()
    worker = Worker(block)
    worker.resume()
    worker.resume()
    assert everything() == before
    inner, outer = worker.resume(), worker.resume()
    worker.resume()
    assert (inner, outer) == ((True, "meta", True), (False, "cpu", True))
    assert everything() == before


def test_the_forward_may_change_its_own_state_between_a_workers_turns() -> None:
    def block() -> None:
        with torch.enable_grad():
            park(torch.is_grad_enabled())
            park(torch.is_grad_enabled())

    worker = Worker(block)
    with torch.no_grad():
        assert worker.resume() is True
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        assert worker.resume() is True
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        worker.resume()
        assert torch.is_inference_mode_enabled()


def test_inference_mode_is_entered_where_it_is_off_and_left_alone_where_it_is_on() -> None:
    with inferring():
        assert torch.is_inference_mode_enabled()
        with inferring():
            assert torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()
        with torch.enable_grad(), inferring():
            assert not torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_thread_stays_in_inference_mode_and_no_other_is_in_it() -> None:
    seen: list[bool] = []

    def run() -> None:
        keep_inferring()
        with inferring():
            seen.append(torch.is_inference_mode_enabled())
        seen.append(torch.is_inference_mode_enabled())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True, True]
    assert not torch.is_inference_mode_enabled()


def test_a_worker_that_raises_inside_a_context_leaves_the_forward_as_it_was() -> None:
    def block() -> None:
        with torch.no_grad(), torch.device("meta"):
            park()
            raise ValueError("from the block")

    before = everything()
    worker = Worker(block)
    worker.resume()
    with pytest.raises(ValueError, match="from the block"):
        worker.resume()
    assert everything() == before


def test_a_context_opened_without_a_with_lasts_for_the_worker_only() -> None:
    def block() -> None:
        torch.set_grad_enabled(False)
        park()
        park(torch.is_grad_enabled())

    worker = Worker(block)
    worker.resume()
    assert torch.is_grad_enabled()
    assert worker.resume() is False
    assert torch.is_grad_enabled()


# --- random draws -----------------------------------------------------------------------------


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), numpy.random.rand()]


def drawing() -> None:
    while True:
        park(draw())


def test_a_workers_draws_do_not_depend_on_what_the_forward_draws() -> None:
    quiet, noisy = Worker(drawing, Draws(7)), Worker(drawing, Draws(7))
    expected = [quiet.resume() for _ in range(3)]
    found = []
    for _ in range(3):
        draw()
        found.append(noisy.resume())
    assert found == expected
    assert expected[0] != expected[1]


def test_the_forwards_draws_do_not_depend_on_what_a_worker_draws() -> None:
    def forward(worker: Worker | None) -> list[list[float]]:
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        found = []
        for _ in range(3):
            if worker is not None:
                worker.resume()
            found.append(draw())
        return found

    assert forward(Worker(drawing, Draws(7))) == forward(None)


def test_workers_of_other_seeds_draw_other_numbers() -> None:
    assert Worker(drawing, Draws(1)).resume() != Worker(drawing, Draws(2)).resume()


def helper() -> Any:
    return torch.randn(2)


def reaching() -> Any:
    return helper()


def nested() -> Any:
    return [torch.bernoulli(x) for x in ()]


def plain() -> Any:
    return torch.zeros(2)


@pytest.mark.parametrize(
    ("function", "draws"), [(helper, True), (reaching, True), (nested, True), (plain, False)]
)
def test_a_block_that_may_draw_is_told_from_one_that_may_not(function: Any, draws: bool) -> None:
    assert may_draw(function.__code__, globals()) is draws


def test_a_module_with_dropout_may_draw() -> None:
    scope = {"layer": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())}
    code = compile("layer(x)", "block", "exec")
    assert may_draw(code, scope)
    assert not may_draw(code, {"layer": torch.nn.Linear(2, 2)})
