"""What blocks hold: boxes over nodes, the simulator's tensors and lazies.

A [`Node`][ppsim.values.Node] is immutable in meaning: a term, or a recipe for one that needs data of
other stages. A [`Box`][ppsim.values.Box] is what a name in a block stands for; editing it in place
gives it another node. So a value derived before an edit keeps the old node, as with real tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ppcore.core import Available
from ppcore.messages import Key

from .terms import PARAM, term


class Forgetful(Protocol):
    """Where a base says that nobody needs it any more."""

    def forgotten(self, base: Base) -> None:
        """See `ppcore.runtime.link.Link.forgotten`."""


class Base:
    """One remote read: where its value lives (the runtime's class of that name, without torch)."""

    __slots__ = ("available", "key", "link", "location", "numbers", "owner")

    def __init__(
        self, link: Forgetful, key: Key, location: str, owner: int, available: Available
    ) -> None:
        self.link = link
        self.key = key
        self.location = location
        self.owner = owner
        self.available = available
        self.numbers: list[int] = []

    def __del__(self) -> None:
        self.link.forgotten(self)


class Node:
    """A term, or how to get one.

    Attributes:
        value: the term; None while it needs data that is not here.
        base: the remote read that this node is, if it is one.
        head: the operation (and its constants) that comes before the arguments.
        args: the nodes that the operation is applied to.
    """

    __slots__ = ("args", "base", "head", "value")

    def __init__(
        self,
        value: int | None,
        base: Base | None = None,
        head: tuple[int, ...] = (),
        args: tuple[Node, ...] = (),
    ) -> None:
        self.value = value
        self.base = base
        self.head = head
        self.args = args

    def settle(self, value: int) -> None:
        """The term is known: forget how to get it, and with that the reads it came from."""
        self.value = value
        self.base = None
        self.args = ()

    def evaluate(self) -> int:
        """The term, once every base below has settled."""
        if self.value is None:
            self.settle(term(*self.head, *[arg.evaluate() for arg in self.args]))
        assert self.value is not None
        return self.value

    def unsettled(self) -> Iterator[Node]:
        """The bases below that have not settled, each once, in the order of the recipe."""
        seen: set[int] = set()
        stack = [self]
        while stack:
            node = stack.pop()
            if node.value is not None or id(node) in seen:
                continue
            seen.add(id(node))
            if node.base is not None:
                yield node
            else:
                stack.extend(reversed(node.args))

    def shipped(self) -> tuple[Node, str] | None:
        """For a chain of one-argument operations on a base: the base, and the chain as text."""
        heads: list[str] = []
        node = self
        while node.value is None and node.base is None and len(node.args) == 1:
            heads.append(".".join(map(str, node.head)))
            node = node.args[0]
        if node.value is not None or node.base is None:
            return None
        return node, ",".join(reversed(heads))


def operation(head: tuple[int, ...], *args: Node) -> Node:
    """The node of an operation: its term at once where the arguments are known."""
    parts = [*head]
    for arg in args:
        if arg.value is None:
            return Node(None, None, head, args)
        parts.append(arg.value)
    return Node(term(*parts))


def parameter(location: str) -> int:
    """The term of the parameter of a module that ``location`` names."""
    return term(PARAM, *location.encode())


def evaluate(expression: str, value: int) -> int:
    """What the owner does with a pull's expression."""
    for head in expression.split(",") if expression else ():
        value = term(*map(int, head.split(".")), value)
    return value


class Visit:
    """One visit of a location for one request: the value that the model will carry on with.

    Attributes:
        value: that value.
        box: what edits in place change it, while a worker stands at this visit.
    """

    __slots__ = ("box", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.box: Box | None = None


class Box:
    """What a name in a block stands for."""

    __slots__ = ("node", "visit")

    def __init__(self, node: Node, visit: Visit | None = None) -> None:
        self.node = node
        self.visit = visit

    def edit(self, node: Node) -> None:
        """The value becomes ``node``, also for the model where it is still at that visit."""
        self.node = node
        visit = self.visit
        if visit is not None and visit.box is self:
            visit.value = node.evaluate()
