"""The placeholder that a rank holds for a value of another stage.

A read of a remote location is answered at once with a [`LazyTensor`][ppcore.runtime.lazy.LazyTensor]
(or a tuple of them, as the location's structure is). It *is* a ``torch.Tensor`` with the right
shape, dtype and device, and has no data. Operations on it are recorded; the data is brought
(*forced*) only where Python itself must have it: ``bool``, ``float``, ``item``, ``numpy``,
formatting, a write into a real tensor.

Recording happens inside torch's C++ calls (``__torch_function__``), where a greenlet must not be
switched; so an operation that mixes lazies and real tensors stays lazy too, and what forces is
overridden here as plain Python methods.

Aliasing
--------
``h = x[0]; h[:] = 0`` changes ``x``. Nodes that share memory form a *family* (found by running each
operation on meta tensors and comparing storages). A mutation is recorded with its place in program
order. When data is here, everything recorded that needs no other data is executed in that order
on the one real tensor (*replayed*), so torch itself does the aliasing; what was derived *before* a
mutation is computed before it, or keeps a copy of what it still has to read.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, Protocol

import torch
from torch.overrides import _len_torch_function_stack

from ..core import Available
from ..errors import BlockError
from ..messages import Key
from . import expression, metas, ops, threadstate

_sequence = itertools.count()
_NO_FUNCTION = torch._C.DisableTorchFunctionSubclass

#: What another message costs, in bytes that could cross in its place.
_MESSAGE_BYTES = 64 * 1024


class Fetcher(Protocol):
    """What forcing needs: a way to bring values from other stages (see `link`)."""

    def fetch(self, wanted: list[tuple[Base, str]]) -> list[Any]:
        """The values of the expressions, in order; blocks or parks until they are here."""

    def request(self, wanted: list[tuple[Base, str]]) -> list[int]:
        """Ask for the values without waiting for them."""

    def forgotten(self, base: Base) -> None:
        """No lazy needs ``base`` any more. Called from any thread, at any time."""


class Base:
    """One remote access: where its value lives, and which of its leaves are already here.

    Attributes:
        key: the access's name.
        location: what was read, for messages.
        owner: the stage that has the value.
        available: from when on it can be had.
        numbers: the pulls made of it; their results go when this does.
        fixed: why it cannot be edited in place; empty where it can.
    """

    __slots__ = (
        "__weakref__", "available", "fetcher", "fixed", "key", "location", "numbers", "owner"
    )  # fmt: skip

    def __init__(
        self,
        fetcher: Fetcher,
        key: Key,
        location: str,
        owner: int,
        available: Available,
        fixed: str = "",
    ) -> None:
        self.fetcher = fetcher
        self.key = key
        self.location = location
        self.owner = owner
        self.available = available
        self.fixed = fixed
        self.numbers: list[int] = []

    def __del__(self) -> None:
        self.fetcher.forgotten(self)


class Family:
    """Nodes that share memory, with the mutations of it in program order.

    Once a family is real and has no mutations left, plain torch tensors over its memory may be in
    the block's hands; from then on a mutation is run at once and never recorded.
    """

    __slots__ = ("fixed", "members", "mutations", "readers", "real", "storage")

    def __init__(self, meta: torch.Tensor, fixed: str = "") -> None:
        self.fixed = fixed
        self.storage = meta.untyped_storage()
        # Whether the memory is here.
        self.real = False
        # Not yet executed.
        self.mutations: list[Node] = []
        # Unexecuted nodes that read this memory into memory of their own; made for the first one.
        self.readers: weakref.WeakSet[Node] | tuple[()] = ()
        # Nodes in this memory.
        self.members: weakref.WeakSet[Node] = weakref.WeakSet()

    def is_read_by(self, node: Node) -> None:
        """``node`` will read this memory."""
        if not self.readers:
            self.readers = weakref.WeakSet()
        self.readers.add(node)


class Node:
    """One recorded operation, or one leaf of a remote access.

    Attributes:
        value: the executed result, once ``done``; the recorded part is gone then.
        cache: a view that was pulled by itself: right until its family is mutated.
        target: the family that this operation writes into, for a mutation.
        output: for one tensor of an operation with several, the path to it.
    """

    __slots__ = (
        "__weakref__", "args", "base", "cache", "device", "done", "family", "function", "inputs",
        "kwargs", "leaf", "meta", "output", "sequence", "target", "value",
    )  # fmt: skip

    def __init__(self, meta: Any, device: torch.device, family: Family | None) -> None:
        self.sequence = next(_sequence)
        self.meta = meta
        self.device = device
        self.family = family
        self.function: Callable | None = None
        self.args: tuple = ()
        self.kwargs: dict = {}
        self.inputs: list[Node] = []
        self.output: tuple = ()
        self.base: Base | None = None
        self.leaf: tuple = ()
        self.value: Any = None
        self.cache: Any = None
        self.done = False
        self.target: Family | None = None
        if family is not None:
            family.members.add(self)

    @property
    def executed(self) -> bool:
        """Whether ``value`` is what the block sees: it is here, and no mutation of it is pending."""
        return self.done and not (self.family is not None and self.family.mutations)

    def settle(self, value: Any) -> None:
        """The result is here: forget how to get it."""
        self.value, self.done = value, True
        self.cache = None
        if self.family is not None:
            self.family.real = True
        self.function, self.args, self.kwargs, self.inputs, self.base = None, (), {}, [], None


class LazyTensor(torch.Tensor):
    """A tensor of another stage that this rank has not needed yet."""

    node: Node

    @staticmethod
    def of(node: Node) -> LazyTensor:
        """The tensor to hand to user code for ``node``."""
        meta = node.meta
        made = torch.Tensor._make_wrapper_subclass(
            LazyTensor,
            meta.shape,
            strides=meta.stride(),
            dtype=meta.dtype,
            device=node.device,
        )
        made.node = node
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return record(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # Reached below torch functions only (autograd off, a C++ composite): no recording there.
        args, kwargs = resolve((args, kwargs or {}))
        return func(*args, **kwargs)

    # What Python must have the data for, as plain methods: no C++ frame lies below a park here.

    def item(self) -> Any:
        return force(self).item()

    def tolist(self) -> Any:
        return force(self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return force(self).numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return force(self).__array__(*args, **kwargs)

    def __bool__(self) -> bool:
        return bool(force(self))

    def __float__(self) -> float:
        return float(force(self))

    def __int__(self) -> int:
        return int(force(self))

    def __index__(self) -> int:
        return force(self).__index__()

    def __complex__(self) -> complex:
        return complex(force(self))

    def __contains__(self, element: Any) -> bool:
        return resolve(element) in force(self)

    def __format__(self, spec: str) -> str:
        return format(force(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(force(self))

    def __str__(self) -> str:
        return str(force(self))

    def __deepcopy__(self, memo: dict) -> Any:
        copied = memo.get(id(self))
        if copied is None:
            copied = memo[id(self)] = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return force(self).__reduce_ex__(protocol)

    def __getitem__(self, index: Any) -> Any:
        if _shape_depends_on_data(index):
            return force(self)[resolve(index)]
        if _len_torch_function_stack():
            return super().__getitem__(index)  # a mode of the block's sees it first
        return record(torch.Tensor.__getitem__, (self, index), {})

    def equal(self, other: Any) -> bool:
        return force(self).equal(resolve(other))

    def allclose(self, other: Any, *args: Any, **kwargs: Any) -> bool:
        return force(self).allclose(resolve(other), *args, **kwargs)

    def is_nonzero(self) -> bool:
        return force(self).is_nonzero()

    def nonzero(self, *args: Any, **kwargs: Any) -> Any:
        return force(self).nonzero(*args, **kwargs)

    def unique(self, *args: Any, **kwargs: Any) -> Any:
        return force(self).unique(*args, **kwargs)

    def masked_select(self, mask: Any) -> Any:
        return force(self).masked_select(resolve(mask))

    def data_ptr(self) -> int:
        return force(self).data_ptr()

    def untyped_storage(self) -> Any:
        return force(self).untyped_storage()

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.to("cpu")


def _shape_depends_on_data(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts
    )


# --- making lazies ----------------------------------------------------------------------------


def leaf(
    base: Base, path: tuple, shape: Any, dtype: torch.dtype, device: torch.device
) -> LazyTensor:
    """The lazy for one tensor of a remote access."""
    with _NO_FUNCTION():
        meta = torch.empty(shape, dtype=dtype, device=metas.META)
    node = Node(meta, device, Family(meta, base.fixed))
    node.base, node.leaf = base, path
    return LazyTensor.of(node)


def is_lazy(value: Any) -> bool:
    """Whether ``value`` is a tensor whose data is not here."""
    return isinstance(value, LazyTensor) and not value.node.executed


def lazies(value: Any) -> list[LazyTensor]:
    """The lazies in a structure of tuples, lists and dicts, in order."""
    found: list[LazyTensor] = []
    _find(value, found)
    return found


def _needs_grad(value: Any) -> bool:
    """Whether gradients are wanted of a tensor among an operation's arguments."""
    found: list[bool] = []
    map_tensors(value, lambda path, tensor: found.append(tensor.requires_grad))
    return any(found)


def _find(part: Any, found: list[LazyTensor]) -> None:
    # Not a closure that calls itself: the cycle would keep the lazies from being released.
    if isinstance(part, LazyTensor):
        found.append(part)
    elif isinstance(part, (tuple, list)):
        for item in part:
            _find(item, found)
    elif isinstance(part, dict):
        for item in part.values():
            _find(item, found)
    elif isinstance(part, slice):
        _find((part.start, part.stop, part.step), found)


def map_tensors(
    value: Any, function: Callable[[tuple, torch.Tensor], Any], path: tuple = ()
) -> Any:
    """``value`` with each tensor replaced by ``function(path, tensor)``; containers are rebuilt."""
    if isinstance(value, torch.Tensor):
        return function(path, value)
    if type(value) in metas.PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        if isinstance(value, tuple) and type(value) is not tuple:
            return type(value)(items)  # torch.return_types take one sequence
        return type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(item, function, (*path, key)) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*map_tensors((value.start, value.stop, value.step), function, path))
    return value


# --- recording --------------------------------------------------------------------------------


def record(function: Any, args: tuple, kwargs: dict) -> Any:
    """Answer a torch function called with at least one lazy among its arguments."""
    name = ops.plain_name(function)
    if name == "__get__":
        return _property(function.__self__.__name__, args[0])
    if name in ops.FACTORIES:
        return _factory(function, args, kwargs)
    if name in ops.LIKE_OTHER:
        function, args, kwargs = _like_other(name, function, args, kwargs)
        if not isinstance(args[0], LazyTensor):
            return function(*args, **kwargs)

    involved = lazies((args, kwargs))
    if threadstate.decides() or (torch.is_grad_enabled() and _needs_grad((args, kwargs))):
        return _run(function, args, kwargs)  # recorded, it would run later, outside of that
    if ops.mutates(function, kwargs):
        return _mutate(function, args, kwargs, involved)
    if not any(is_lazy(lazy) for lazy in involved):
        return _run(function, args, kwargs)
    if torch.is_autocast_enabled(involved[0].node.device.type):
        return _run(function, args, kwargs)  # the recorded operation would run outside of it
    if name in ops.RANDOM or name in ("equal", "allclose", "requires_grad_", "__set__"):
        return _run(function, args, kwargs)
    if function is torch.Tensor.to:
        moved = _moved(args, kwargs)
        if moved is not None:
            return moved
    try:
        result = _on_meta(function, args, kwargs)
    except (NotImplementedError, torch._subclasses.fake_tensor.DataDependentOutputException):
        return _run(function, args, kwargs)
    except RuntimeError as error:
        # Some kernels have no meta form and say so with a plain RuntimeError.
        if "meta" in str(error).lower():
            return _run(function, args, kwargs)
        _fail_as_torch_does(function, args, kwargs)
        raise
    return _recorded(function, args, kwargs, result, involved)


def _fail_as_torch_does(function: Any, args: tuple, kwargs: dict) -> None:
    """Raise the error that ``function`` raises for tensors of these shapes; meta kernels word it otherwise."""

    def blank(path: tuple, tensor: torch.Tensor) -> torch.Tensor:
        if not is_lazy(tensor):
            return _real(tensor).clone()
        meta = tensor.node.meta
        return torch.zeros(meta.shape, dtype=meta.dtype, device=tensor.node.device)

    with _NO_FUNCTION():
        args, kwargs = map_tensors((args, kwargs), blank)
    function(*args, **kwargs)


def _run(function: Any, args: tuple, kwargs: dict) -> Any:
    """Run for real, now."""
    found = lazies((args, kwargs))
    args, kwargs = resolve((args, kwargs))
    result = function(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        for lazy in found:
            if result is _real(lazy):
                return lazy  # torch answered with its argument
    return result


def _property(name: str, tensor: LazyTensor) -> Any:
    node = tensor.node
    if node.executed:
        return getattr(node.value, name)
    if name in ops.DATA_PROPERTIES:
        return record(ops.Property(name), (tensor,), {})
    if name == "device":
        return node.device
    if name in ("is_meta", "is_cpu", "is_cuda"):
        return name == f"is_{node.device.type}"
    if name == "grad":
        return None
    return getattr(node.meta, name)


def _factory(function: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``zeros_like(lazy)`` and its kind: metadata of the model, data of the other arguments."""
    if args:
        return function(_blank(args[0]), *resolve(args[1:]), **resolve(kwargs))
    rest = {key: value for key, value in kwargs.items() if key != "input"}
    return function(input=_blank(kwargs["input"]), **resolve(rest))


def _like_other(name: str, function: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """The same call without the tensor whose metadata alone it needs."""
    other = kwargs.get("other", args[1] if len(args) > 1 else None)
    if not isinstance(other, torch.Tensor):
        return function, args, kwargs
    kwargs = {key: value for key, value in kwargs.items() if key != "other"}
    mine, rest = args[0], args[2:]
    if name in ("to", "type_as"):
        move = () if _same_device(mine.device, other.device) else (other.device,)
        return torch.Tensor.to, (mine, *move, other.dtype, *rest), kwargs
    plain = {"view_as": "view", "expand_as": "expand", "reshape_as": "reshape"}[name]
    return getattr(torch.Tensor, plain), (mine, other.shape), kwargs


def _blank(value: Any) -> Any:
    """``value`` with memory of the right shape in place of its lazies."""

    def blank(path: tuple, tensor: torch.Tensor) -> torch.Tensor:
        if not is_lazy(tensor):
            return _real(tensor)
        node = tensor.node  # type: ignore[attr-defined]
        return torch.empty(node.meta.shape, dtype=node.meta.dtype, device=node.device)

    return map_tensors(value, blank)


def _moved(args: tuple, kwargs: dict) -> Any:
    """``lazy.to(...)`` when that changes nothing: torch answers with the same tensor."""
    tensor = args[0]
    if not isinstance(tensor, LazyTensor) or kwargs.get("copy"):
        return None
    device, dtype, node = kwargs.get("device"), kwargs.get("dtype"), tensor.node
    for arg in args[1:]:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, (torch.device, str)):
            device = arg
        elif isinstance(arg, torch.Tensor):
            device, dtype = arg.device, arg.dtype
        elif arg is True:
            return None
    same_device = device is None or _same_device(torch.device(device), node.device)
    if same_device and dtype in (None, node.meta.dtype):
        return tensor
    return None


def _same_device(asked: torch.device, held: torch.device) -> bool:
    return asked.type == held.type and (asked.index is None or asked.index == held.index)


def _on_meta(function: Any, args: tuple, kwargs: dict) -> Any:
    """The result's shapes: ``function`` on meta tensors."""

    inputs: list[torch.Tensor] = []

    def to_meta(path: tuple, tensor: torch.Tensor) -> torch.Tensor:
        inputs.append(_plain(tensor).to("meta"))
        return inputs[-1]

    with _NO_FUNCTION():
        call = metas.key(function, args, kwargs, _plain)
        found = metas.recall(call)
        if found is not None:
            return found
        args, kwargs = map_tensors((args, kwargs), to_meta)
        if function is torch.Tensor.to:
            args = tuple(
                torch.device("meta") if isinstance(arg, (torch.device, str)) else arg
                for arg in args
            )
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        result = function(*args, **kwargs)
        metas.remember(call, result, inputs)
        return result


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout that is no lazy."""
    if isinstance(tensor, LazyTensor):
        return tensor.node.value if tensor.node.executed else tensor.node.meta
    return tensor


def _target_device(
    function: Any, args: tuple, kwargs: dict, involved: list[LazyTensor]
) -> torch.device:
    device = kwargs.get("device")
    if function is torch.Tensor.to:
        for arg in args[1:]:
            if isinstance(arg, (torch.device, str)):
                device = arg
            elif isinstance(arg, torch.Tensor):
                device = arg.device
    return torch.device(device) if device is not None else involved[0].node.device


def _recorded(
    function: Any, args: tuple, kwargs: dict, result: Any, involved: list[LazyTensor]
) -> Any:
    with _NO_FUNCTION():
        outputs: list[tuple[tuple, torch.Tensor]] = []
        map_tensors(result, lambda path, meta: outputs.append((path, meta)))
        if not outputs:
            return result
        same = next(
            (lazy for lazy in involved if not lazy.node.executed and result is lazy.node.meta), None
        )
        if same is not None:
            return same  # torch answered with its argument (float() of a float tensor)
        device = _target_device(function, args, kwargs, involved)
        operation = _operation(function, args, kwargs, result, involved, device)

        def one(path: tuple, meta: torch.Tensor) -> LazyTensor:
            if meta is operation.meta:
                return LazyTensor.of(operation)
            node = Node(meta, device, _family(meta, involved))
            node.inputs, node.output, node.function = [operation], path, _select
            return LazyTensor.of(node)

        return map_tensors(result, one)


def _operation(
    function: Any, args: tuple, kwargs: dict, result: Any, involved: list[LazyTensor], device: Any
) -> Node:
    single = isinstance(result, torch.Tensor)
    node = Node(result, device, _family(result, involved) if single else None)
    _describe(node, function, args, kwargs, involved)
    return node


def _describe(
    node: Node, function: Any, args: tuple, kwargs: dict, involved: list[LazyTensor]
) -> None:
    """Record in ``node`` what it has to run."""
    node.function = function
    node.args, node.kwargs = map_tensors((args, kwargs), _snapshot)
    node.inputs = list(dict.fromkeys(lazy.node for lazy in involved if is_lazy(lazy)))
    for source in node.inputs:
        if source.family is not None and source.family not in (node.family, node.target):
            source.family.is_read_by(node)


def _snapshot(path: tuple, tensor: torch.Tensor) -> torch.Tensor:
    """A real argument as it is now: the engine reuses activation buffers, blocks edit in place."""
    if is_lazy(tensor) or isinstance(tensor, torch.nn.Parameter):
        return tensor
    return _real(tensor).clone()


def _family(meta: torch.Tensor, involved: list[LazyTensor]) -> Family:
    storage = meta.untyped_storage()._cdata
    for lazy in involved:
        family = lazy.node.family
        if is_lazy(lazy) and family is not None and family.storage._cdata == storage:
            return family
    return Family(meta)


def _select(node: Node) -> Any:
    value = node.inputs[0].value
    for part in node.output:
        value = value[part]
    return value


def _mutate(function: Any, args: tuple, kwargs: dict, involved: list[LazyTensor]) -> Any:
    out = kwargs.get("out")
    target = out if out is not None else args[0]
    if not isinstance(target, LazyTensor):
        return _run(function, args, kwargs)  # into a real tensor: the data is needed now
    node, family = target.node, target.node.family
    assert family is not None
    if family.fixed:
        raise BlockError(family.fixed)
    written = _written(function, args, node.meta)
    if (family.real and not family.mutations) or _memory_overlaps(node, written, involved):
        return _run(function, args, kwargs)
    try:
        result = _on_meta(function, args, kwargs)
    except RuntimeError:
        _fail_as_torch_does(function, args, kwargs)
        raise
    operation = Node(result, node.device, None)
    operation.target = family
    _describe(operation, function, args, kwargs, involved)
    family.mutations.append(operation)
    for member in family.members:
        member.cache = None
    return target if isinstance(result, torch.Tensor) else result


def _written(function: Any, args: tuple, target: torch.Tensor) -> torch.Tensor:
    """The part of ``target`` that is written: ``x[-1] += 1`` ends by writing ``x[-1]`` into itself."""
    if ops.plain_name(function) != "__setitem__" or lazies(args[1]):
        return target
    part = target[args[1]]
    return part if part.untyped_storage()._cdata == target.untyped_storage()._cdata else target


def _memory_overlaps(target: Node, written: torch.Tensor, involved: list[LazyTensor]) -> bool:
    """Whether torch may refuse to write here, which it does not find out without memory."""
    if any(size > 1 and stride == 0 for size, stride in zip(*_layout(written), strict=True)):
        return True
    start, end = _extent(written)
    for lazy in involved:
        meta = lazy.node.meta
        if lazy.node.family is target.family and meta is not target.meta:
            begins, ends = _extent(meta)
            same = begins == start and _layout(meta) == _layout(written)
            if not same and begins < end and start < ends:
                return True
    return False


def _layout(meta: torch.Tensor) -> tuple[Any, tuple]:
    return meta.shape, meta.stride()


def _extent(meta: torch.Tensor) -> tuple[int, int]:
    """The first element of the memory that ``meta`` reaches, and the one behind the last."""
    start = meta.storage_offset()
    return start, start + 1 + sum((n - 1) * step for n, step in zip(*_layout(meta), strict=True))


# --- forcing ----------------------------------------------------------------------------------


def force(tensor: Any) -> torch.Tensor:
    """The real tensor behind ``tensor``, brought here if need be."""
    if not isinstance(tensor, LazyTensor):
        return resolve(tensor)
    if not tensor.node.executed:
        materialize([tensor.node])
    return _real(tensor)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, LazyTensor):
        node = tensor.node
        return node.value if node.done else node.cache
    return tensor


def resolve(value: Any) -> Any:
    """``value`` with every lazy in it replaced by its data; one exchange for all of them."""
    found = lazies(value)
    if not found:
        return value
    materialize([lazy.node for lazy in found])
    return map_tensors(value, lambda path, tensor: _real(tensor))


def prefetch(value: Any) -> None:
    """Ask for what `resolve` of ``value`` would bring, without waiting for it."""
    plan, _ = _plan([lazy.node for lazy in lazies(value)])
    if plan:
        plan[0][1].fetcher.request([(base, text) for _, base, text in plan])


def materialize(wanted: Iterable[Node]) -> None:
    """Bring the data of ``wanted`` here: pull what moves least, then replay what was recorded."""
    with threadstate.apart():
        _materialize(wanted)


def _materialize(wanted: Iterable[Node]) -> None:
    plan, order = _plan(wanted)
    if plan:
        values = plan[0][1].fetcher.fetch([(base, text) for _, base, text in plan])
        for (node, _, _), value in zip(plan, values, strict=True):
            if node.done:
                continue  # another worker forced it while this one was parked
            if node.base is not None:
                node.settle(value)
            elif expression.is_view(node):
                node.cache = value
            else:
                # The same expression of another node is answered with the same tensor.
                node.settle(value.clone())
    _replay([*(node for node, _, _ in plan), *order])


def _plan(wanted: Iterable[Node]) -> tuple[list[tuple[Node, Base, str]], list[Node]]:
    """What to pull for ``wanted``, and what to execute here afterwards, in order."""
    plan: list[tuple[Node, Base, str]] = []
    local: list[Node] = []
    for node in dict.fromkeys(wanted):
        if node.executed or node.cache is not None:
            continue
        shipped = expression.shipped(node)
        if shipped is not None:
            plan.append((node, *shipped))
        else:
            local.append(node)
    if not local:
        return plan, []
    origins = expression.Origins()
    order, parts = _closure(local, origins)
    whole = _whole(order, parts, origins)
    if whole:
        order, parts = _closure(local, origins, whole)
    plan += parts
    for node in order:
        if node.base is not None:
            plan.append((node, node.base, expression.of_leaf(node.leaf)))
    return plan, order


def _whole(
    order: list[Node], parts: list[tuple[Node, Base, str]], origins: expression.Origins
) -> set[Base]:
    """The accesses of which parts would move more than all: that is needed too, or they are many."""
    taken: dict[Base, dict[str, int]] = {}
    for node, base, text in parts:
        taken.setdefault(base, {})[text] = expression.size_bytes(node)
    whole = {node.base for node in order if node.base is not None}
    for base, sizes in taken.items():
        if sum(sizes.values()) + _MESSAGE_BYTES * (len(sizes) - 1) > origins.size_bytes(base):
            whole.add(base)
    return whole.intersection(taken)


def _closure(
    wanted: list[Node], origins: expression.Origins, whole: Container[Base] = ()
) -> tuple[list[Node], list[tuple[Node, Base, str]]]:
    """Every node that has to run for ``wanted`` to be what the block sees now, in program order.

    Args:
        whole: accesses of which no part is pulled by itself.

    Returns:
        The nodes, and what is pulled instead of more of them: a part that is made of one access alone
        is evaluated where that is.
    """
    needed: dict[int, Node] = {}
    parts: dict[int, tuple[Node, Base, str]] = {}
    # A node, and the point of the program up to which its memory's mutations matter.
    stack: list[tuple[Node, float]] = [(node, float("inf")) for node in wanted]
    while stack:
        node, until = stack.pop()
        for mutation in node.family.mutations if node.family is not None else ():
            if mutation.sequence < until and mutation.sequence not in needed:
                stack.append((mutation, mutation.sequence))
        if node.done or node.cache is not None or node.sequence in needed or node.sequence in parts:
            continue
        origin = origins.of(node) if isinstance(node.meta, torch.Tensor) else None
        if origin is not None and origin not in whole:
            shipped = expression.shipped(node)
            if shipped is not None:
                parts[node.sequence] = node, *shipped
                continue
        needed[node.sequence] = node
        for source in node.inputs:
            alias = source.family is not None and source.family is node.family
            stack.append((source, until if alias else node.sequence))
    return [needed[sequence] for sequence in sorted(needed)], [parts[s] for s in sorted(parts)]


def _replay(start: Iterable[Node]) -> None:
    """Execute ``start``, and all that follows from it and needs no data that is not here.

    In program order: whatever a node depends on was recorded before it.
    """
    nodes = dict.fromkeys(start)
    if all(node.done and _is_alone(node) for node in nodes):
        return
    heap = [(node.sequence, node) for node in nodes]
    heapq.heapify(heap)
    queued = {sequence for sequence, _ in heap}
    while heap:
        _, node = heapq.heappop(heap)
        if not node.done and (not _try(node) or not node.done):
            continue
        for family in (node.family, node.target):
            if family is None:
                continue
            for follower in (*family.members, *family.mutations, *family.readers):
                if not follower.done and follower.sequence not in queued:
                    queued.add(follower.sequence)
                    heapq.heappush(heap, (follower.sequence, follower))


def _is_alone(node: Node) -> bool:
    """Whether nothing is in the node's memory but it, or is made of that."""
    family = node.family
    if node.target is not None:
        return False
    return family is None or (
        len(family.members) == 1 and not family.mutations and not len(family.readers)
    )


def _try(node: Node) -> bool:
    """Execute ``node`` if everything it reads is here; whether it was."""
    if node.base is not None:
        return False
    ready, here = True, []
    for source in node.inputs:
        family = source.family
        if family is not None and family is not node.family:
            blocked = any(mutation.sequence < node.sequence for mutation in family.mutations)
        else:
            blocked = False
        if blocked or not (source.done or source.cache is not None):
            ready = False
        elif source.done:
            here.append(source)
    if ready:
        _execute(node)
    else:
        _detach(node, here)
    return ready


def _detach(node: Node, here: list[Node]) -> None:
    """Let ``node``, which cannot run yet, keep what it reads of memory that is about to change."""
    kept: dict[Node, Node] = {}
    for source in here:
        family = source.family
        if family is not None and family not in (node.family, node.target):
            copied = Node(source.meta, source.device, None)
            copied.settle(source.value.clone())
            kept[source] = copied
            if family.readers:
                family.readers.discard(node)

    def keep(path: tuple, tensor: torch.Tensor) -> torch.Tensor:
        found = kept.get(tensor.node) if isinstance(tensor, LazyTensor) else None
        return LazyTensor.of(found) if found is not None else tensor

    if kept:
        node.args, node.kwargs = map_tensors((node.args, node.kwargs), keep)
        node.inputs = [source for source in node.inputs if source not in kept]


def _execute(node: Node) -> None:
    with _NO_FUNCTION():
        if node.function is _select:
            node.settle(_select(node))
            return
        args, kwargs = map_tensors((node.args, node.kwargs), lambda path, tensor: _real(tensor))
        result = node.function(*args, **kwargs)  # type: ignore[misc]
        if node.target is not None:
            node.target.mutations.remove(node)
    if any(not s.done and s.family is node.family is not None for s in node.inputs):
        # A view of what was pulled by itself: right for now, but not in the family's own memory.
        node.cache = result
    else:
        node.settle(result)
