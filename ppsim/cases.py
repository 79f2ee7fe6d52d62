"""Cases: everything that a run is made of, apart from its schedule.

A case prints as text that parses back:

    stages 2 columns 1 layers 2 shared 0 batching 7
    request A tokens 3
      a = read L0.out
      save x a
    block A tap
      b = read L3.out
    fault raise 1 0 A 3

`layers` counts them per stage. `batching` seeds the engine's choices (whom to batch, whom to
preempt); 0 batches everyone always. `block` installs a further worker for a request, as a registered
edit does. Faults: `raise STAGE COLUMN REQUEST N` makes the request's block raise at its N-th step on
that rank alone; `die STAGE COLUMN N` kills a rank at event N.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ppcore.schedule import Schedule

from . import programs
from .programs import Block


@dataclass(frozen=True)
class Request:
    """One request: how many tokens it generates, whether it ignores their end, its blocks.

    Attributes:
        blocks: name -> block; the traced one is named ``""`` and runs after the others.
    """

    name: str
    tokens: int
    blocks: tuple[tuple[str, Block], ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one rank; see the module docstring."""

    kind: str
    stage: int
    column: int
    at: int
    request: str = ""


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

    def with_requests(self, requests: tuple[Request, ...]) -> Case:
        """The same case with other requests."""
        return replace(self, requests=requests)


def visits(case: Case) -> list[list[str]]:
    """What each stage's forward visits, in order."""
    found: list[list[str]] = []
    for stage in range(case.stages):
        mine = ["S.out"] if case.shared else []
        for layer in range(stage * case.layers, (stage + 1) * case.layers):
            mine += [f"L{layer}.in", f"L{layer}.out"]
        if stage == case.stages - 1:
            mine += ["logits", "samples"]
        found.append(mine)
    return found


def schedule(case: Case) -> Schedule:
    """The schedule that the stages would exchange."""
    return Schedule.build(visits(case))


def homes(case: Case) -> dict[str, list[int]]:
    """Module path -> the stages where it is real. ``N`` (a final norm) is real on the last."""
    found = {f"L{layer}": [layer // case.layers] for layer in range(case.stages * case.layers)}
    found["N"] = [case.stages - 1]
    found["E"] = [0]
    if case.shared:
        found["S"] = list(range(case.stages))
    return found


def spell(case: Case) -> str:
    """The case's text."""
    lines = [
        f"stages {case.stages} columns {case.columns} layers {case.layers} "
        f"shared {int(case.shared)} batching {case.batching}\n"
    ]
    for request in case.requests:
        eos = " ignore_eos" if request.ignore_eos else ""
        lines.append(f"request {request.name} tokens {request.tokens}{eos}\n")
        named = dict(request.blocks)
        if "" in named:
            lines.append(programs.spell(named[""], "  "))
        for name, block in request.blocks:
            if name:
                lines.append(f"block {request.name} {name}\n{programs.spell(block, '  ')}")
    for fault in case.faults:
        where = f"fault {fault.kind} {fault.stage} {fault.column}"
        lines.append(f"{where} {fault.request + ' ' if fault.request else ''}{fault.at}\n")
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
                requests[name] = Request(name, int(tokens), (), "ignore_eos" in flags)
                body = bodies[name, ""] = []
            case ["block", request, name]:
                body = bodies[request, name] = []
            case ["fault", kind, stage, column, *rest]:
                request = rest[0] if len(rest) > 1 else ""
                faults.append(Fault(kind, int(stage), int(column), int(rest[-1]), request))
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
    return replace(case, requests=tuple(requests.values()), faults=tuple(faults))
