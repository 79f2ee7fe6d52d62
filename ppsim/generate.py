"""Cases from a seed: programs, engines, faults.

Each case draws a *swarm* (Groce et al., Swarm Testing, ISSTA 2012): a subset of the features, of the
engine's and of the faults, so that rare combinations come about as often as the common ones hide each
other. Nearly half of the cases are *small*: a block of few statements, in which one thing goes wrong, and
early (the small scope hypothesis: Jackson, Software Abstractions). What takes several things at once,
such as a block that has ended on one rank while another's pull for it is under way, comes about more
often where there is little else.

What is not drawn, because a single rank gives no answer to compare with: a layer skipped by one of
several requests in a step (nnsight refuses it), in-place edits of parameters; and, with several columns,
what needs a call's result in the same turn (see the README).
"""

from __future__ import annotations

import random
from dataclasses import replace

from . import faults as _faults
from . import rows
from .cases import Case, Request, readable
from .programs import (
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
)

#: How many of the cases are small.
SMALL = 0.45
#: What a case may use; each draws a subset.
FEATURES = tuple(
    "write edit blend derive mix save append call if for stop raise order ghost result skip param "
    "cache put".split()
)
#: The features that are statements to choose from.
_KINDS = set(FEATURES) - {"order", "ghost", "cache"}
#: What the engine may do besides; each case draws a subset.
ENGINE = ("preempt", "eos", "stop", "n", "after", "registered", "ignore_eos")
#: What may go wrong; each case draws a subset, mostly an empty one.
FAULTS = ("raise", "die", "abort", "stall", "late")


class Writer:
    """Writes the blocks of one case.

    Locations are mostly drawn in the order of visits, so that most accesses can be served; the
    feature ``order`` draws them from anywhere.
    """

    def __init__(
        self, draw: random.Random, case: Case, features: set[str], often: bool, parts: bool
    ) -> None:
        self.draw = draw
        # What is written seldom otherwise is written more often.
        self.often = often
        # The block may end on one rank while others wait; who ships nothing waits for nobody at the end.
        self.parts = parts
        self.features = features
        self.visits = readable(case)
        self.order = [location for stage in self.visits for location in stage]
        # Whether a call's result is there in the same turn.
        self.acts = case.columns == 1
        self.paths = ["N", "N", "E", *(["S"] if case.shared else [])]
        self.layers = case.stages * case.layers
        self.slots = dict(case.containers).get("rows", 0)
        self.position = 0
        self.skipped: set[str] = set()
        self.registered = False
        self.names: list[str] = []
        self.called: list[str] = []
        self.parameters: list[str] = []
        self.fresh = 0
        self.before: list[Statement] = []
        # Whether a block ends with an error that a later turn would come before.
        self.raises_late = False
        # Whether a block ends with a wait that the next turn would end.
        self.waits_late = False

    def block(self, length: int, *, registered: bool = False) -> Block:
        """A block of about ``length`` statements."""
        self.position = 0
        self.names, self.called, self.parameters = [], [], []
        self.registered = registered
        head = self._caches()
        if self.often and "for" in self.features and self.draw.random() < 0.3:
            return (*head, self._loop(0), *self._after())
        if self.parts and (whole := self._given() or self._at_the_end()):
            return tuple(whole)
        if not self.acts and (ahead := self._computed_ahead()):
            return (*head, *ahead)
        body = self._scaled() or (*self._across(), *self._revised(), *self._body(length, 0))
        tail: list[Statement] = []
        saving = 0 if self.parts and self.draw.random() < 0.8 else 0.5
        for name in [*self.names[-3:], *self.called[-1:], *self.parameters[-1:]]:
            if self.draw.random() < saving:
                tail.append(Save(f"s{self.fresh}", name))
                self.fresh += 1
        return (*head, *body, *tail, *self._late(), *self._after())

    def _body(self, length: int, depth: int) -> Block:
        body: list[Statement] = []
        while len(body) < length:
            statement = self._statement(depth)
            body += [*self.before, statement]
            self.before.clear()
        return tuple(body)

    def _across(self) -> list[Statement]:
        """Seldom: a branch on what an early stage and a late one give, before a stage between them
        has served the block, so that it needs a value that it may wait for and one that it may not. Or an
        edit of the early one by the late one, which waits for a stage where the block may have raised.
        Or only both together kept, which no stage has by itself; or a branch on the early one alone."""
        draw, half = self.draw, len(self.order) // 2
        if "if" not in self.features or draw.random() > (0.4 if self.often else 0.2):
            return []
        self.position = draw.randrange(half, len(self.order))
        reads = [Read("e", self.order[draw.randrange(half)]), Read("l", self.order[self.position])]
        lot = draw.random()
        if lot < 0.2:
            return [reads[0], If("e", (Save("e", "e"),))]
        if lot < 0.4:
            return [*reads, Blend("e", "l")]
        if lot < 0.6:
            return [*reads, Mix("m", "e", "l"), Save("m", "m")]
        return [*reads, Mix("m", "e", "l"), If("m", (Save("m", "m"),))]

    def _given(self) -> list[Statement]:
        """As a whole block: a stage between the others gives a call, an earlier one computes it, and a later
        one waits for the result. What the call is made of may have to come from an earlier stage, for the
        call itself or for a write before it."""
        draw, stages = self.draw, self.visits
        if len(stages) < 3 or draw.random() < 0.35:
            return []
        giver = len(stages) - 2 if draw.random() < 0.7 else draw.randrange(1, len(stages) - 1)
        here, *further = sorted(draw.sample(range(len(stages[giver])), 2))
        late = draw.choice(stages[draw.randrange(giver + 1, len(stages))])
        body: list[Statement] = [Read("o", stages[giver][here])]
        source = "o"
        if draw.random() < 0.85:
            early = giver - 1 if draw.random() < 0.5 else draw.randrange(giver)
            body.insert(0, Read("e", draw.choice(stages[early])))
            if draw.random() < 0.4:
                body.append(Write(stages[giver][further[0]], "e"))
            else:
                source = "e"
        body.append(Call("q", "E", source))
        lot = draw.random()
        if lot < 0.5:
            return [*body, If("q", (Save("q", "q"),))]
        if lot < 0.8:
            return [*body, Write(late, "q")]
        return [*body, Read("l", late), Blend("l", "q"), Save("l", "l")]

    def _at_the_end(self) -> list[Statement]:
        """As a whole block: calls of the result and of each other, which one stage makes and another waits
        for, when the request has ended on the one and perhaps not yet on the other."""
        lot = self.draw.random()
        if lot < 0.6:
            return self._edited_at_home() if lot < 0.12 else []
        calls = [Call("r", "E", "r")] * self.draw.randrange(2, 5)
        return [Read("r", "result"), *calls, If("r", (Save("r", "r"),))]

    def _edited_at_home(self) -> list[Statement]:
        """As a whole block: the first stage edits what it has computed for a later one, in the turn after,
        and only then the last one asks for it."""
        draw, last = self.draw, f"L{self.layers - 1}.out"
        late = draw.choice(self.visits[draw.randrange(1, len(self.visits))])
        behind = For(1, 2, None, (Read("w", last), Write(last, "q")))
        return [Read("o", late), Call("q", "E", "o"), Edit("q", draw.randrange(1, 9)), behind]

    def _computed_ahead(self) -> list[Statement]:
        """Seldom, as the whole block: a call that a later stage may compute before its forward begins, so
        that the answer may be there before an earlier stage, which has gone on meanwhile, may count on it."""
        draw, here = self.draw, self.visits[0]
        if not {"call", "if"} <= self.features or draw.random() > 0.3:
            return []
        first, second = sorted(draw.sample(range(len(here)), 2))
        read, later = Read("o", here[first]), Read("h", here[second])
        return [read, Call("n", "N", "o"), later, If("n", (Save("n", "n"),))]

    def _revised(self) -> list[Statement]:
        """Seldom: a value is looked at, edited or replaced, and looked at again; what is seen then is used
        further down, where another stage has to have seen the same."""
        draw = self.draw
        if draw.random() > (0.3 if self.often else 0.1):
            return []
        location = self._location()
        change: list[Statement] = [Edit("o", draw.randrange(1, 9))]
        if draw.random() < 0.5:
            change = [Derive("n", "o", draw.randrange(1, 9)), Write(location, "n")]
        use = Write(self._location(), "w") if draw.random() < 0.5 else If("w", (Save("w", "w"),))
        return [Read("o", location), *change, Read("w", location), use]

    def _scaled(self) -> list[Statement]:
        """Seldom, as the whole block: what each turn reads is combined in place with a parameter."""
        draw = self.draw
        if not {"for", "param"} <= self.features or draw.random() > (0.4 if self.often else 0.2):
            return []
        read = self._read()
        body = (read, Param("p", draw.choice(["E.w", "N.w"])), Blend(read.name, "p"))
        return [For(0, None, None, (*body, Append("out", read.name)))]

    def _late(self) -> list[Statement]:
        """Seldom, at the end: a branch on what an early stage makes of a value that may be late, which
        a later stage has to wait for until the next turn opens."""
        draw = self.draw
        share = 0.7 if self.parts else 0.3 if "call" in self.features else 0
        if not self.names or draw.random() > share:
            return []
        name, read = draw.choice(self.names), []
        if self.parts and draw.random() < 0.8:
            half = len(self.order) // 2
            self.position = max(self.position, draw.randrange(half, len(self.order)))
            name, read = "o", [Read("o", self.order[self.position])]
        self.waits_late = True
        late: list[Statement] = [Call("q", "E", name), If("q", (Save("q", "q"),))]
        if "raise" in self.features and draw.random() < (0.2 if self.parts else 0.5):
            # The last stage gets to what is kept, and to the error, only once the request has ended.
            self.raises_late = True
            late = [
                late[0], Read("t", self.order[-1]), Derive("t", "t", 1), Blend("t", "q"),
                Save("z", "t"), Raise(9),
            ]  # fmt: skip
        if draw.random() < (0.2 if self.parts else 0.5):
            before = Call("n", "N", name)
            late = [before, If("n", (Save("n", "n"),)), *late]
        return [*read, *late]

    def _after(self) -> list[Statement]:
        """Seldom, at the end: the result, and something that is asked for after it, so that nothing behind it
        runs."""
        draw = self.draw
        if "result" not in self.features or draw.random() > (0.3 if self.often else 0.1):
            return []
        behind = Save("b", "b") if draw.random() < 0.5 else Raise(8)
        return [Read("r", "result"), Read("b", draw.choice(self.order)), behind]

    def _caches(self) -> list[Statement]:
        if "cache" not in self.features:
            return []
        return [self._cache(f"k{number}") for number in range(self.draw.randrange(0, 3))]

    def _cache(self, label: str) -> Cache:
        draw = self.draw
        layers = sorted(draw.sample(range(self.layers), draw.randrange(0, min(3, self.layers))))
        return Cache(label, draw.random() < 0.5, tuple(f"L{layer}" for layer in layers))

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
                return self._replace(one) if draw.random() < 0.25 else Write(self._location(), one)
            case "edit":
                return Edit(one, constant)
            case "blend":
                if self.parameters and draw.random() < 0.4:
                    other = draw.choice(self.parameters)
                return Blend(one, other)
            case "append" if self.called and draw.random() < 0.5:
                return Append("calls", draw.choice(self.called))
            case "mix" if self.parameters and draw.random() < 0.5:
                name = f"v{draw.randrange(6)}"
                if name not in names:
                    names.append(name)
                return Mix(name, one, draw.choice(self.parameters))
            case "derive" | "mix":
                name = f"v{draw.randrange(6)}"
                if name not in names:
                    names.append(name)
                return Derive(name, one, constant) if kind == "derive" else Mix(name, one, other)
            case "save":
                return Save(f"x{draw.randrange(4)}", one)
            case "append":
                return Append("out", one)
            case "put":
                return Put("rows", draw.randrange(self.slots + (draw.random() < 0.05)), one)
            case "skip" if not self.registered and depth < 2:
                return self._skip(one)
            case "param":
                name = f"p{draw.randrange(2)}"
                self.parameters.append(name)
                path = draw.choice(["N", "E", f"L{draw.randrange(self.layers)}"])
                made = Param(name, f"{path}.w")
                if draw.random() < 0.6:
                    return made
                self.before.append(made)
                return Blend(one, name)
            case "call" if self.acts:
                return self._call(one)
            case "call":
                # A result that may come with the next turn is only derived from and kept.
                name = f"c{draw.randrange(3)}"
                self.called.append(name)
                return Call(name, "N", one)
            case "result":
                return Read("r", "result") if draw.random() < 0.4 else self._read()
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
                # What was prepared comes before the branch, not into its body.
                prepared, self.before = self.before, []
                body = self._body(draw.randrange(1, 4), depth + 1)
                self.before = prepared
                if "cache" in self.features and draw.random() < 0.1:
                    body = (*body, self._cache("k9"))
                if draw.random() < 0.5:
                    self.position = before
                return If(one, body)
            case "for" if depth < 2:
                return self._loop(depth)
        return self._read()

    def _replace(self, name: str) -> Statement:
        """Look at a value, replace it, look again, and carry what is there further down."""
        location = self._location()
        self.before += [Read("o", location), Write(location, name), Read("w", location)]
        return Write(self._location(), "w")

    def _skip(self, name: str) -> Statement:
        """Skip a layer that comes later, each once: a second skip of a visit is nnsight's to define."""
        reached = self.order[self.position]
        first = int(reached[1:-3]) if reached.endswith(".in") else self.layers
        if reached.endswith(".out") and reached[0] == "L":
            first = int(reached[1:-4]) + 1
        paths = [f"L{n}" for n in range(first, self.layers) if f"L{n}" not in self.skipped]
        if not paths:
            return self._read()
        path = self.draw.choice(paths)
        self.skipped.add(path)
        self.position = self.order.index(f"{path}.out")
        return Skip(path, name)

    def _call(self, name: str) -> Statement:
        """A call, of whose result a value that was read before is often made at once."""
        draw = self.draw
        made = f"v{draw.randrange(6)}"
        call = Call(made, draw.choice(self.paths), name)
        if made not in self.names:
            self.names.append(made)
        lot = draw.random()
        if lot < 0.3:
            return call
        self.before.append(call)
        if lot < 0.45:
            self.before.append(Derive("m", made, draw.randrange(1, 9)))
            return Call(made, call.path, "m")
        if lot < 0.65:
            return If(made, (Edit(name, draw.randrange(1, 9)), Save("y", made)))
        return Blend(name, made) if lot < 0.85 else Write(self.order[self.position], made)

    def _prepared(self, statement: Mix | Derive) -> str:
        """The name of what ``statement`` makes; it is written before the statement at hand."""
        self.before.append(statement)
        return statement.name

    def _loop(self, depth: int) -> For:
        draw = self.draw
        self.position = 0
        # An access first: a loop over nothing but its own values would not end.
        body: tuple[Statement, ...] = (
            self._read(), *self._across(), *self._body(draw.randrange(0, 5), depth + 1)
        )  # fmt: skip
        if "append" in self.features and self.names:
            body = (*body, Append("out", draw.choice(self.names)))
        if draw.random() < (0.5 if self.often else 0.25):
            # What the loop has passed comes again in the next turn: behind the pinned step it is that.
            body = (*body, Read("b", draw.choice(self.order)), Append("back", "b"))
        form = draw.choice((0, 0, 1, 2, 3))
        start = draw.randrange(0, 3)
        self.position = draw.choice([0, len(self.order) // 2])
        if form == 0:
            return For(0, None, None, body)
        if form == 1:
            return For(start, start + draw.randrange(1, 4), None, body)
        if form == 2:
            return For(start, None, None, body)
        steps = tuple(draw.sample(range(5), draw.randrange(1, 4)))
        if "order" not in self.features:
            steps = tuple(sorted(steps))
        return For(0, None, steps, body)


def case(seed: int, *, faults: bool = True) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    small = draw.random() < SMALL
    features = {feature for feature in FEATURES if draw.random() < (0.7 if small else 0.5)}
    engine = {feature for feature in ENGINE if draw.random() < (0.1 if small else 0.3)}
    if small:
        # As often as not nothing goes wrong but one rank's block, or one rank's wait.
        lot = draw.random()
        kinds = {"raise"} if lot < 0.32 else {"late"} if lot < 0.58 else set()
        if 0.58 <= lot < 0.68:
            kinds = {"die"}
        elif lot > 0.85:
            kinds = {draw.choice(FAULTS)}
        parts = bool(kinds & {"raise", "late", "die"})
        # Where one rank raises, another waits and the third does not know yet, there are three.
        stages = draw.choice([3, 3, 4, 4] if kinds & {"raise", "die"} else [2, 2, 3])
    else:
        parts, fails = False, draw.random() < 0.6
        kinds = {kind for kind in FAULTS if fails and draw.random() < 0.25}
        stages = draw.choice([2, 2, 2, 3, 3, 4])
    columns = 2 if draw.random() < (0 if small else 0.12) else 1
    containers = (("rows", draw.randrange(1, 4)), ("out", 0)) if "put" in features else ()
    shape = Case(
        stages,
        columns,
        1 if small else draw.choice([1, 1, 2]),
        draw.random() < 0.25,
        draw.randrange(1, 1 << 16) if draw.random() < (0.4 if small else 0.6) else 0,
        containers=containers,
    )
    count = draw.choice([1, 1, 1, 2] if small else [1, 1, 2, 3])
    if "skip" in features:
        # A step skips a layer for all of its requests or for none.
        count = 1
        engine.discard("n")
    requests: list[Request] = []
    for number in range(count):
        writer = Writer(draw, shape, features, small, parts)
        blocks: list[tuple[str, Block]] = []
        if "registered" in engine and draw.random() < 0.7:
            blocks.append(("tap", writer.block(draw.randrange(1, 5), registered=True)))
        if draw.random() < (0.8 if small and not parts else 0.9):
            blocks.append(("", writer.block(draw.randrange(1, 4 if small else 9))))
        tokens = draw.randrange(1, 5)
        if writer.raises_late or (parts and writer.waits_late):
            tokens = 1
        requests.append(
            Request(
                "ABC"[number],
                tokens,
                tuple(blocks),
                "ignore_eos" in engine and draw.random() < 0.6,
                draw.randrange(1, 4) if "eos" in engine else 0,
                draw.randrange(1, tokens + 1) if "stop" in engine and draw.random() < 0.6 else 0,
                2 if "n" in engine and draw.random() < 0.6 else 1,
                draw.randrange(1, 6) if "after" in engine and draw.random() < 0.6 else 0,
            )
        )
    made = replace(shape, requests=tuple(requests))
    if not faults:
        return made
    made = rows.instead(seed, made)
    return replace(made, faults=tuple(_faults.drawn(draw, made, kinds, 0.4 if small else 1.0)))
