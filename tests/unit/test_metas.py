"""The shapes of results that are remembered are those that torch finds anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ppcore.runtime import metas

T = torch.Tensor


@pytest.fixture(autouse=True)
def none_remembered() -> Iterator[None]:
    metas._results.clear()
    yield
    metas._results.clear()


def made(shape: tuple[int, ...] = (4, 6), dtype: Any = torch.float32) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def key(function: Any, *args: Any, **kwargs: Any) -> Any:
    return metas.key(function, args, kwargs, lambda tensor: tensor)


def layout(tensor: Any) -> tuple:
    size = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, size


REMEMBERED: list[tuple[Callable, tuple, dict]] = [
    (T.sum, (made(),), {}),
    (T.sum, (made(), 0), {"keepdim": True}),
    (T.norm, (made(),), {}),
    (T.add, (made(), made((6,))), {}),
    (T.div, (made(dtype=torch.int64), 2), {}),
    (T.matmul, (made(), made((6, 3))), {}),
    (T.clone, (made().T,), {}),
    (torch.stack, ([made(), made()],), {"dim": 1}),
    (T.to, (made(), torch.float16), {}),
    (T.__getitem__, (made(), torch.empty(3, dtype=torch.int64, device="meta")), {}),
    (torch.softmax, (made(),), {"dim": -1}),
]
AGAIN: list[tuple[Callable, tuple, dict]] = [
    (T.view, (made(), 24), {}),
    (T.__getitem__, (made(), (slice(1, 3), ..., None)), {}),
    (T.float, (made(),), {}),
    (T.contiguous, (made(),), {}),
    (T.expand, (made((1, 6)), 4, 6), {}),
    (T.max, (made(), 0), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), REMEMBERED)
def test_what_is_recalled_is_what_torch_makes(function: Any, args: tuple, kwargs: dict) -> None:
    call = key(function, *args, **kwargs)
    assert metas.recall(call) is None
    inputs = [a for a in args if isinstance(a, T)]
    result = function(*args, **kwargs)
    metas.remember(call, result, inputs)
    recalled = [metas.recall(call), metas.recall(call)]
    assert [layout(one) for one in recalled] == [layout(result)] * 2
    cells = {one.untyped_storage()._cdata for one in [*recalled, result]}
    assert len(cells) == 3


@pytest.mark.parametrize(("function", "args", "kwargs"), AGAIN)
def test_what_may_be_a_view_or_several_is_found_each_time(
    function: Any, args: tuple, kwargs: dict
) -> None:
    call = key(function, *args, **kwargs)
    assert call is not None
    metas.remember(call, function(*args, **kwargs), [args[0]])
    assert metas.recall(call) is None


def test_whatever_decides_of_the_result_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made()
    keys = [
        key(T.add, x, 1),
        key(T.add, x, 1.0),
        key(T.add, x, True),
        key(T.sub, x, 1),
        key(T.add, x.T, 1),
        key(T.add, made((6, 4)), 1),
        key(T.add, made(dtype=torch.float16), 1),
        key(T.add, made((5, 6))[1:], 1),
        key(T.add, x, 1, alpha=2),
        key(T.add, (x,), 1),
        key(T.add, [x], 1),
    ]
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    keys.append(key(T.add, x, 1))
    assert len(set(keys)) == len(keys)


def test_what_cannot_be_told_apart_has_no_key() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    x = made()
    assert key(T.resolve_conj, made(dtype=torch.complex64)) is None
    assert key(T.add, x, object()) is None
    assert key(T.add, x, {"a": 1}) is None
    with Mode():
        assert key(T.add, x, 1) is None
    assert key(T.add, x, 1) is not None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metas, "_MOST", 3)
    for n in range(10):
        metas.remember(key(T.add, made(), n), made(), [])
        assert len(metas._results) <= 3
    assert metas.recall(key(T.add, made(), 9)) is not None
