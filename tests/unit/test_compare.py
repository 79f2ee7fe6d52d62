"""What counts as the same result of a trace on two engines."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ppcore.vllm.compare import compare, plain  # noqa: E402


def differences(one: Any, other: Any, *, exact: bool = True) -> list[str]:
    return compare(one, other, exact=exact).differences


@pytest.mark.parametrize(
    "value",
    [
        1,
        "text",
        None,
        math.nan,
        [1, [2.5, "x"]],
        {"a": {"b": [True]}},
        torch.arange(4),
        torch.tensor([math.nan, math.inf, -0.0]),
    ],
    ids=repr,
)
def test_a_value_is_the_same_as_itself(value: Any) -> None:
    found = compare(plain(value), plain(value))
    assert found.same and found.largest_difference == 0.0


@pytest.mark.parametrize(
    "one, other, said",
    [
        (1, 2, "result: 1 against 2"),
        (1, 1.0, "result: 1 against 1.0"),
        (1, True, "result: 1 against True"),
        ("a", None, "result: 'a' against None"),
        ([1], [1, 2], "result: 1 items against 2"),
        ({"a": 1}, {"b": 1}, "result: keys ['a'] against ['b']"),
        ({"a": [0, {"b": 1}]}, {"a": [0, {"b": 3}]}, "a[1].b: 1 against 3"),
    ],
)
def test_a_difference_is_named_with_its_place(one: Any, other: Any, said: str) -> None:
    assert differences(one, other) == [said]


def test_the_order_of_keys_counts() -> None:
    assert differences({"a": 1, "b": 2}, {"b": 2, "a": 1}) != []


def test_tensors_differ_by_shape_and_dtype() -> None:
    said = ["result: torch.float32 [2] against torch.float32 [3]"]
    assert differences(torch.zeros(2), torch.zeros(3)) == said
    assert differences(torch.zeros(2), torch.zeros(2).double(), exact=False) != []


def test_one_bit_is_a_difference_and_within_tolerance() -> None:
    one = torch.ones(3)
    other = one.clone()
    other[1] = torch.nextafter(one[1], torch.tensor(2.0))
    exact, tolerant = compare(one, other), compare(one, other, exact=False)
    assert len(exact.differences) == 1 and "1 of 3 values differ" in exact.differences[0]
    assert tolerant.same
    assert exact.largest_difference == tolerant.largest_difference > 0


def test_tolerance_never_covers_integers_and_text() -> None:
    assert differences(torch.tensor([1, 2]), torch.tensor([1, 3]), exact=False) != []
    assert differences(["a"], ["b"], exact=False) != []


def test_a_nan_against_a_number_is_a_difference() -> None:
    found = compare(torch.tensor([math.nan]), torch.tensor([1.0]), exact=False)
    assert not found.same and found.largest_difference == math.inf
    assert differences(math.nan, 1.0, exact=False) != []


def test_plain_makes_lists_of_tuples_and_copies_tensors() -> None:
    tensor = torch.zeros(2)
    made = plain({"pair": (tensor, 1), "other": range(2)})
    tensor += 1
    assert made["pair"][0].tolist() == [0.0, 0.0]
    assert made["other"] == "range(0, 2)"
