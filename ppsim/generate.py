"""Cases from a seed: programs, engines, faults.

Each case draws a *swarm* (Groce et al., Swarm Testing, ISSTA 2012): a subset of the features, so that
rare combinations come about as often as the common ones hide each other.
"""

from __future__ import annotations

import random
from dataclasses import replace

from .cases import Case, Fault, Request, visits
from .programs import (
    Append,
    Blend,
    Block,
    Call,
    Derive,
    Edit,
    For,
    If,
    Mix,
    Raise,
    Read,
    Save,
    Statement,
    Stop,
    Write,
)

FEATURES = (
    "write edit blend derive mix save append call if for stop raise order ghost result late".split()
)


class Writer:
    """Writes the blocks of one case.

    Locations are mostly drawn in the order of visits, so that most accesses can be served; the
    feature ``order`` draws them from anywhere.
    """

    def __init__(self, draw: random.Random, case: Case, features: set[str]) -> None:
        self.draw = draw
        self.features = features
        self.order = [location for stage in visits(case) for location in stage]
        self.layers = case.stages * case.layers
        self.position = 0
        self.names: list[str] = []
        self.called: list[str] = []
        self.fresh = 0
        self.before: list[Statement] = []

    def block(self, length: int) -> Block:
        """A block of about ``length`` statements."""
        self.position = 0
        self.names = []
        self.called = []
        body = self._body(length, 0)
        tail: list[Statement] = []
        for name in [*self.names[-3:], *self.called[-1:]]:
            if self.draw.random() < 0.5:
                tail.append(Save(f"s{self.fresh}", name))
                self.fresh += 1
        return (*body, *tail)

    def _body(self, length: int, depth: int) -> Block:
        body: list[Statement] = []
        while len(body) < length:
            statement = self._statement(depth)
            body += [*self.before, statement]
            self.before.clear()
        return tuple(body)

    def _location(self) -> str:
        draw, order = self.draw, self.order
        if "ghost" in self.features and draw.random() < 0.03:
            return f"L{draw.randrange(self.layers)}.ghost"
        if "order" in self.features and draw.random() < 0.15:
            return draw.choice(order)
        if self.position >= len(order) - 1:
            return order[-1]
        self.position += int(draw.random() * draw.random() * (len(order) - self.position))
        return order[self.position]

    def _read(self) -> Read:
        name = f"v{self.draw.randrange(6)}"
        location = self._location()
        if name not in self.names:
            self.names.append(name)
        return Read(name, location)

    def _statement(self, depth: int) -> Statement:
        draw, names = self.draw, self.names
        if not names or draw.random() < 0.35:
            return self._read()
        kind = draw.choice(sorted(self.features & _KINDS) or ["save"])
        one, other = draw.choice(names), draw.choice(names)
        constant = draw.randrange(1, 9)
        match kind:
            case "write":
                return Write(self._location(), one)
            case "edit":
                return Edit(one, constant)
            case "blend":
                return Blend(one, other)
            case "append" if self.called and draw.random() < 0.5:
                return Append("calls", draw.choice(self.called))
            case "derive" | "mix":
                name = f"v{draw.randrange(6)}"
                if name not in names:
                    names.append(name)
                return Derive(name, one, constant) if kind == "derive" else Mix(name, one, other)
            case "save":
                return Save(f"x{draw.randrange(4)}", one)
            case "append":
                return Append("out", one)
            case "call":
                # What a later stage computes cannot act on this turn any more, on any rank but one
                # (see docs): so results of calls are only derived from and kept.
                name = f"c{draw.randrange(3)}"
                self.called.append(name)
                return Call(name, "N", one)
            case "result":
                return Read("r", "result") if draw.random() < 0.2 else self._read()
            case "stop":
                return Stop() if draw.random() < 0.15 else self._read()
            case "raise":
                return Raise(constant) if draw.random() < 0.15 else self._read()
            case "if" if depth < 3:
                lot = draw.random()
                if one != other and lot < 0.4:
                    one = self._prepared(Mix("m", one, other))
                elif lot < 0.6:
                    one = self._prepared(Derive("m", one, constant))
                before = self.position
                body = self._body(draw.randrange(1, 4), depth + 1)
                if draw.random() < 0.5:
                    self.position = before
                return If(one, body)
            case "for" if depth < 2:
                return self._loop(depth)
        return self._read()

    def _prepared(self, statement: Mix | Derive) -> str:
        """The name of what ``statement`` makes; it is written before the statement at hand."""
        self.before.append(statement)
        return statement.name

    def _loop(self, depth: int) -> For:
        draw = self.draw
        self.position = 0
        # An access first: a loop over nothing but its own values would not end.
        body: tuple[Statement, ...] = (self._read(), *self._body(draw.randrange(0, 5), depth + 1))
        if "append" in self.features:
            body = (*body, Append("out", draw.choice(self.names)))
        form = draw.randrange(4)
        start = draw.randrange(0, 3)
        self.position = draw.choice([0, len(self.order) // 2])
        if form == 0:
            return For(0, None, None, body)
        if form == 1:
            return For(start, start + draw.randrange(1, 4), None, body)
        if form == 2:
            return For(start, None, None, body)
        steps = tuple(sorted(draw.sample(range(5), draw.randrange(1, 4))))
        return For(0, None, steps, body)


_KINDS = set(FEATURES) - {"order", "ghost", "late"}


def case(seed: int, *, faults: bool = True) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    features = {feature for feature in FEATURES if draw.random() < 0.5}
    stages = draw.choice([2, 2, 2, 3, 3, 4])
    columns = 2 if draw.random() < 0.12 else 1
    shape = Case(
        stages,
        columns,
        draw.choice([1, 1, 2]),
        draw.random() < 0.25,
        draw.randrange(1, 1 << 16) if draw.random() < 0.6 else 0,
    )
    requests: list[Request] = []
    for number in range(draw.choice([1, 1, 2, 3])):
        writer = Writer(draw, shape, features)
        blocks: list[tuple[str, Block]] = []
        if draw.random() < 0.2:
            blocks.append(("tap", writer.block(draw.randrange(1, 5))))
        if draw.random() < 0.9:
            blocks.append(("", writer.block(draw.randrange(1, 9))))
        eos = draw.random() < 0.2
        requests.append(Request("ABC"[number], draw.randrange(1, 5), tuple(blocks), eos))
    made = Case(
        shape.stages, shape.columns, shape.layers, shape.shared, shape.batching, tuple(requests)
    )
    if not faults:
        return made
    lot = draw.random()
    where = draw.randrange(stages), draw.randrange(columns)
    if lot < 0.06:
        fault = Fault("die", *where, draw.randrange(1, 60))
        return replace(made, faults=(fault,))
    # The columns of a stage run in step: what raises on one of them alone is not promised to end well.
    if lot < 0.26 and requests[0].blocks and columns == 1:
        fault = Fault("raise", *where, draw.randrange(0, 6), "A")
        return replace(made, faults=(fault,))
    return made
