"""The shapes that operations make, remembered.

What a recorded operation will make is found by running it on meta tensors. Many of torch's meta kernels
are Python (0.3 ms for an addition, 0.9 for a norm, in torch 2.13), and a block does to every layer and in
every step what it did to the last. So an operation whose result is memory of its own is run once for each
layout of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch.overrides import _len_torch_function_stack

META = torch.device("meta")

#: Arguments that are the same where they are equal and of one type.
PLAIN = frozenset(
    (bool, int, float, str, NoneType, EllipsisType)
    + (torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (tuple, list, torch.Size)

#: How many results are remembered.
_MOST = 4096


class Layout(NamedTuple):
    """What a tensor is, but for its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_results: dict[Hashable, Layout] = {}


def key(
    function: Any, args: tuple, kwargs: dict, tensor: Callable[[torch.Tensor], torch.Tensor]
) -> Hashable | None:
    """What decides of what shape the result of a call is; None where that cannot be told.

    Args:
        tensor: the plain tensor of the same layout as one among the arguments.
    """
    if _len_torch_function_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # a mode may change what the operation does, and a transform hides dimensions
    try:
        found = (
            function,
            torch.get_default_dtype(),
            _key(args, tensor),
            *((name, _key(value, tensor)) for name, value in kwargs.items()),
        )
        hash(found)
    except TypeError:
        return None
    return found


def _key(value: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Hashable:
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if isinstance(value, torch.Tensor):
        plain = tensor(value)
        # Whether a complex tensor is a conjugate's view decides as well.
        if type(plain) not in _TENSORS or plain.is_complex() or plain.layout is not torch.strided:
            raise TypeError
        return plain.shape, plain.stride(), plain.storage_offset(), plain.dtype
    if kind in _SEQUENCES:
        return kind, *(_key(item, tensor) for item in value)
    if kind is slice:
        return kind, *(_key(item, tensor) for item in (value.start, value.stop, value.step))
    raise TypeError


def recall(call: Hashable | None) -> torch.Tensor | None:
    """A meta tensor like the result of a call that was remembered."""
    found = _results.get(call) if call is not None else None
    return None if found is None else _empty(found)


def remember(call: Hashable | None, result: Any, inputs: Sequence[torch.Tensor]) -> None:
    """Note what a call made of ``inputs``, if that is one tensor in memory of its own."""
    if call is None or type(result) is not torch.Tensor or result.is_complex():
        return
    storage = result.untyped_storage()
    if any(storage._cdata == given.untyped_storage()._cdata for given in inputs):
        return
    layout = Layout(tuple(result.shape), result.stride(), result.dtype)
    if result.storage_offset() or storage.nbytes() != _empty(layout).untyped_storage().nbytes():
        return
    if len(_results) >= _MOST:
        _results.clear()
    _results[call] = layout


def _empty(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=META)
