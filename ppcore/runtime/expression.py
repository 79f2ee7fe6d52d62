"""The part of a recorded computation that travels with a pull.

``layers[5].output[0][-1]`` should bring one row, not the prompt: where everything that a lazy was
made of comes from one access, and torch operations with plain arguments made it, the owner can
evaluate the same thing beside the data. An expression is JSON: a list of operations by name (see
`ops`), each argument a plain value, a leaf of the access, or an earlier operation's result.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from . import ops
from .codec import dtype_name

if TYPE_CHECKING:
    from .lazy import Base, Node

#: Longest expression that a rank evaluates for a peer, in characters.
LIMIT = 1 << 16


class _Unshippable(Exception):
    pass


@lru_cache(maxsize=256)
def of_leaf(path: tuple) -> str:
    """The expression for one whole tensor of an access."""
    return json.dumps([[], {"l": list(path)}], separators=(",", ":"))


def is_view(node: Node) -> bool:
    """Whether the node lies in memory that a leaf of an access owns."""
    sources = node.inputs[0].inputs if node.output else node.inputs
    return node.family is not None and any(source.family is node.family for source in sources)


def shipped(node: Node) -> tuple[Base, str] | None:
    """The access and the expression to pull for ``node``, where that moves no more than its leaves."""
    if node.base is not None:
        return None
    spelling = _Spelling()
    try:
        result = spelling.visit(node)
    except (_Unshippable, RecursionError):
        return None
    if len(spelling.bases) != 1:
        return None
    if size_bytes(node) > sum(spelling.leaves.values()):
        return None
    text = json.dumps([spelling.steps, result], separators=(",", ":"))
    return (next(iter(spelling.bases.values())), text) if len(text) <= LIMIT else None


def size_bytes(node: Node) -> int:
    """Bytes of the tensor that a node is."""
    return node.meta.numel() * node.meta.element_size()


class Origins:
    """Which access each node is made of, where that is one alone."""

    def __init__(self) -> None:
        self._found: dict[int, Base | None] = {}
        self._leaves: dict[Base, dict[int, int]] = {}

    def of(self, node: Node) -> Base | None:
        """The access; None where there is none or are several, or some of the data is here."""
        stack = [node]
        while stack:
            part = stack[-1]
            if part.sequence in self._found:
                stack.pop()
                continue
            left = [source for source in part.inputs if source.sequence not in self._found]
            if left and not _settled(part):
                stack += left
                continue
            self._found[part.sequence] = self._origin(part)
            stack.pop()
        return self._found[node.sequence]

    def _origin(self, part: Node) -> Base | None:
        if _settled(part):
            return None
        if part.base is not None:
            self._leaves.setdefault(part.base, {})[part.sequence] = size_bytes(part)
            return part.base
        origins = {self._found[source.sequence] for source in part.inputs}
        return origins.pop() if len(origins) == 1 else None

    def size_bytes(self, base: Base) -> int:
        """Bytes of those leaves of an access that were come across."""
        return sum(self._leaves[base].values())


def _settled(part: Node) -> bool:
    """Whether a node's data, or a change of it, is here."""
    family = part.family
    return part.executed or part.cache is not None or bool(family and family.mutations)


def of_base(node: Node) -> tuple[Base, str] | None:
    """The access and the expression that ``node`` is, whatever that moves; None if it is none."""
    family = node.family
    if node.base is None:
        return shipped(node)
    if node.executed or (family is not None and family.mutations):
        return None
    return node.base, of_leaf(node.leaf)


_SELECT = "select"


class _Spelling:
    """The steps of one expression, as they are found.

    A class and not a closure that calls itself: that would be a reference cycle, and keep the bases
    from being released until the garbage collector comes by.
    """

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self.bases: dict[int, Base] = {}
        # Leaf's sequence -> its bytes.
        self.leaves: dict[int, int] = {}
        self._done: dict[int, int] = {}

    def visit(self, part: Node) -> Any:
        if _settled(part):
            raise _Unshippable
        if part.base is not None:
            self.bases[id(part.base)] = part.base
            self.leaves[part.sequence] = size_bytes(part)
            return {"l": list(part.leaf)}
        if part.sequence in self._done:
            return {"r": self._done[part.sequence]}
        if part.output:
            step = [_SELECT, [self.visit(part.inputs[0]), {"t": list(part.output)}], {}]
        else:
            name = ops.name_of(part.function)
            if name is None:
                raise _Unshippable
            step = [
                name,
                [self._encode(arg) for arg in part.args],
                {key: self._encode(arg) for key, arg in part.kwargs.items()},
            ]
        self.steps.append(step)
        self._done[part.sequence] = len(self.steps) - 1
        return {"r": self._done[part.sequence]}

    def _encode(self, value: Any) -> Any:
        from .lazy import LazyTensor

        if isinstance(value, LazyTensor):
            return self.visit(value.node)
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if value == value and abs(value) != float("inf") else {"f": repr(value)}
        if isinstance(value, slice):
            return {"s": [self._encode(part) for part in (value.start, value.stop, value.step)]}
        if value is Ellipsis:
            return {"e": 1}
        if isinstance(value, torch.dtype):
            return {"d": dtype_name(value)}
        if isinstance(value, (tuple, torch.Size)):
            return {"t": [self._encode(part) for part in value]}
        if isinstance(value, list):
            return [self._encode(part) for part in value]
        raise _Unshippable


@lru_cache(maxsize=256)
def _short(text: str) -> Any:
    """The same texts come with every step; nobody changes what this returns."""
    return json.loads(text)


def _parsed(text: str) -> Any:
    return _short(text) if len(text) <= 1024 else json.loads(text)


def evaluate(text: str, value: Any) -> Any:
    """Evaluate an expression that a peer sent on ``value``, the published structure.

    Raises:
        ValueError: the text is no expression, or names an operation that may not travel.
    """
    if len(text) > LIMIT:
        raise ValueError(f"an expression of {len(text)} characters is over the limit of {LIMIT}")
    try:
        steps, result = _parsed(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not an expression: {text[:200]!r}") from error
    results: list[Any] = []
    for name, args, kwargs in steps:
        if name == _SELECT:
            chosen = [_decode(arg, value, results) for arg in args]
            results.append(_walk(chosen[0], chosen[1]))
        else:
            function = ops.function_of(name)
            given = [_decode(arg, value, results) for arg in args]
            named = {key: _decode(arg, value, results) for key, arg in kwargs.items()}
            results.append(function(*given, **named))
    return _decode(result, value, results)


def _decode(part: Any, value: Any, results: list[Any]) -> Any:
    if isinstance(part, list):
        return [_decode(item, value, results) for item in part]
    if not isinstance(part, dict):
        return part
    ((kind, body),) = part.items()
    match kind:
        case "l":
            return _walk(value, body)
        case "r":
            return results[body]
        case "s":
            return slice(*(_decode(item, value, results) for item in body))
        case "e":
            return Ellipsis
        case "d":
            found = getattr(torch, body, None)
            if not isinstance(found, torch.dtype):
                raise ValueError(f"{body!r} is no dtype")
            return found
        case "t":
            return tuple(_decode(item, value, results) for item in body)
        case "f":
            return float(body)
    raise ValueError(f"{kind!r} is no part of an expression")


def _walk(value: Any, path: Any) -> Any:
    for part in path:
        value = value[part]
    return value
