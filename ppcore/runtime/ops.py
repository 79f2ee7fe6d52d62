"""Which torch operations a lazy may record, and how each is treated.

A lazy answers an operation in one of five ways:

* metadata (``shape``, ``dim()``, ``dtype``) is answered from a meta tensor, without data;
* a factory (``zeros_like``) needs only metadata and is run at once;
* a mutation (``add_``, ``x[i] = y``) is recorded in its place among the reads of that memory;
* an operation whose result depends on more than its arguments' values (random draws), or whose
  result's shape depends on data (``nonzero``), or that leaves torch (``numpy``), needs the data now;
* anything else is recorded and stays lazy.

Operations that can travel with a pull (`name_of`, `function_of`) are the ones named here: a peer can
make this rank evaluate no other function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Operations that need only the metadata of their tensor arguments.
FACTORIES = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor".split()
)

#: Methods that need their own tensor's data, and only the metadata of the other one.
LIKE_OTHER = frozenset("to type_as view_as expand_as reshape_as".split())

#: Operations whose result depends on the random generator: run in program order, never later.
RANDOM = frozenset(
    """rand_like randn_like randint_like bernoulli multinomial normal poisson dropout alpha_dropout
    feature_dropout dropout1d dropout2d dropout3d rrelu gumbel_softmax native_dropout""".split()
)

#: In-place operators by their method names (those without a trailing underscore).
_INPLACE_DUNDERS = frozenset(
    """__setitem__ __iadd__ __isub__ __imul__ __imatmul__ __itruediv__ __idiv__ __ifloordiv__ __imod__
    __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__""".split()
)

#: Trailing underscore, but no mutation of data.
_NOT_MUTATIONS = frozenset({"requires_grad_", "retain_grad_"})

#: Properties that are tensors made of the tensor's data.
DATA_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})

_METHODS = """
    abs add all amax amin any argmax argmin argsort add bmm ceil chunk clamp clamp_max clamp_min clone
    contiguous cos cumsum cumprod detach diagonal diff div double eq exp expand expand_as flatten flip
    float floor gather ge gt half bfloat16 int long short bool index_select isfinite isinf isnan kthvalue
    le log log1p log2 log_softmax logsumexp lt masked_fill matmul max mean median min mul movedim narrow
    ne neg norm permute pow prod reciprocal relu repeat reshape roll round rsqrt select sigmoid sign sin
    softmax sort split sqrt square squeeze std sub sum t take tanh tile to topk transpose tril triu
    true_divide type_as unbind unflatten unfold unsqueeze var view view_as where
    __getitem__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__
    __rdiv__ __floordiv__ __rfloordiv__ __mod__ __pow__ __rpow__ __neg__ __abs__ __eq__ __ne__ __lt__
    __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __matmul__ __rmatmul__
""".split()

_FUNCTIONS = """
    abs add all amax amin any argmax argmin argsort bmm cat ceil chunk clamp clone cos cumsum diagonal
    div eq exp flatten flip floor gather ge gt index_select isfinite isinf isnan le log log_softmax
    logsumexp lt masked_fill matmul max mean median min mm mul narrow ne neg norm permute pow prod relu
    reshape roll round rsqrt select sigmoid sign sin softmax sort split sqrt square squeeze stack std
    sub sum tanh topk transpose tril triu unbind unsqueeze var where
""".split()

_NN_FUNCTIONS = "relu gelu silu softmax log_softmax normalize layer_norm cosine_similarity".split()


def _table() -> dict[str, Callable]:
    table: dict[str, Callable] = {}
    for prefix, owner, names in (
        ("T.", torch.Tensor, _METHODS),
        ("t.", torch, _FUNCTIONS),
        ("F.", torch.nn.functional, _NN_FUNCTIONS),
    ):
        for name in names:
            function = getattr(owner, name, None)
            if function is not None:
                table[prefix + name] = function
    for name in DATA_PROPERTIES:
        table["P." + name] = Property(name)
    return table


class Property:
    """Reading a tensor property as a function, so that it records like any other operation."""

    __slots__ = ("__name__",)

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, tensor: torch.Tensor) -> Any:
        return getattr(tensor, self.__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Property) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(("Property", self.__name__))


_BY_NAME: dict[str, Callable] = _table()
_BY_FUNCTION: dict[Any, str] = {function: name for name, function in _BY_NAME.items()}


def name_of(function: Any) -> str | None:
    """The name under which ``function`` may travel, or None."""
    try:
        return _BY_FUNCTION.get(function)
    except TypeError:
        return None


def function_of(name: str) -> Callable:
    """The function that travels as ``name``.

    Raises:
        ValueError: nothing travels under that name.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"{name!r} is not an operation that a pull may carry") from None


def plain_name(function: Any) -> str:
    """The bare name of a torch function, method or wrapped property access."""
    return getattr(function, "__name__", "") or type(function).__name__


def mutates(function: Any, kwargs: dict) -> bool:
    """Whether a call of ``function`` writes into its first argument or into ``out=``."""
    name = plain_name(function)
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    if name in _INPLACE_DUNDERS:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_MUTATIONS
