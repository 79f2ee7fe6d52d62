"""Edits, seen through every alias of the memory; and random programs against real tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppcore.runtime.lazy import LazyTensor, force, is_lazy
from tests.unit.fake import Owner, again

X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) - 5


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def x(owner: Owner) -> LazyTensor:
    return owner.read(X)


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "setitem scalar": lambda t: operator.setitem(t, 0, 7.0),
    "setitem tensor": lambda t: operator.setitem(t, slice(1, 3), torch.ones(2, 3).double()),
    "setitem lazy": lambda t: operator.setitem(t, 0, t[1] * 2),
    "setitem mask": lambda t: operator.setitem(t, t > 0, 0.0),
    "setitem index tensor": lambda t: operator.setitem(t, torch.tensor([0, 2]), -1.0),
    "all of it": lambda t: operator.setitem(t, slice(None), 0.0),
    "view of a view": lambda t: t[1:][0].mul_(3),
    "transposed": lambda t: t.T.__setitem__(0, 9.0),
    "data": lambda t: t.data.zero_(),
    "detached": lambda t: t.detach().fill_(2),
    "copy_": lambda t: t.copy_(t.flip(0)),
    "copy_ of a real row": lambda t: t.copy_(torch.tensor([1.0, 2.0, 3.0])),
    "clamp_": lambda t: t.clamp_(min=0),
    "masked_fill_": lambda t: t.masked_fill_(t < 0, 100),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0, 0]), t[:2].clone()),
    "relu in place": lambda t: torch.nn.functional.relu(t, inplace=True),
    "relu_ function": lambda t: torch.relu_(t),
    "out": lambda t: torch.mul(t, 2, out=t),
    "swap rows": lambda t: operator.setitem(t, [0, 1], t[[1, 0]]),
    "unbound": lambda t: [row.add_(i) for i, row in enumerate(t)],
    "zero then add": lambda t: (t.zero_(), t[0].add_(1)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_is_recorded_and_read_back_as_on_a_real_tensor(
    owner: Owner, edit: Callable
) -> None:
    real, found = X.clone(), owner.read(X)
    edit(real)
    edit(found)
    assert owner.fetches == 0
    torch.testing.assert_close(force(found), real, rtol=0, atol=0)


def test_an_edit_is_seen_through_a_view_made_before_it(x: LazyTensor) -> None:
    row = x[0]
    x.zero_()
    assert row.tolist() == [0, 0, 0]


def test_an_edit_of_a_view_is_seen_by_the_whole(x: LazyTensor) -> None:
    x[0][1] = 42.0
    assert x[0, 1].item() == 42
    assert x[1].tolist() == X[1].tolist()


def test_what_was_derived_before_an_edit_keeps_the_old_value(x: LazyTensor) -> None:
    before, total = x.clone(), x.sum()
    x.zero_()
    after = x + 1
    assert before.tolist() == X.tolist()
    assert total.item() == X.sum().item()
    assert after.tolist() == torch.ones(4, 3).tolist()


@pytest.mark.parametrize("first", ["derived", "edited"])
def test_it_does_not_matter_which_is_forced_first(x: LazyTensor, first: str) -> None:
    before = x * 2
    x.mul_(10)
    forced = [before, x] if first == "derived" else [x, before]
    for tensor in forced:
        force(tensor)
    assert before.tolist() == (X * 2).tolist()
    assert x.tolist() == (X * 10).tolist()


def test_two_reads_of_one_visit_share_their_memory(x: LazyTensor) -> None:
    other = again(x)
    other[0] = 5.0
    assert x[0].tolist() == [5, 5, 5]


def test_a_view_forced_before_an_edit_is_forced_anew_after_it(owner: Owner, x: LazyTensor) -> None:
    row = x[0]
    assert row.tolist() == X[0].tolist()
    x.zero_()
    assert row.tolist() == [0, 0, 0]


def test_an_edit_after_a_force_is_seen_through_old_and_new_aliases(x: LazyTensor) -> None:
    row = x[0]
    force(x)
    x[0] = 1.0
    assert row.tolist() == [1, 1, 1]
    assert again(x)[0].tolist() == [1, 1, 1]


def test_an_edit_of_a_view_after_the_whole_was_forced_reaches_the_whole(x: LazyTensor) -> None:
    row = x[0]
    force(x)
    row.fill_(3)
    assert x[0].tolist() == [3, 3, 3]


def test_an_edit_of_a_view_that_was_forced_by_itself_reaches_the_whole(x: LazyTensor) -> None:
    row = x[0]
    force(row)
    row.fill_(3)
    assert x[0].tolist() == [3, 3, 3]
    assert row.tolist() == [3, 3, 3]


def test_a_derived_value_forced_after_edit_and_force_of_its_source(x: LazyTensor) -> None:
    derived = x + 0
    force(x)
    x.zero_()
    assert derived.tolist() == X.tolist()


def test_a_value_written_into_another_is_the_value_at_the_write(owner: Owner) -> None:
    a, b = owner.read(X), owner.read(X)
    a[0] = b[1]
    b.zero_()
    assert a[0].tolist() == X[1].tolist()
    assert b[1].tolist() == [0, 0, 0]


def test_a_value_written_into_another_before_the_source_is_forced_and_edited(owner: Owner) -> None:
    a, b = owner.read(X), owner.read(X)
    a[0] = b[1]
    force(b)
    b.zero_()
    assert a[0].tolist() == X[1].tolist()


def test_leaves_of_one_access_are_apart(owner: Owner) -> None:
    a, b = owner.read((X, X))
    a.zero_()
    assert b.tolist() == X.tolist()


def test_an_edit_does_not_reach_what_the_owner_has_published(owner: Owner, x: LazyTensor) -> None:
    (kept,) = next(iter(owner.values.values()))
    x.zero_()
    force(x)
    assert kept.tolist() == X.tolist()


def test_an_in_place_operation_on_what_was_forced_answers_with_its_target(x: LazyTensor) -> None:
    force(x)
    before = x
    x += 1
    assert x is before
    assert x.add_(1) is before


def test_aliases_by_reshape_share_and_copies_do_not(x: LazyTensor) -> None:
    flat, moved = x.view(-1), x.T.reshape(-1)
    x.zero_()
    assert flat.tolist() == [0] * 12
    assert moved.tolist() == X.T.reshape(-1).tolist()


def test_an_in_place_operation_of_another_dtype_fails_where_torch_does(owner: Owner) -> None:
    whole = owner.read(torch.arange(3))
    with pytest.raises(RuntimeError):
        whole.add_(0.5)
    assert whole.tolist() == [0, 1, 2]


def test_two_values_of_one_expression_are_apart(x: LazyTensor) -> None:
    a, b = x.clone(), x.clone()
    force(a)
    a.zero_()
    assert b.tolist() == X.tolist()


def test_a_view_of_an_operation_with_several_results_is_a_view(x: LazyTensor) -> None:
    row = x.unbind(0)[1]
    assert row.tolist() == X[1].tolist()
    x.zero_()
    assert row.tolist() == [0, 0, 0]


def test_a_derived_value_edited_before_its_source_is_forced(x: LazyTensor) -> None:
    copied = x.clone()
    x.add_(0)
    copied.add_(1)
    assert x.tolist() == X.tolist()
    assert copied.tolist() == (X + 1).tolist()


def test_forcing_one_value_does_not_bring_another_that_was_mixed_with_it(owner: Owner) -> None:
    x, other = owner.read(X), owner.read(X * 2)
    mixed = x + other
    other[0] = x[0]
    x.zero_()
    assert x.tolist() == [[0, 0, 0]] * 4
    assert owner.pulled_bytes == X.numel() * 8
    assert is_lazy(mixed)
    assert mixed.tolist() == (X * 3).tolist()
    assert other.tolist() == [X[0].tolist(), *(X[1:] * 2).tolist()]


def test_a_real_argument_that_was_a_lazy_is_taken_as_it_was(owner: Owner) -> None:
    x, other = owner.read(X), owner.read(X)
    force(x)
    total = x + other
    x.zero_()
    assert total.tolist() == (X * 2).tolist()


def test_autocast_decides_the_dtype_where_the_operation_is_written(owner: Owner) -> None:
    x = owner.read(X.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = x @ x.T
    assert product.dtype == torch.bfloat16


# --- random programs --------------------------------------------------------------------------

SCALARS = st.integers(-3, 3)

UNARY: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "row": lambda t, n: t[n],
    "slice": lambda t, n: t[max(n, 0) :],
    "columns": lambda t, n: t[..., : abs(n) + 1],
    "flat": lambda t, n: t.view(-1),
    "reshape": lambda t, n: t.reshape(-1),
    "transpose": lambda t, n: t.transpose(0, -1),
    "unsqueeze": lambda t, n: t.unsqueeze(0),
    "expand": lambda t, n: t.expand(2, *t.shape),
    "unbind": lambda t, n: t.unbind(0)[n],
    "clone": lambda t, n: t.clone(),
    "detach": lambda t, n: t.detach(),
    "contiguous": lambda t, n: t.contiguous(),
    "double": lambda t, n: t.double(),
    "plus": lambda t, n: t + n,
    "times": lambda t, n: (t * n).clamp(-50, 50),
    "sum": lambda t, n: t.sum(0),
    "max": lambda t, n: t.max(dim=0)[0],
    "where": lambda t, n: torch.where(t > n, t, -t),
    "flip": lambda t, n: t.flip(0),
    "add_": lambda t, n: t.add_(n),
    "mul_": lambda t, n: t.mul_(n).clamp_(-50, 50),
    "zero_": lambda t, n: t.zero_(),
    "set": lambda t, n: operator.setitem(t, n, float(n)),
    "set column": lambda t, n: operator.setitem(t, (..., n), 1.0),
    "set where": lambda t, n: operator.setitem(t, t > n, 0.0),
    "relu_": lambda t, n: t.relu_(),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: torch.sub(a, b),
    "times": lambda a, b: (a * b).clamp(-50, 50),
    "iadd": lambda a, b: operator.iadd(a, b),
    "copy_": lambda a, b: a.copy_(b),
    "set": lambda a, b: operator.setitem(a, 0, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "out": lambda a, b: torch.add(b, 1, out=a) if a.shape == b.shape else None,
    "maximum": lambda a, b: torch.maximum(a, b),
}
FORCE: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda t: t.tolist(),
    "sum": lambda t: t.sum().item(),
    "row": lambda t: t[0].tolist(),
    "any": lambda t: bool((t > 0).any()),
}

steps = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 30), SCALARS),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 30), st.integers(0, 30)).map(
        lambda found: ("2 " + found[0], *found[1:])
    ),
    st.tuples(st.sampled_from(sorted(FORCE)), st.integers(0, 30), st.none()).map(
        lambda found: ("! " + found[0], *found[1:])
    ),
)


def run(step: tuple, pool: list[torch.Tensor]) -> Any:
    """One step of a program on a pool of tensors: its result, or the kind of error."""
    name, first, second = step
    target = pool[first % len(pool)]
    try:
        if name.startswith("! "):
            return FORCE[name[2:]](target)
        if name.startswith("2 "):
            return BINARY[name[2:]](target, pool[second % len(pool)])
        return UNARY[name](target, second)
    except (RuntimeError, IndexError) as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@settings(max_examples=250, deadline=None)
@given(st.lists(steps, max_size=14))
def test_a_random_program_on_lazies_does_what_it_does_on_real_tensors(program: list) -> None:
    owner = Owner()
    one, two, mine = X.clone(), (X[:3] * 2).clone(), torch.ones(3, dtype=torch.float64)
    real = [one, one.view(one.shape), two, mine]
    first, second = owner.read(one), owner.read(two)
    found: list[torch.Tensor] = [first, again(first), second, mine.clone()]
    for step in program:
        expected, got = run(step, real), run(step, found)
        if isinstance(expected, torch.Tensor):
            assert isinstance(got, torch.Tensor)
            assert got.shape == expected.shape
            if len(real) < 12:
                real.append(expected)
                found.append(got)
        else:
            assert got == expected
    for expected, got in zip(real, found, strict=True):
        assert torch.equal(force(got), expected)


def test_a_program_without_a_force_fetches_nothing(owner: Owner) -> None:
    pool: list[torch.Tensor] = [owner.read(X), owner.read(X[:3])]
    for name in UNARY:
        result = run((name, 0, 1), pool)
        assert result is None or result is pool[0] or is_lazy(result)
    for name in BINARY:
        result = run(("2 " + name, 1, 1), pool)
        assert result in (None, RuntimeError) or result is pool[1] or is_lazy(result)
    assert owner.fetches == 0


def test_a_view_of_what_was_pulled_by_itself_still_sees_a_later_edit(owner: Owner) -> None:
    """Found by the random programs: the view was settled in memory of its own."""
    x = owner.read(X.clone())
    first = x.unsqueeze(0)
    flat = first.reshape(-1)
    first.tolist(), flat.tolist()
    x[0] = 0.0
    assert flat.tolist()[:3] == [0.0, 0.0, 0.0]
