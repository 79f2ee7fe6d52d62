"""What a lazy answers without data, what stays lazy, and what brings the data."""

from __future__ import annotations

import copy
import gc
import io
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from ppcore.errors import BlockError
from ppcore.runtime import expression, lazy
from ppcore.runtime.lazy import LazyTensor, force, is_lazy
from tests.unit.fake import Owner

X = torch.arange(12.0).reshape(4, 3) - 5
Y = torch.tensor([[2.0, -1.0, 0.5]])


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def x(owner: Owner) -> LazyTensor:
    return owner.read(X)


# --- without data -----------------------------------------------------------------------------

METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda t: t.shape,
    "size": lambda t: (t.size(), t.size(1)),
    "dim": lambda t: (t.dim(), t.ndim),
    "numel": lambda t: t.numel(),
    "len": len,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "stride": lambda t: t.stride(),
    "is_contiguous": lambda t: t.is_contiguous(),
    "is_floating_point": lambda t: t.is_floating_point(),
    "is_complex": lambda t: t.is_complex(),
    "requires_grad": lambda t: t.requires_grad,
    "is_cpu": lambda t: (t.is_cpu, t.is_cuda, t.is_meta),
    "element_size": lambda t: (t.element_size(), t.itemsize, t.nbytes),
    "isinstance": lambda t: isinstance(t, torch.Tensor) and torch.is_tensor(t),
    "derived shape": lambda t: (t[-1].clone().float() @ t.T).shape,
    "zeros_like": lambda t: torch.zeros_like(t).tolist(),
    "ones_like of a derived one": lambda t: torch.ones_like(t[0] * 2, dtype=torch.int64).tolist(),
    "new_zeros": lambda t: t.new_zeros(2, 2).tolist(),
    "full_like": lambda t: torch.full_like(t[:1], 7).tolist(),
}


@pytest.mark.parametrize("ask", METADATA.values(), ids=METADATA)
def test_metadata_brings_no_data_and_is_the_real_ones(owner: Owner, ask: Callable) -> None:
    assert ask(owner.read(X)) == ask(X)
    assert owner.fetches == 0


DERIVED: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t + 1,
    "radd": lambda t: 1 - t,
    "two lazies": lambda t: t * t[0] - t,
    "real right": lambda t: t @ Y.T,
    "real left": lambda t: Y / (t + 7.5),
    "neg abs": lambda t: abs(-t),
    "pow": lambda t: t**2,
    "floordiv mod": lambda t: t // 2 + t % 2,
    "compare": lambda t: (t > 1) & ~(t == 2) | (t <= -4),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "to": lambda t: t.to(torch.float16),
    "to cpu double": lambda t: t.to("cpu", torch.float64),
    "to like": lambda t: t.to(torch.zeros(1, dtype=torch.int32)),
    "cpu": lambda t: t.cpu(),
    "half": lambda t: t.half().float(),
    "row": lambda t: t[-1],
    "slice": lambda t: t[1:, ::2],
    "ellipsis none": lambda t: t[..., None, 0],
    "list index": lambda t: t[[0, 2]],
    "tensor index": lambda t: t[torch.tensor([3, 0]), torch.tensor([1, 1])],
    "lazy index": lambda t: t[t.argmax(0)],
    "norm": lambda t: t.norm(dim=-1),
    "mean": lambda t: t.mean(-1, keepdim=True),
    "max": lambda t: t.max(),
    "max of dim": lambda t: t.max(dim=0).values,
    "topk": lambda t: t.topk(2)[1],
    "sort": lambda t: torch.sort(t, descending=True)[0],
    "unbind": lambda t: t.unbind(1)[2],
    "split": lambda t: t.split([1, 2], dim=1)[1],
    "chunk": lambda t: torch.chunk(t, 2)[0],
    "T": lambda t: t.T,
    "mT": lambda t: t.mT + 1,
    "permute": lambda t: t.permute(1, 0).reshape(-1),
    "cat": lambda t: torch.cat([t, Y, t[:1]]),
    "stack": lambda t: torch.stack((t, X)),
    "where": lambda t: torch.where(t > 0, t, Y),
    "softmax": lambda t: torch.nn.functional.softmax(t, dim=-1),
    "linear": lambda t: torch.nn.functional.linear(t, X, None),
    "module": lambda t: torch.nn.LayerNorm(3).requires_grad_(False)(t),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, X),
    "maximum": lambda t: torch.maximum(t, Y),
    "in_out": lambda t: torch.lerp(t, X, 0.5),
    "masked_fill": lambda t: t.masked_fill(t > 0, 0.0),
    "contiguous": lambda t: t.T.contiguous(),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_operations_stay_lazy_and_give_what_torch_gives(owner: Owner, derive: Callable) -> None:
    torch.manual_seed(0)
    expected = derive(X)
    torch.manual_seed(0)
    found = derive(owner.read(X))
    assert is_lazy(found)
    assert owner.fetches == 0
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(force(found), expected, rtol=0, atol=1e-6)
    assert owner.fetches == 1


def test_identity_operations_answer_with_the_same_tensor(x: LazyTensor) -> None:
    assert x.float() is x
    assert x.to(torch.float32) is x
    assert x.to("cpu") is x
    assert x.cpu() is x
    assert x.contiguous() is x
    assert x.to(torch.float32, copy=True) is not x


def test_an_identity_on_a_real_tensor_beside_a_lazy_is_that_tensor(x: LazyTensor) -> None:
    real = X.clone()
    assert real.type_as(x) is real
    assert real.to(x) is real
    assert real.view_as(x).data_ptr() == real.data_ptr()
    assert real.int().to(x).dtype == torch.float32
    assert is_lazy(x)


# --- what brings the data ---------------------------------------------------------------------

FORCING: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": lambda t: bool((t > 0).any()),
    "if": lambda t: "yes" if t[0, 0] > 0 else "no",
    "float": lambda t: float(t[0, 1]),
    "int": lambda t: int(t[3, 2]),
    "complex": lambda t: complex(t[0, 0]),
    "index": lambda t: [10, 11, 12, 13][t.argmax(0)[0]],
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "format": lambda t: f"{t.mean():.3f}|{t[0, 0]}",
    "str": str,
    "repr": lambda t: repr(t + 1),
    "print": lambda t: (print(t, file=(out := io.StringIO())), out.getvalue())[1],
    "iterate": lambda t: [float(row.sum()) for row in t],
    "unpack": lambda t: [float(v) for v in (lambda a, b, c, d: (a[0], d[2], b[1]))(*t)],
    "in": lambda t: (3.0 in t, 99.0 in t),
    "numpy": lambda t: t.numpy().tolist(),
    "asarray": lambda t: numpy.asarray(t[1]).tolist(),
    "numpy function": lambda t: numpy.linalg.norm(t).item(),
    "nonzero": lambda t: t.nonzero().tolist(),
    "free nonzero": lambda t: torch.nonzero(t > 3).tolist(),
    "bool mask": lambda t: t[t > 2].tolist(),
    "real mask": lambda t: t[X > 2].tolist(),
    "unique": lambda t: (t > 0).unique().tolist(),
    "masked_select": lambda t: t.masked_select(t > 0).tolist(),
    "free masked_select": lambda t: torch.masked_select(X, t > 0).tolist(),
    "equal": lambda t: (t.equal(X), torch.equal(X, t), torch.equal(t, t + 1)),
    "allclose": lambda t: (torch.allclose(t, X), t.allclose(X + 1)),
    "math": lambda t: math.exp(t[1, 1]),
    "sorted": lambda t: [float(v) for v in sorted(t[:, 0], reverse=True)],
    "max of Python": lambda t: float(max(t[0])),
    "sum of Python": lambda t: sum(t[0]).item(),
    "dict key by item": lambda t: {0: "a", 1: "b"}[t[2, 0].item()],
    "assert_close": lambda t: torch.testing.assert_close(t, X),
    "round": lambda t: round(float(t[0, 0]), 1),
    "range": lambda t: list(range(t[3, 2].int())),
}


@pytest.mark.parametrize("use", FORCING.values(), ids=FORCING)
def test_what_plain_python_needs_is_brought_and_equals_the_real_ones(
    owner: Owner, use: Callable
) -> None:
    expected = use(X)
    found = use(owner.read(X))
    assert found == expected or repr(found) == repr(expected)
    assert owner.fetches >= 1


def test_a_lazy_forced_twice_is_fetched_once(owner: Owner, x: LazyTensor) -> None:
    assert x.tolist() == x.tolist() == X.tolist()
    assert owner.fetches == 1
    assert owner.pulled_bytes == X.numel() * 4


def test_what_is_derived_of_a_forced_lazy_is_real(owner: Owner, x: LazyTensor) -> None:
    force(x)
    derived = x * 2
    assert not is_lazy(derived)
    assert type(derived) is torch.Tensor
    assert owner.fetches == 1


def test_several_lazies_of_one_call_are_one_exchange(owner: Owner) -> None:
    a, b = owner.read((X, X + 1))
    assert (a.sum() + b.sum()).item() == (2 * X + 1).sum().item()
    assert owner.fetches == 1


def test_a_row_brings_a_row(owner: Owner, x: LazyTensor) -> None:
    assert x[-1].tolist() == X[-1].tolist()
    assert owner.pulled_bytes == 3 * 4


def test_a_row_of_a_derived_value_brings_a_row(owner: Owner, x: LazyTensor) -> None:
    assert (x.clone()[-1] * 2).float().tolist() == (X[-1] * 2).tolist()
    assert owner.pulled_bytes == 3 * 4


def test_a_reduction_brings_one_number(owner: Owner, x: LazyTensor) -> None:
    assert x.norm().item() == pytest.approx(X.norm().item())
    assert owner.pulled_bytes == 4


def test_an_expansion_brings_its_operand_and_not_its_result(owner: Owner) -> None:
    row = owner.read(X[0])
    assert row.repeat(1000, 1).shape == (1000, 3)
    assert row.repeat(1000, 1)[7].tolist() == X[0].tolist()
    assert owner.pulled_bytes == 3 * 4


def test_what_is_made_of_several_values_brings_of_each_what_it_needs(owner: Owner) -> None:
    values = [torch.rand(50, 40) for _ in range(3)]
    x, y, z = map(owner.read, values)
    made = torch.stack([x.sum(), y[1, 2], z.exp().mean()]) * 2
    expected = torch.stack([values[0].sum(), values[1][1, 2], values[2].exp().mean()]) * 2
    assert torch.equal(force(made), expected)
    assert (owner.fetches, len(owner.pulled), owner.pulled_bytes) == (1, 3, 3 * 4)


def test_a_value_that_is_needed_whole_crosses_whole_and_once(owner: Owner) -> None:
    first, second = torch.rand(50, 40), torch.rand(50, 40)
    x, y = owner.read(first), owner.read(second)
    assert torch.equal(force(x * y[0] + x.sum()), first * second[0] + first.sum())
    assert (len(owner.pulled), owner.pulled_bytes) == (2, (50 + 1) * 40 * 4)


def test_many_small_parts_of_a_value_cross_as_the_value(owner: Owner) -> None:
    first, second = torch.rand(50, 40), torch.rand(50, 40)
    x, y = owner.read(first), owner.read(second)
    made = sum(x[i].sum() * y[0].sum() for i in range(10))
    torch.testing.assert_close(
        force(made), sum(first[i].sum() * second[0].sum() for i in range(10))
    )
    assert (len(owner.pulled), owner.pulled_bytes) == (1 + 1, first.numel() * 4 + 4)


def test_a_part_is_what_it_was_when_the_line_ran(owner: Owner) -> None:
    first, second = torch.rand(50, 40), torch.rand(50, 40)
    x, y = owner.read(first), owner.read(second)
    before = x[0].sum()
    x[0] = 1.0
    assert torch.equal(force(before + y.sum()), first[0].sum() + second.sum())
    assert torch.equal(force(x[0].sum() + y.sum()), torch.ones(40).sum() + second.sum())


def test_planning_looks_at_each_node_once(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    origin = expression.Origins._origin
    monkeypatch.setattr(
        expression.Origins,
        "_origin",
        lambda self, node: looked.append(node.sequence) or origin(self, node),
    )
    x, total = owner.read(torch.rand(5)), owner.read(torch.rand(5)).sum()
    for _ in range(30):
        total = total * x.sum()
    float(total)
    # Each sum, each product, and the two values.
    assert len(looked) == len(set(looked)) == 2 * 30 + 1 + 2
    assert len(owner.pulled) == 2


def test_a_leaf_of_a_nested_value_brings_that_leaf(owner: Owner) -> None:
    hidden, (residual, nothing), named = owner.read((X, (X + 1, None), {"k": X[0]}))
    assert nothing is None
    assert residual[0].tolist() == (X[0] + 1).tolist()
    assert named["k"].tolist() == X[0].tolist()
    assert is_lazy(hidden)
    assert owner.pulled_bytes == 2 * 3 * 4


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free anything: an engine may have frozen the collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_base_is_released_when_its_last_lazy_goes(owner: Owner) -> None:
    x = owner.read(X)
    row = x[0]
    del x
    assert owner.released == []
    del row
    assert len(owner.released) == 1


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("use", ["force", "row", "edit", "mix"])
def test_a_base_is_released_however_its_lazies_were_used(owner: Owner, use: str) -> None:
    x = owner.read(X)
    if use == "force":
        force(x)
    elif use == "row":
        assert x.clone()[-1].tolist() == X[-1].tolist()
    elif use == "edit":
        x[0].zero_()
        assert x.sum(0).tolist() == X[1:].sum(0).tolist()
    else:
        assert torch.cat([x, Y]).shape == (5, 3)
    del x
    assert len(owner.released) == 1


def test_a_settled_lazy_keeps_no_remote_value_alive(owner: Owner, x: LazyTensor) -> None:
    row = x[0]
    force(x)
    force(row)
    assert len(owner.released) == 1


# --- mixed with real tensors ------------------------------------------------------------------


def test_a_real_argument_is_taken_as_it_was_when_the_operation_ran(x: LazyTensor) -> None:
    real = torch.ones(4, 3)
    total = x + real
    real.zero_()
    assert force(total).tolist() == (X + 1).tolist()


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_factory_needs_the_data_of_its_other_arguments(owner: Owner, x: LazyTensor) -> None:
    five = owner.read(torch.tensor(5.0))
    assert X.new_tensor(five).item() == 5
    assert x.new_full((2,), five).tolist() == [5, 5]
    assert torch.full_like(x[0], five).tolist() == [5, 5, 5]
    assert torch.zeros_like(input=x).tolist() == torch.zeros(4, 3).tolist()
    assert is_lazy(x)


def test_a_write_into_a_real_tensor_happens_at_once(owner: Owner, x: LazyTensor) -> None:
    real = torch.zeros(4, 3)
    real[1:3] = x[1:3]
    real += x
    real.copy_(real + x)
    torch.add(real, x, out=real)
    expected = torch.zeros(4, 3)
    expected[1:3] = X[1:3]
    assert real.tolist() == (expected + 3 * X).tolist()


@pytest.mark.parametrize("forced", [False, True], ids=["lazy", "forced"])
@pytest.mark.parametrize(
    "edit",
    [
        lambda x: x.mul_(2),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.__iadd__(1),
    ],
    ids=["mul_", "setitem", "out", "iadd"],
)
def test_a_value_that_is_fixed_cannot_be_edited(owner: Owner, edit: Callable, forced: bool) -> None:
    x = owner.read(torch.arange(6.0).reshape(2, 3), fixed="every stage has its own")
    if forced:
        x.tolist()
    with pytest.raises(BlockError, match="every stage has its own"):
        edit(x)
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    derived = x * 2
    derived[0] = 1.0
    assert derived.tolist() == [[1.0, 1.0, 1.0], [6.0, 8.0, 10.0]]


def test_a_view_of_a_value_that_is_fixed_cannot_be_edited(owner: Owner) -> None:
    x = owner.read(torch.ones(2, 3), fixed="every stage has its own")
    with pytest.raises(BlockError, match="every stage has its own"):
        x[0].mul_(2)


def test_out_may_be_a_lazy(x: LazyTensor) -> None:
    view = x[0]
    assert torch.add(X, 1, out=x) is x
    assert force(x).tolist() == (X + 1).tolist()
    assert view.tolist() == (X[0] + 1).tolist()


def test_an_error_of_shapes_is_raised_at_the_line_that_makes_it(
    owner: Owner, x: LazyTensor
) -> None:
    with pytest.raises(RuntimeError):
        x + torch.zeros(5)
    with pytest.raises(IndexError):
        x[7]
    with pytest.raises(RuntimeError):
        x.view(5)
    with pytest.raises(AttributeError):
        x.no_such_thing
    assert owner.fetches == 0


def test_a_boolean_of_many_values_is_as_ambiguous_as_torchs(x: LazyTensor) -> None:
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)


def test_a_lazy_is_hashed_by_identity_and_can_key_a_dict(x: LazyTensor) -> None:
    other = x[0]
    assert {x: "x", other: "row"}[x] == "x"


# --- copies -----------------------------------------------------------------------------------


def test_a_deep_copy_stays_lazy_and_is_memory_of_its_own(owner: Owner, x: LazyTensor) -> None:
    copied = copy.deepcopy({"a": x, "b": x})
    assert copied["a"] is copied["b"]
    assert is_lazy(copied["a"])
    x.zero_()
    assert copied["a"].tolist() == X.tolist()


def test_a_shallow_copy_shares_memory(x: LazyTensor) -> None:
    copied = copy.copy(x)
    x[0] = 0.0
    assert torch.equal(copied[0], torch.zeros(3))


def test_pickling_brings_the_data_and_leaves_a_plain_tensor(owner: Owner, x: LazyTensor) -> None:
    loaded = pickle.loads(pickle.dumps({"x": x, "row": x[1]}))
    assert type(loaded["x"]) is torch.Tensor
    assert torch.equal(loaded["x"], X)
    assert torch.equal(loaded["row"], X[1])


def test_torch_save_brings_the_data(x: LazyTensor) -> None:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file), X)


def test_lazies_are_found_in_a_structure_in_order(owner: Owner) -> None:
    a, b = owner.read((X, X))
    assert [t is a for t in lazy.lazies((a, [{"k": b}], slice(a, None), 3))] == [True, False, True]


@pytest.mark.parametrize("op", [operator.iadd, operator.isub, operator.imul, operator.itruediv])
def test_an_in_place_operator_answers_with_its_target(x: LazyTensor, op: Callable) -> None:
    before = x
    x = op(x, 2)
    assert x is before
    assert is_lazy(x)
    assert force(x).tolist() == op(X.clone(), 2).tolist()
