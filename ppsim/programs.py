"""Programs: intervention blocks in a small language that prints and parses back.

One statement a line; a loop's or a branch's body is indented by two spaces. What each line is in an
nnsight block, where ``layers`` are the model's and ``f``, ``g`` are fixed functions of tensors:

    for 0:3              for step in tracer.iter[0:3]; also `for :` (`tracer.all()`), `for 2:`,
                         `for 1:2` (`tracer.iter[1]`), `for [0,2]`, `for [2,0]`; they nest
      a = read L1.out    a = layers[1].output
      edit a 5           a[:] = f5(a): seen by the model where it is still at that visit
      blend a b          a[:] = g(a, b)
      c = derive a 3     c = f3(a)
      d = mix a c        d = g(a, c)
      write L2.in d      layers[2].input = d
      skip L2 d          layers[2].skip(d): the layer does not run, its output is d
      save x c           x = c.save()
      append out c       out.append(c), where out is a saved list
      put rows 1 c       rows[1] = c, where rows is a container of the case (see `cases`)
      if a               if bool(a): forces it
      stop               tracer.stop()
      raise 7            raise Error(7)
      e = call N a       e = model.norm(a), run where N is real
      p = param N.w      p = model.norm.weight
      cache k            k = tracer.cache(); `cache k L0 L1` of these modules only, and
                         `cache k in L0` with include_inputs=True. A block that has touched a
                         value cannot open a cache any more: nnsight raises there.

A statement about a name that was not bound does nothing. A block's text is its statements; a case
(see `cases`) is blocks for several requests and the engine's settings. `tracer.barrier` is not in the
language: nnsight refuses it on vLLM, where each invoke is a request of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Read:
    name: str
    location: str


@dataclass(frozen=True, slots=True)
class Write:
    location: str
    name: str


@dataclass(frozen=True, slots=True)
class Skip:
    path: str
    name: str


@dataclass(frozen=True, slots=True)
class Edit:
    name: str
    constant: int


@dataclass(frozen=True, slots=True)
class Blend:
    name: str
    other: str


@dataclass(frozen=True, slots=True)
class Derive:
    name: str
    source: str
    constant: int


@dataclass(frozen=True, slots=True)
class Mix:
    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Save:
    label: str
    name: str


@dataclass(frozen=True, slots=True)
class Append:
    label: str
    name: str


@dataclass(frozen=True, slots=True)
class Put:
    label: str
    slot: int
    name: str


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    location: str


@dataclass(frozen=True, slots=True)
class Cache:
    """``paths`` are the modules to keep, empty for all; ``inputs`` keeps their inputs too."""

    label: str
    inputs: bool
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    path: str
    source: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Raise:
    code: int


@dataclass(frozen=True, slots=True)
class If:
    name: str
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class For:
    """``steps`` where the steps are listed; else from ``start`` to ``stop``, or without end."""

    start: int
    stop: int | None
    steps: tuple[int, ...] | None
    body: tuple[Statement, ...]


Statement: TypeAlias = (
    "Read | Write | Skip | Edit | Blend | Derive | Mix | Save | Append | Put | Param | Cache | Call "
    "| Stop | Raise | If | For"
)
Block: TypeAlias = "tuple[Statement, ...]"


def spell(block: Sequence[Statement], indent: str = "") -> str:
    """The block's text, one statement a line."""
    return "".join(_lines(block, indent))


def _lines(block: Sequence[Statement], indent: str) -> Iterator[str]:
    for statement in block:
        yield f"{indent}{_head(statement)}\n"
        if isinstance(statement, If | For):
            yield from _lines(statement.body, indent + "  ")


def _head(statement: Statement) -> str:
    match statement:
        case Read(name, location):
            return f"{name} = read {location}"
        case Write(location, name):
            return f"write {location} {name}"
        case Skip(path, name):
            return f"skip {path} {name}"
        case Put(label, slot, name):
            return f"put {label} {slot} {name}"
        case Param(name, location):
            return f"{name} = param {location}"
        case Cache(label, inputs, paths):
            return " ".join(["cache", label, *(["in"] if inputs else []), *paths])
        case Edit(name, constant):
            return f"edit {name} {constant}"
        case Blend(name, other):
            return f"blend {name} {other}"
        case Derive(name, source, constant):
            return f"{name} = derive {source} {constant}"
        case Mix(name, first, second):
            return f"{name} = mix {first} {second}"
        case Save(label, name):
            return f"save {label} {name}"
        case Append(label, name):
            return f"append {label} {name}"
        case Call(name, path, source):
            return f"{name} = call {path} {source}"
        case Stop():
            return "stop"
        case Raise(code):
            return f"raise {code}"
        case If(name):
            return f"if {name}"
        case For(start, stop, steps):
            if steps is not None:
                return f"for [{','.join(map(str, steps))}]"
            return f"for {start or ''}:{'' if stop is None else stop}"


def parse(text: str) -> Block:
    """The block that ``text`` spells.

    Raises:
        ValueError: the text spells none; the message names the line.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    block, rest = _parse(lines, 0, "")
    if rest != len(lines):
        raise ValueError(f"indented too far: {lines[rest]!r}")
    return block


def _parse(lines: list[str], at: int, indent: str) -> tuple[Block, int]:
    block: list[Statement] = []
    while at < len(lines):
        line = lines[at]
        if not line.startswith(indent) or line[len(indent)] == " ":
            break
        words = line.split()
        at += 1
        if words[0] in ("if", "for"):
            body, at = _parse(lines, at, indent + "  ")
            if not body:
                raise ValueError(f"nothing below {line!r}")
            block.append(If(words[1], body) if words[0] == "if" else _loop(words[1], body))
        else:
            block.append(_simple(words, line))
    return tuple(block), at


def _loop(spec: str, body: Block) -> For:
    if spec.startswith("["):
        return For(0, None, tuple(int(step) for step in spec[1:-1].split(",")), body)
    start, _, stop = spec.partition(":")
    return For(int(start or 0), int(stop) if stop else None, None, body)


def _simple(words: list[str], line: str) -> Statement:
    match words:
        case [name, "=", "read", location]:
            return Read(name, location)
        case [name, "=", "derive", source, constant]:
            return Derive(name, source, int(constant))
        case [name, "=", "mix", first, second]:
            return Mix(name, first, second)
        case [name, "=", "call", path, source]:
            return Call(name, path, source)
        case ["write", location, name]:
            return Write(location, name)
        case ["skip", path, name]:
            return Skip(path, name)
        case ["put", label, slot, name]:
            return Put(label, int(slot), name)
        case [name, "=", "param", location]:
            return Param(name, location)
        case ["cache", label, "in", *paths]:
            return Cache(label, True, tuple(paths))
        case ["cache", label, *paths]:
            return Cache(label, False, tuple(paths))
        case ["edit", name, constant]:
            return Edit(name, int(constant))
        case ["blend", name, other]:
            return Blend(name, other)
        case ["save", label, name]:
            return Save(label, name)
        case ["append", label, name]:
            return Append(label, name)
        case ["stop"]:
            return Stop()
        case ["raise", code]:
            return Raise(int(code))
    raise ValueError(f"not a statement: {line!r}")


def walk(block: Sequence[Statement]) -> Iterator[Statement]:
    """Every statement of a block, bodies included, in the order of its text."""
    for statement in block:
        yield statement
        if isinstance(statement, If | For):
            yield from walk(statement.body)


def size(block: Sequence[Statement]) -> int:
    """How many statements a block has, bodies included."""
    return sum(1 for _ in walk(block))
