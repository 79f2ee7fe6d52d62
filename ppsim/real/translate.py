"""A program as the text of a real nnsight block.

The statements of `ppsim.programs` become lines of Python; how a location is spelled, and what shape a
replacement has to have, is a `Target`'s to say, so that one program runs on a small exact model and on
an engine's. All arithmetic is of numbers below `PRIME`; the exact model's are whole, which every dtype in
use holds exactly.

A statement about a name that is not bound does nothing. Where that can be known from the text alone no
line of Python says so; elsewhere the name starts as None and the line asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

from ppsim.cases import Case, Request
from ppsim.programs import (
    Append,
    Blend,
    Block,
    Cache,
    Call,
    Derive,
    Edit,
    For,
    If,
    Mix,
    Param,
    Put,
    Raise,
    Read,
    Save,
    Skip,
    Statement,
    Stop,
    Write,
    walk,
)

from .exact import HIDDEN, PRIME


class Target(Protocol):
    """How one model's locations are spelled."""

    def read(self, location: str) -> str:
        """The expression that reads a location's tensor."""

    def write(self, location: str, value: str) -> str:
        """The statement that puts the expression ``value`` (one row, or one number) there."""

    def skip(self, path: str, value: str) -> str:
        """The statement that skips a module with ``value`` in place of its output."""

    def call(self, path: str, value: str) -> str:
        """The expression that calls a module with ``value``."""

    def weight(self, path: str) -> str:
        """The expression for a module's weight, as one row."""

    def module(self, path: str) -> str:
        """The expression for a module."""


def write_samples(value: str) -> str:
    """The statement that replaces the sampled tokens, the same for every model."""
    return f"model.samples = ({value}.sum(-1, keepdim=True) % {PRIME}).to(torch.int32)"


class ExactTarget:
    """`ppsim.real.exact.Exact`.

    Args:
        one_row: whether the request has one row in every step, so that a replacement's shape is
            known. Otherwise it takes its shape from what it replaces.
    """

    def __init__(self, one_row: bool) -> None:
        self.one_row = one_row

    def read(self, location: str) -> str:
        if location == "result":
            return "torch.tensor([[float(sum(tracer.result.tokens))]], dtype=torch.float64)"
        if location in ("logits", "samples"):
            return f"model.{location}"
        path, _, side = location.rpartition(".")
        match side:
            case "in":
                return f"{self.module(path)}.input"
            case "ghost":
                return f"{self.module(path)}.ghost.output"
            case "out" if path.startswith("L"):
                return f"{self.module(path)}.output[0]"
        return f"{self.module(path)}.output"

    def write(self, location: str, value: str) -> str:
        if location == "samples":
            return write_samples(value)
        if location == "logits":
            return f"model.logits = {self._rows(value, 'model.logits', one_row=True)}"
        path, _, side = location.rpartition(".")
        place = self.read(location).removesuffix("[0]")
        rows = self._rows(value, self.read(location), one_row=self.one_row)
        if side == "out" and path.startswith("L"):
            return f"{place} = ({rows}, {place}[1])"
        return f"{place} = {rows}"

    def skip(self, path: str, value: str) -> str:
        module = self.module(path)
        rows = self._rows(value, f"{module}.input", one_row=self.one_row)
        return f"{module}.skip(({rows}, {rows} + 1))"

    def call(self, path: str, value: str) -> str:
        return f"{self.module(path)}({value})"

    def weight(self, path: str) -> str:
        return f"{self.module(path)}.weight[None]"

    def _rows(self, value: str, instead_of: str, *, one_row: bool) -> str:
        if one_row:
            return f"({value} + torch.zeros(1, {HIDDEN}, dtype=torch.float64))"
        return f"({instead_of} * 0 + {value})"

    def module(self, path: str) -> str:
        if path[0] == "L":
            return f"model.model.layers[{path[1:]}]"
        return {
            "S": "model.model.layers[0].shared",
            "N": "model.model.norm",
            "E": "model.model.embed",
        }[path]


def block(statements: Block, target: Target, containers: Sequence[str] = ()) -> str:
    """The lines of a block's body.

    Args:
        containers: names of lists that are bound above the block.
    """
    return _Writer(target, set(containers)).text(statements)


@dataclasses.dataclass
class _Writer:
    target: Target
    containers: set[str]
    doubtful: set[str] = dataclasses.field(default_factory=set)
    lists: set[str] = dataclasses.field(default_factory=set)

    def text(self, statements: Block) -> str:
        bound = set(_bound(statements))
        body = list(self._lines(statements, set(), bound, ""))
        head = [f"{name} = list().save()\n" for name in sorted(self.lists)]
        head += [f"{name} = None\n" for name in sorted(self.doubtful)]
        # A cache is opened before anything is touched, and stands first where it stands first.
        return "".join([*head, *body]) or "pass\n"

    def _lines(
        self, statements: Block, sure: set[str], bound: set[str], indent: str
    ) -> Iterator[str]:
        """``sure`` are the names that are bound here; ``bound`` those that any line binds."""
        for statement in statements:
            if isinstance(statement, For):
                yield f"{indent}for step in {_steps(statement)}:\n"
                yield from self._body(statement.body, sure, bound, indent)
                continue
            used = _used(statement)
            if not used <= bound:
                continue
            asks = sorted(used - sure)
            self.doubtful.update(asks)
            doubt = " and ".join(f"{name} is not None" for name in asks)
            if isinstance(statement, If):
                truth = f"{statement.name}.sum() % 2 < 1"
                yield f"{indent}if {f'{doubt} and ' if doubt else ''}{truth}:\n"
                yield from self._body(statement.body, sure, bound, indent)
                continue
            line = self._line(statement)
            if line is None:
                continue
            yield f"{indent}if {doubt}:\n{indent}    {line}\n" if doubt else f"{indent}{line}\n"
            name = getattr(statement, "name", None)
            if not doubt and isinstance(statement, _BINDING) and name is not None:
                sure.add(name)

    def _body(
        self, statements: Block, sure: set[str], bound: set[str], indent: str
    ) -> Iterator[str]:
        inner = list(self._lines(statements, set(sure), bound, indent + "    "))
        yield from inner or [f"{indent}    pass\n"]

    def _line(self, statement: Statement) -> str | None:
        target = self.target
        match statement:
            case Read(name, location):
                return f"{name} = {target.read(location)}"
            case Write(location, name):
                return target.write(location, f"{name}[-1:]")
            case Skip(path, name):
                return target.skip(path, f"{name}[-1:]")
            case Edit(name, constant):
                return f"{name}[:] = ({name} * 3 + {constant}) % {PRIME}"
            case Blend(name, other):
                return f"{name}[:] = ({name} * 5 + {_number(other)} * 7 + 1) % {PRIME}"
            case Derive(name, source, constant):
                return f"{name} = ({source} * 5 + {constant}) % {PRIME}"
            case Mix(name, first, second):
                return f"{name} = ({first} * 7 + {_number(second)} * 11 + 1) % {PRIME}"
            case Save(label, name):
                return f"{label} = {name}.save()"
            case Append(label, name):
                if label not in self.containers:
                    self.lists.add(label)
                return f"{label}.append({name})"
            case Put(label, slot, name):
                return f"{label}[{slot}] = {name}" if label in self.containers else None
            case Param(name, location):
                path, _, _ = location.rpartition(".")
                return f"{name} = {target.weight(path)}"
            case Cache(label, inputs, paths):
                modules = ", ".join(target.module(path) for path in paths)
                arguments = [f"modules=[{modules}]"] if paths else []
                arguments += ["include_inputs=True"] if inputs else []
                return f"{label} = tracer.cache({', '.join(arguments)})"
            case Call(name, path, source):
                return f"{name} = {target.call(path, source)}"
            case Stop():
                return "tracer.stop()"
            case Raise(code):
                return f"raise ValueError('{code}')"
        raise ValueError(f"no translation for {statement!r}")


def _number(name: str) -> str:
    """One number of a value of any shape, which combines with any shape."""
    return f"{name}[-1:].sum(-1, keepdim=True)"


_BINDING = (Read, Derive, Mix, Call, Param)


def _bound(statements: Sequence[Statement]) -> Iterator[str]:
    """The names that any line binds."""
    for statement in statements:
        if isinstance(statement, _BINDING):
            yield statement.name
        elif isinstance(statement, If | For):
            yield from _bound(statement.body)


def _used(statement: Statement) -> set[str]:
    """The names without which a statement does nothing."""
    match statement:
        case Write(_, name) | Skip(_, name) | Edit(name, _) | Save(_, name) | Append(_, name):
            return {name}
        case Put(_, _, name) | If(name, _):
            return {name}
        case Blend(name, other):
            return {name, other}
        case Derive(_, source, _) | Call(_, _, source):
            return {source}
        case Mix(_, first, second):
            return {first, second}
    return set()


def _steps(loop: For) -> str:
    if loop.steps is not None:
        return f"tracer.iter[{list(loop.steps)}]"
    if loop.stop is None:
        return f"tracer.iter[{loop.start}:]" if loop.start else "tracer.all()"
    if loop.stop == loop.start + 1:
        return f"tracer.iter[{loop.start}]"
    return f"tracer.iter[{loop.start}:{loop.stop}]"


def ends(case: Case) -> bool:
    """Whether every loop without an end waits for the model, whatever its branches do."""
    return all(_waits(body) for request in case.requests for _, body in request.blocks)


def _waits(statements: Sequence[Statement]) -> bool:
    for statement in statements:
        if not isinstance(statement, If | For):
            continue
        if not _waits(statement.body):
            return False
        if _open_ended(statement) and not any(isinstance(s, Read) for s in statement.body):
            return False
    return True


def known_to_differ(case: Case) -> bool:
    """Whether a case need not give what one rank gives."""
    return shared_edits(case)


def shared_edits(case: Case) -> bool:
    """Whether a block may edit a value in place that another one of its request goes on with.

    On one rank both have the same memory, and the other, parked on a later visit meanwhile, goes on
    with what was edited; on a stage that has the value from elsewhere it goes on with what it read: a
    known difference (see `docs/simulator.md`).
    """
    for request in case.requests:
        bodies = [list(walk(body)) for _, body in request.blocks]
        held = [_held(body) for body in bodies]
        for number, body in enumerate(bodies):
            reads = {s.location for s in body if isinstance(s, Read)}
            others = set().union(*held[:number], *held[number + 1 :])
            if reads & others and any(isinstance(s, Edit | Blend) for s in body):
                return True
    return False


def _held(statements: Sequence[Statement]) -> set[str]:
    """The locations whose values a block may still have when it waits for another visit."""
    asking = [s for s in statements if isinstance(s, Read | Write | Skip)]
    last = None if any(isinstance(s, For) for s in statements) else -1
    return {s.location for s in asking[:last] if isinstance(s, Read)}


def _open_ended(statement: If | For) -> bool:
    return isinstance(statement, For) and statement.steps is None and statement.stop is None


def prompt(case: Case, request: Request) -> list[int]:
    """The request's prompt: one token for the first, more for those after it."""
    index = case.requests.index(request)
    return [7 * index + 3 + 5 * position for position in range((1, 3, 2)[index % 3])]


def one_row(case: Case, request: Request) -> bool:
    """Whether the request has one row in every step; a preempted one is computed anew, all rows."""
    return len(prompt(case, request)) == 1 and not case.batching


def source(case: Case) -> str:
    """The whole case as an nnsight program, to be read."""
    lines = [f"{label} = [None] * {slots}  # saved\n" for label, slots in case.containers]
    containers = [label for label, _ in case.containers]
    for request in case.requests:
        target = ExactTarget(one_row(case, request))
        for name, body in request.blocks:
            own = containers if not name else []
            head = (
                f"with model.edit(name={f'{request.name}.{name}'!r}) as tracer:"
                if name
                else f"with model.trace({prompt(case, request)}, max_tokens={request.tokens}) as tracer:"
            )
            lines.append(f"# request {request.name}\n{head}\n")
            text = block(body, target, own)
            lines += [f"    {line}\n" for line in text.splitlines()]
    return "".join(lines)
