"""A lazy inside of what a block may hold open: gradients, modes, transforms; and a park inside a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("nnsight")

from torch.autograd import forward_ad  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from ppcore.errors import BlockError  # noqa: E402
from ppcore.runtime import parking as parking_module  # noqa: E402
from ppcore.runtime.parking import parking  # noqa: E402
from tests.unit.fake import Owner  # noqa: E402
from tests.unit.test_threadstate import Worker, park  # noqa: E402

X = torch.arange(12.0).reshape(4, 3) / 7


class DoublesProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.ops.aten.mul.Tensor else found


class DoublesItems(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.Tensor.__getitem__ else found


def autocast() -> AbstractContextManager:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def leaf(h: Any) -> Any:
    return h.clone().requires_grad_()


def within(make: Callable, derive: Callable) -> Callable:
    def run(h: Any) -> Any:
        with make():
            return derive(h)

    return run


def backward(h: Any) -> Any:
    x = leaf(h)
    (x**2).sum().backward()
    return x.grad


def hooked(h: Any) -> Any:
    found: list[Any] = []
    x = leaf(h)
    x.register_hook(found.append)
    (x * 2).sum().backward()
    return found[0]


def packed(h: Any) -> Any:
    w = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(lambda saved: saved * 3, lambda saved: saved):
        total = (h * w).sum()
    return torch.autograd.grad(total, w)[0]


def set_property(h: Any) -> Any:
    x = h.clone()
    x.requires_grad = True
    return torch.autograd.grad((x * x).sum(), x)[0]


def checkpointed(h: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    w = torch.ones(3, requires_grad=True)
    total = checkpoint(lambda w: (h * w).sum(), w, use_reentrant=False)
    return torch.autograd.grad(total, w)[0]


def dual(h: Any) -> Any:
    with forward_ad.dual_level():
        pair = forward_ad.make_dual(h, torch.ones(4, 3))
        return forward_ad.unpack_dual(pair * pair).tangent


DERIVE: dict[str, Callable] = {
    "gradient of a lazy": backward,
    "gradient of a weight": lambda h: torch.autograd.grad(
        (h @ (w := torch.ones(3, requires_grad=True))).sum(), w
    )[0],
    "requires_grad set": set_property,
    "tensor hook": hooked,
    "saved-tensor hooks": packed,
    "checkpoint": checkpointed,
    "dual level": dual,
    "dispatch mode": within(DoublesProducts, lambda h: h * 3),
    "function mode": within(DoublesItems, lambda h: h[1]),
    "vmap of a lazy": torch.vmap(lambda row: row * 2),
    "vmap over a lazy": lambda h: torch.vmap(lambda row: (row * h).sum())(torch.ones(2, 3)),
    "grad over a lazy": lambda h: torch.func.grad(lambda w: (h * w).sum())(torch.ones(3)),
    "grad that forces": lambda h: torch.func.grad(lambda w: float(h[1, 1]) * w)(torch.ones(())),
    "jvp of a lazy": lambda h: torch.func.jvp(torch.square, (h,), (torch.ones(4, 3),))[1],
    "hessian of a lazy": lambda h: torch.func.hessian(lambda row: (row**3).sum())(h[0]),
}


@pytest.mark.parametrize("derive", DERIVE.values(), ids=DERIVE)
def test_what_a_block_holds_open_decides_where_the_operation_is_written(derive: Callable) -> None:
    with torch.enable_grad():
        found, expected = derive(Owner().read(X)), derive(X.clone())
    assert torch.equal(torch.as_tensor(found.tolist()), expected.detach())
    assert found.requires_grad == expected.requires_grad


CONTEXTS: dict[str, Callable[[], AbstractContextManager]] = {
    "autocast": autocast,
    "dispatch mode": DoublesProducts,
    "function mode": DoublesItems,
    "device": lambda: torch.device("meta"),
    "enable_grad": torch.enable_grad,
}


@pytest.mark.parametrize("make", CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_around_a_force_is_none_of_the_recorded_operations(make: Callable) -> None:
    weight = torch.nn.Parameter(torch.eye(3))
    with torch.no_grad():
        h = Owner().read(X)
        recorded = [(h * 3) @ h.T, h.unbind()[1] * 3, h @ weight]
        expected = [(X * 3) @ X.T, X[1] * 3, X @ weight]
    with make():
        found = [one.tolist() for one in recorded]
    assert found == [one.tolist() for one in expected]
    assert [one.dtype for one in recorded] == [torch.float32] * 3
    assert not any(one.requires_grad for one in recorded)


def test_an_operation_of_data_that_nobody_differentiates_stays_lazy_where_gradients_are_on() -> (
    None
):
    owner = Owner()
    with torch.enable_grad():
        assert (owner.read(X) * torch.ones(3)).sum().shape == ()
    assert owner.fetches == 0


# --- parks inside of torch calls ----------------------------------------------------------------


class Late(Owner):
    """A later stage: its values park who needs them."""

    def fetch(self, wanted: list) -> list:
        with parking():
            park()
        return super().fetch(wanted)


def product() -> Any:
    with autocast():
        return torch.matmul(Late().read(X), X.T)


def test_a_thread_warns_as_outside_of_calls_while_a_worker_is_parked_inside_of_one() -> None:
    worker = Worker(lambda: park(product()))
    assert worker.resume() is None
    assert parking_module._HANDLERS is not None, "this torch exports them"
    assert parking_module._HANDLERS[0]() == parking_module._OUTSIDE
    assert worker.resume().dtype == torch.bfloat16


def test_workers_park_inside_of_calls_whatever_the_forward_does_and_who_goes_on_first() -> None:
    workers = [Worker(lambda: park(product())) for _ in range(2)]
    assert [worker.resume() for worker in workers] == [None, None]
    # Warned of from below an operator: no Python binding has put up a handler of its own.
    torch.ops.aten.add.out(X, X, out=torch.empty(5))
    assert [worker.resume().shape for worker in workers] == [(4, 4), (4, 4)]


def test_a_call_that_cannot_be_parked_is_refused() -> None:
    def operator() -> Any:
        with autocast():
            return torch.ops.aten.add.Tensor(X, Late().read(X))

    with pytest.raises(BlockError, match=r"torch\.ops\.aten\.add\.Tensor came to a value"):
        Worker(operator).resume()


def test_a_park_inside_of_backward_is_refused() -> None:
    def differentiate() -> None:
        with torch.enable_grad():
            w = torch.ones(4, 3, requires_grad=True)
            w.register_hook(lambda gradient: gradient * float(Late().read(X)[0, 0]))
            (w * 2).sum().backward()

    with pytest.raises(BlockError, match=r"backward\(\) came to a value of a later stage"):
        Worker(differentiate).resume()


def test_an_operator_of_a_lazy_stays_lazy() -> None:
    worker = Worker(lambda: park(torch.ops.aten.add.Tensor(X, Late().read(X)).shape))
    assert worker.resume() == X.shape
