from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppcore.runtime import expression, ops
from ppcore.runtime.lazy import LazyTensor, force
from tests.unit.fake import Owner

X = torch.arange(12.0).reshape(4, 3) - 5


def text_of(tensor: torch.Tensor) -> str:
    assert isinstance(tensor, LazyTensor)
    shipped = expression.shipped(tensor.node)
    assert shipped is not None
    return shipped[1]


TRAVELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda t: t[-1],
    "slice": lambda t: t[1:3, ::2],
    "ellipsis and none": lambda t: t[..., None, 1],
    "list": lambda t: t[[0, 2]],
    "bool": lambda t: t.sum(0, keepdim=True),
    "dtype": lambda t: t.to(torch.float16),
    "dtype by name": lambda t: t.sum(dtype=torch.float64),
    "arithmetic": lambda t: (t[0] * 2 - 1) / 3,
    "infinity": lambda t: t.clamp(max=float("inf")).masked_fill(t > 1, float("-inf")),
    "nan": lambda t: (t * float("nan"))[0],
    "chain": lambda t: t.float().clone().norm(dim=-1).max(),
    "twice the same": lambda t: t[0] + t[0],
    "one of several": lambda t: t.topk(1, dim=-1).indices,
    "split": lambda t: t.split([1, 2], dim=1)[1],
    "transposed": lambda t: t.T[0],
    "permute by tuple": lambda t: t.permute((1, 0))[:2],
    "softmax": lambda t: torch.nn.functional.softmax(t[-1], dim=-1),
    "cat": lambda t: torch.cat([t[:1], t[2:3]]),
}


@pytest.mark.parametrize("make", TRAVELS.values(), ids=TRAVELS)
def test_an_expression_evaluates_to_what_the_lazy_stands_for(make: Callable) -> None:
    owner = Owner()
    lazy = make(owner.read(X))
    found = expression.evaluate(text_of(lazy), (X,))
    assert found.dtype == lazy.dtype
    torch.testing.assert_close(found, make(X), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", TRAVELS.values(), ids=TRAVELS)
def test_an_expression_is_plain_json(make: Callable) -> None:
    text = text_of(make(Owner().read(X)))
    steps, _ = json.loads(text)
    assert all(name == "select" or ops.function_of(name) for name, _, _ in steps)


STAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a real tensor": lambda t: t + torch.ones(3),
    "a function that may not travel": lambda t: torch.special.erfinv(t),
    "more bytes than its leaf": lambda t: t.double(),
    "a python function": lambda t: torch.einsum("ij->i", t),
}


@pytest.mark.parametrize("make", STAYS.values(), ids=STAYS)
def test_what_cannot_or_should_not_travel_brings_the_leaf(make: Callable) -> None:
    owner = Owner()
    lazy = make(owner.read(X))
    assert expression.shipped(lazy.node) is None
    torch.testing.assert_close(force(lazy), make(X), equal_nan=True)
    assert owner.pulled == [expression.of_leaf((0,))]


def test_a_value_of_two_accesses_brings_both_leaves() -> None:
    owner = Owner()
    total = owner.read(X).sum() + owner.read(X)
    assert expression.shipped(total.node) is None
    assert force(total).shape == X.shape
    assert len(owner.pulled) == 2


def test_a_long_expression_brings_the_leaf() -> None:
    owner = Owner()
    lazy = owner.read(X)
    for _ in range(400):
        lazy = lazy + list(range(100))[0] * 1.000000001 + 1.23456789012345678
        lazy = lazy.clone().clone().clone().clone()
    assert expression.shipped(lazy.node) is None
    assert force(lazy).shape == X.shape


def test_a_leaf_path_reaches_into_the_published_structure() -> None:
    value = ((X, {"k": [None, X + 1]}),)
    assert torch.equal(expression.evaluate(expression.of_leaf((0, 1, "k", 1)), value), X + 1)
    assert expression.evaluate(expression.of_leaf(()), value) is value


# --- what a peer may make this rank do --------------------------------------------------------


def test_only_named_operations_travel() -> None:
    for function in (torch.load, torch.save, torch.compile, eval, torch.Tensor.map_, print):
        assert ops.name_of(function) is None


@pytest.mark.parametrize(
    "name", ["T.map_", "t.load", "eval", "T.__class__", "P.grad_fn", "", "F.x"]
)
def test_another_function_is_refused(name: str) -> None:
    text = json.dumps([[[name, [{"l": [0]}], {}]], {"r": 0}])
    with pytest.raises(ValueError, match="not an operation that a pull may carry"):
        expression.evaluate(text, (X,))


def test_every_operation_that_travels_has_a_name_that_leads_back() -> None:
    for name, function in ops._BY_NAME.items():
        assert ops.function_of(ops.name_of(function) or "") == function, name


def test_no_operation_that_travels_writes() -> None:
    for name, function in ops._BY_NAME.items():
        assert not ops.mutates(function, {}), name


def test_an_expression_over_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        expression.evaluate("[" + " " * expression.LIMIT + "]", (X,))


@pytest.mark.parametrize("text", ["", "[]", "[[]]", "3", "null", "[[], 1, 2]", "[" * 30_000, "\0"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an expression"):
        expression.evaluate(text, (X,))


@pytest.mark.parametrize("part", [{"d": "compile"}, {"d": "no_such"}, {"z": 1}], ids=str)
def test_a_part_that_means_nothing_is_refused(part: dict) -> None:
    with pytest.raises(ValueError):
        expression.evaluate(json.dumps([[], part]), (X,))


@given(st.lists(st.integers(-4, 3), min_size=1, max_size=2), st.integers(-3, 3))
def test_any_index_and_number_travels(index: list[int], number: int) -> None:
    def make(t: torch.Tensor) -> torch.Tensor:
        return t[index] * number + number / 3

    try:
        expected = make(X)
    except IndexError:
        return
    found = expression.evaluate(text_of(make(Owner().read(X))), (X,))
    assert torch.equal(found, expected)


def test_evaluating_keeps_nothing_of_the_value_alive() -> None:
    value = X.clone()
    seen = weakref.ref(value)
    gc.disable()
    try:
        expression.evaluate(text_of(Owner().read(X)[-1]), (value,))
        del value
        assert seen() is None
    finally:
        gc.enable()
