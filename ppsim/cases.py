"""Cases: everything that a run is made of, apart from its schedule.

A case prints as text that parses back:

    stages 2 columns 1 layers 2 shared 0 batching 7
    container rows 3
    request A tokens 3 eos 1 after 2
      a = read L0.out
      save x a
    block A tap
      b = read L3.out
    fault raise 1 0 A 3

`layers` counts them per stage. `shared` puts a module ``S`` on every stage, visited on each.
`batching` seeds the engine's choices (whom to batch, whom to preempt); 0 batches everyone always.
`container LABEL N` is a list of N None, bound and saved above the traced blocks: the requests are the
invokes of one trace. `block` installs a further worker for a request, as a registered edit does.

A request's settings: `ignore_eos`; `eos N`, of eight sampled tokens N are the end of the sequence;
`stop N`, the client sees a stop string in the N-th token, and the engine hears of it some steps later;
`n N`, so many sequences are sampled, each a request of its own to the engine; `after N`, it arrives
before round N.

Faults: `raise STAGE COLUMN REQUEST N` makes the request's block raise at its N-th step on that rank
alone. The others count moves of a task of their own, which the schedule places: `abort REQUEST N` (the
client goes away), `die STAGE COLUMN N` (a rank is gone), `stall STAGE COLUMN PEER N M` (what ``PEER``
sends to the rank is not delivered between moves N and N + M), `late STAGE COLUMN PEER N` (the same
until a wait of that rank has outlasted its deadline).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ppcore.schedule import Schedule

from . import programs
from .programs import Block


@dataclass(frozen=True)
class Request:
    """One request: how many tokens it generates at most, and its blocks; see the module docstring.

    Attributes:
        blocks: name -> block; the traced one is named ``""`` and runs after the others.
    """

    name: str
    tokens: int
    blocks: tuple[tuple[str, Block], ...] = ()
    ignore_eos: bool = False
    eos: int = 0
    stop: int = 0
    n: int = 1
    after: int = 0

    @property
    def traced(self) -> bool:
        """Whether a trace sent it, or it only runs registered blocks."""
        return any(not name for name, _ in self.blocks)

    def sequences(self) -> list[str]:
        """The engine's names of what is sampled for it, as vLLM spells them."""
        return [self.name] if self.n == 1 else [f"{i}_{self.name}" for i in range(self.n)]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong; see the module docstring."""

    kind: str
    stage: int = 0
    column: int = 0
    at: int = 0
    request: str = ""
    peer: int = 0
    moves: int = 0

    def spell(self) -> str:
        """The fault's line in a case."""
        match self.kind:
            case "abort":
                return f"fault abort {self.request} {self.at}"
            case "raise":
                return f"fault raise {self.stage} {self.column} {self.request} {self.at}"
            case "die":
                return f"fault die {self.stage} {self.column} {self.at}"
            case "late":
                return f"fault late {self.stage} {self.column} {self.peer} {self.at}"
        return f"fault stall {self.stage} {self.column} {self.peer} {self.at} {self.moves}"

    @classmethod
    def parse(cls, words: list[str]) -> Fault:
        """The fault that the words after ``fault`` spell.

        Raises:
            ValueError: they spell none.
        """
        match words:
            case ["abort", request, at]:
                return cls("abort", at=int(at), request=request)
            case ["raise", stage, column, request, at]:
                return cls("raise", int(stage), int(column), int(at), request)
            case ["die", stage, column, at]:
                return cls("die", int(stage), int(column), int(at))
            case ["late", stage, column, peer, at]:
                return cls("late", int(stage), int(column), int(at), "", int(peer))
            case ["stall", stage, column, peer, at, moves]:
                where = int(stage), int(column), int(at)
                return cls("stall", *where, "", int(peer), int(moves))
        raise ValueError(f"not a fault: {' '.join(words)!r}")


@dataclass(frozen=True)
class Case:
    """A run's inputs."""

    stages: int = 2
    columns: int = 1
    layers: int = 1
    shared: bool = False
    batching: int = 0
    requests: tuple[Request, ...] = ()
    faults: tuple[Fault, ...] = field(default=())
    containers: tuple[tuple[str, int], ...] = ()

    def sequences(self) -> dict[str, Request]:
        """The engine's requests: name -> the request that it is sampled for, in order of arrival."""
        return {name: request for request in self.requests for name in request.sequences()}

    def with_requests(self, requests: tuple[Request, ...]) -> Case:
        """The same case with other requests."""
        return replace(self, requests=requests)


@lru_cache(maxsize=64)
def visits(case: Case) -> tuple[tuple[str, ...], ...]:
    """What each stage's forward visits, in order."""
    found: list[tuple[str, ...]] = []
    for stage in range(case.stages):
        mine = ["S.out"] if case.shared else []
        for layer in range(stage * case.layers, (stage + 1) * case.layers):
            mine += [f"L{layer}.in", f"L{layer}.skip", f"L{layer}.out"]
        if stage == case.stages - 1:
            mine += ["logits", "samples"]
        found.append(tuple(mine))
    return tuple(found)


def readable(case: Case) -> list[list[str]]:
    """What of each stage's visits a block can read, in order: all but where a layer may be skipped."""
    return [[name for name in stage if not name.endswith(".skip")] for stage in visits(case)]


@lru_cache(maxsize=64)
def schedule(case: Case) -> Schedule:
    """The schedule that the stages would exchange."""
    return Schedule.build(visits(case))


@lru_cache(maxsize=64)
def homes(case: Case) -> Mapping[str, frozenset[int]]:
    """Module path -> the stages where it is real. ``N`` (a final norm) is real on the last."""
    found = {
        f"L{layer}": frozenset({layer // case.layers}) for layer in range(case.stages * case.layers)
    }
    found["N"] = frozenset({case.stages - 1})
    found["E"] = frozenset({0})
    if case.shared:
        found["S"] = frozenset(range(case.stages))
    return found


#: A request's settings that have a number, with their defaults.
_SETTINGS = {"eos": 0, "stop": 0, "n": 1, "after": 0}


def _settings(words: list[str]) -> dict[str, Any]:
    """The settings that a request's line ends with."""
    found: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word == "ignore_eos":
            found[word] = True
        elif word in _SETTINGS:
            found[word] = int(next(rest, ""))
        else:
            raise ValueError(f"not a setting of a request: {word!r}")
    return found


def spell(case: Case) -> str:
    """The case's text."""
    lines = [
        f"stages {case.stages} columns {case.columns} layers {case.layers} "
        f"shared {int(case.shared)} batching {case.batching}\n"
    ]
    lines += [f"container {label} {slots}\n" for label, slots in case.containers]
    for request in case.requests:
        flags = " ignore_eos" if request.ignore_eos else ""
        for setting, default in _SETTINGS.items():
            value = getattr(request, setting)
            flags += f" {setting} {value}" if value != default else ""
        lines.append(f"request {request.name} tokens {request.tokens}{flags}\n")
        named = dict(request.blocks)
        if "" in named:
            lines.append(programs.spell(named[""], "  "))
        for name, block in request.blocks:
            if name:
                lines.append(f"block {request.name} {name}\n{programs.spell(block, '  ')}")
    lines += [f"{fault.spell()}\n" for fault in case.faults]
    return "".join(lines)


def parse(text: str) -> Case:
    """The case that ``text`` spells.

    Raises:
        ValueError: the text spells none.
    """
    case = Case()
    requests: dict[str, Request] = {}
    bodies: dict[tuple[str, str], list[str]] = {}
    faults: list[Fault] = []
    containers: list[tuple[str, int]] = []
    body: list[str] | None = None
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("  "):
            if body is None:
                raise ValueError(f"a statement outside a block: {line!r}")
            body.append(line[2:])
            continue
        words = line.split()
        match words:
            case ["stages", stages, "columns", columns, "layers", layers, "shared", shared, *rest]:
                batching = int(rest[1]) if rest else 0
                case = Case(int(stages), int(columns), int(layers), shared == "1", batching)
            case ["request", name, "tokens", tokens, *flags]:
                requests[name] = Request(name, int(tokens), **_settings(flags))
                body = bodies[name, ""] = []
            case ["block", request, name]:
                body = bodies[request, name] = []
            case ["container", label, slots]:
                containers.append((label, int(slots)))
            case ["fault", *fault]:
                faults.append(Fault.parse(fault))
            case _:
                raise ValueError(f"not a line of a case: {line!r}")
    for (name, block), lines in bodies.items():
        if lines:
            found = requests[name]
            parsed = programs.parse("\n".join(lines))
            # Registered blocks run before the traced one.
            blocks = found.blocks
            traced = tuple(b for b in blocks if not b[0])
            others = tuple(b for b in blocks if b[0])
            added = ((block, parsed),)
            blocks = (*others, *added, *traced) if block else (*others, *added)
            requests[name] = replace(found, blocks=blocks)
    return replace(
        case,
        requests=tuple(requests.values()),
        faults=tuple(faults),
        containers=tuple(containers),
    )
