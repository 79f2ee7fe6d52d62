"""Running a case on the real runtime, and its reference on plain nnsight.

Building a column (the model, its trees, the exchange at load) takes as long as many runs, so columns are
kept by their shape and used again; one on which a run failed is thrown away.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from nnsight.intervention.interleaver import Interleaver, Mediator
from nnsight.intervention.serialization import dumps
from nnsight.intervention.tracer import InterleavingTracer
from nnsight.tracing.tracer import dec, inc, mark

from ppsim.cases import Case, Request
from ppsim.failures import Failure, Sameness
from ppsim.world import Strategy

from .exact import Exact
from .outcome import Outcome, difference, outcome_of
from .stage import Output, Stage, Whole
from .translate import ExactTarget, block, one_row
from .tree import Tree
from .world import Blocks, Collect, Step, World, arrival, register

#: A column's shape: stages, layers of each, whether there is a module that all have.
Shape = tuple[int, int, bool]

_columns: dict[Shape, list[Stage]] = {}
_references: dict[Shape, Whole] = {}
_clients: dict[Shape, Tree] = {}


def shape(case: Case) -> Shape:
    """The shape of the column that a case needs."""
    return case.stages, case.layers, case.shared


def plain(case: Case) -> Case:
    """The case without what this mode leaves out: columns, most faults, the engine's rarer settings."""
    requests = tuple(
        Request(request.name, request.tokens, request.blocks, request.ignore_eos)
        for request in case.requests
    )
    faults = tuple(f for f in case.faults if f.kind == "raise" and f.column == 0)
    return replace(case, columns=1, faults=faults, requests=requests)


def model(wanted: Shape) -> Exact:
    """The whole model of this shape."""
    return Exact(*wanted)


# --- building -------------------------------------------------------------------------------------


def column(wanted: Shape) -> list[Stage]:
    """The ranks of a column, built together as processes would."""
    found = _columns.get(wanted)
    if found is None:
        stages = wanted[0]
        meeting = threading.Barrier(stages)
        table: list[Any] = [None] * stages

        def build(stage: int) -> Stage:
            def gather(value: Any) -> list[Any]:
                table[stage] = value
                meeting.wait()
                gathered = list(table)
                meeting.wait()
                return gathered

            return Stage(model(wanted), stage, stages, gather)

        with ThreadPoolExecutor(stages) as pool:
            found = _columns[wanted] = list(pool.map(build, range(stages)))
    return found


def _reference(wanted: Shape) -> Whole:
    if wanted not in _references:
        _references[wanted] = Whole(model(wanted))
    return _references[wanted]


def _client(wanted: Shape) -> Tree:
    if wanted not in _clients:
        with torch.device("meta"):
            _clients[wanted] = Tree(model(wanted), interleaver=Interleaver())
    return _clients[wanted]


# --- blocks ---------------------------------------------------------------------------------------


def payloads(case: Case) -> Blocks:
    """Request -> its blocks, serialized as a client sends them; the traced one is named ``""``."""
    model = _client(shape(case))
    found: Blocks = {}
    for request in case.requests:
        target = ExactTarget(one_row(case, request))
        found[request.name] = {}
        for name, body in request.blocks:
            containers = [] if name else list(case.containers)
            text = block(body, target, [label for label, _ in containers])
            found[request.name][name] = payload(text, model, dict(containers))
    return found


def payload(text: str, model: Tree, containers: dict[str, int]) -> bytes:
    """A block's body, serialized as nnsight serializes a traced block's mediator.

    Args:
        containers: name -> slots of a list that is bound and saved above the block.
    """
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    node = ast.parse(f"with model.trace() as tracer:\n{lines}").body[0]
    tracer = InterleavingTracer(model, "__call__")
    scope: dict[str, Any] = {"model": model, "tracer": tracer}
    inc()
    try:
        for label, slots in containers.items():
            scope[label] = mark([None] * slots)
        code = compile("pass", "<block>", "exec")
        made: bytes = dumps(Mediator(code, {"torch": torch}, scope, node=node))
        return made
    finally:
        dec()


# --- running --------------------------------------------------------------------------------------


def reference(
    case: Case, blocks: Blocks, commands: Sequence[Step | Collect | None]
) -> dict[str, Outcome]:
    """What plain nnsight gives on one rank, under the same batches.

    Who shares a step with whom shows in nnsight itself: a replacement for one request's rows makes a
    new tensor for all.

    Args:
        commands: what the engine had the ranks do in the run that this is compared with.
    """
    rank = _reference(shape(case))
    rank.reset()
    register(rank, blocks)
    tokens: dict[str, list[int]] = {request.name: [] for request in case.requests}
    found: dict[str, Outcome] = {}
    for command in commands:
        if isinstance(command, Step):
            new = [arrival(name, blocks[name]) for name in command.new]
            sampled = rank.step(command.parts, new, command.finished)
            for part, token in zip(command.parts, sampled, strict=True):
                tokens[part.name].append(token)
        elif isinstance(command, Collect):
            mine = tokens[command.name]
            entry, warned = rank.collect(command.name, Output(list(mine)))
            found[command.name] = outcome_of(entry, mine, [tuple(warned)])
    return found


def execute(case: Case, how: Strategy, *, record: bool = False) -> World:
    """Run a case and compare it; what went wrong, if anything did, is in the world's ``failure``."""
    case = plain(case)
    blocks = payloads(case)
    world = World(case, blocks, column(shape(case)), record=record)
    world.run(how)
    if world.failure is None:
        world.failure = _sameness(world)
    if world.failure is not None:
        del _columns[shape(case)]
    return world


def _sameness(world: World) -> Failure | None:
    expected = reference(world.case, world.blocks, world.commands)
    for name, outcome in world.outcomes.items():
        if any(stage.faults.get(name, 0) < 0 for stage in world.stages):
            error = outcome.error
            if error is None or (error.kind != "Fault" and error != expected[name].error):
                return Sameness("sameness", f"{name} met a fault and ends with {error}")
            continue
        wrong = difference(outcome, expected[name])
        if wrong is not None:
            return Sameness("sameness", f"{name} {wrong}")
    return None
