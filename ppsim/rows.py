"""Cases in which a block pulls one value after the other, so that the core asks ahead for more.

Steps of a generation, or layers of a stage, each read and branched on; the row goes on, or ends in the
middle, or what follows is something else than its beginning lets expect.
"""

from __future__ import annotations

import random
from dataclasses import replace

from .cases import Case, readable
from .programs import (
    Append,
    Block,
    Derive,
    Edit,
    For,
    If,
    Raise,
    Read,
    Save,
    Statement,
    Stop,
    Write,
)

#: How many of the generated cases are made over into one of these.
SHARE = 0.06


def instead(seed: int, case: Case) -> Case:
    """The case of a seed, or in its place one of the same engine in which a request's block has a row."""
    draw = random.Random(f"rows {seed}")
    if draw.random() > SHARE:
        return case
    number = draw.randrange(len(case.requests))
    request = case.requests[number]
    if draw.random() < 0.5 and case.columns == 1:
        case = replace(case, stages=draw.choice([2, 2, 3]), layers=draw.randrange(4, 7))
        block, tokens = _layers(draw, case), draw.randrange(1, 3)
    else:
        block, tokens = _steps(draw, case), draw.randrange(3, 8)
    others = tuple((name, found) for name, found in request.blocks if name)
    made = replace(request, tokens=tokens, blocks=(*others, ("", block)))
    return case.with_requests((*case.requests[:number], made, *case.requests[number + 1 :]))


def _locations(case: Case) -> list[str]:
    return [name for stage in readable(case) for name in stage]


def _looked_at(draw: random.Random, case: Case, name: str) -> list[Statement]:
    """A value is branched on, or what is made of it; in the branch something may end the row."""
    lot = draw.random()
    made: list[Statement] = []
    if lot < 0.4:
        made, name = [Derive("d", name, draw.randrange(1, 4))], "d"
    inside: list[Statement] = [Append("out", name)]
    lot = draw.random()
    if lot < 0.15:
        inside = [Read("x", draw.choice(_locations(case))), Append("out", "x")]
    elif lot < 0.22:
        inside.append(Stop())
    elif lot < 0.28:
        inside.append(Raise(draw.randrange(1, 4)))
    elif lot < 0.36:
        inside.append(Edit(name, 1))
    return [*made, If(name, tuple(inside))]


def _steps(draw: random.Random, case: Case) -> Block:
    """In each step of the generation, the same."""
    order = _locations(case)
    at = draw.randrange(len(order))
    body: list[Statement] = [Read("a", order[at])]
    if draw.random() < 0.3:
        body.insert(0, Read("e", order[draw.randrange(at + 1)]))
    if draw.random() < 0.2:
        body.append(Write(draw.choice(order[at:]), "a"))
    body += _looked_at(draw, case, "a")
    first = draw.choice([0, 0, 0, 1])
    end = first + draw.randrange(2, 7) if draw.random() < 0.5 else None
    rest = (Save("s", "a"),) if draw.random() < 0.3 else ()
    return (For(first, end, None, tuple(body)), *rest)


def _layers(draw: random.Random, case: Case) -> Block:
    """One layer after the other, or every other one; one of them may be passed over."""
    side = draw.choice(["in", "out", "out"])
    first, step = draw.randrange(2), draw.choice([1, 1, 1, 2])
    layers = list(range(first, case.stages * case.layers, step))
    if draw.random() < 0.3:
        layers.remove(draw.choice(layers))
    look = _looked_at(draw, case, "a")
    body: list[Statement] = []
    for layer in layers:
        body.append(Read("a", f"L{layer}.{side}"))
        # Seldom one of them is not looked at, or only kept, or looked at in a way of its own.
        lot = draw.random()
        if lot < 0.1:
            body.append(Save("k", "a"))
        elif lot < 0.2:
            body += _looked_at(draw, case, "a")
        elif lot < 0.75:
            body += look
    if draw.random() < 0.3:
        return (For(0, None, None, tuple(body)),)
    return tuple(body)
