"""The traces of the benchmark (`bench.workloads`) as cases: the same names, the same accesses.

A value is *used* where the block branches on a number made of it, as Python does when it looks at one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from .cases import Case, Request
from .costs import Model
from .programs import Append, Block, Derive, For, If, Read, Statement
from .timed import COPY, NUMBER


def _saved(location: str) -> list[Statement]:
    return [Read("a", location), Derive("b", "a", COPY), Append("kept", "b")]


def _used(location: str) -> list[Statement]:
    return [Read("a", location), Derive("b", "a", NUMBER), If("b", ())]


def _one(block: Block, tokens: int = 1) -> tuple[Request, ...]:
    return (Request("A", tokens, (("", block),), ignore_eos=True),)


def _save_all(model: Model) -> tuple[Request, ...]:
    return _one(tuple(s for i in range(model.layers) for s in _saved(f"L{i}.out")))


def _use_layers(model: Model, layers: slice) -> tuple[Request, ...]:
    chosen = range(model.layers)[layers]
    return _one(tuple(s for i in chosen for s in _used(f"L{i}.out")))


def _use_logits(model: Model, steps: int) -> tuple[Request, ...]:
    return _one((For(0, steps, None, tuple(_used("logits"))),), steps)


def _invokes(model: Model, requests: int) -> tuple[Request, ...]:
    quarter = model.layers // 4
    block = (*_saved(f"L{quarter}.out"), *_saved(f"L{3 * quarter}.out"))
    return tuple(replace(_one(block)[0], name=f"R{i}") for i in range(requests))


#: Name -> the requests of the trace.
WORKLOADS: dict[str, Callable[[Model], tuple[Request, ...]]] = {
    "save all": _save_all,
    "early used": partial(_use_layers, layers=slice(12)),
    **{f"late used {n}": partial(_use_layers, layers=slice(-n, None)) for n in (1, 4, 8, 12)},
    **{f"logits {n}": partial(_use_logits, steps=n) for n in (1, 8, 32, 128)},
    **{f"invokes {n}": partial(_invokes, requests=n) for n in (1, 4, 16, 64)},
}


def case(name: str, model: Model, stages: int, *, traced: bool = True) -> Case:
    """The case of a workload on so many stages; its requests without their blocks if not ``traced``.

    Raises:
        ValueError: the layers cannot be divided evenly.
    """
    if model.layers % stages:
        raise ValueError(f"{model.layers} layers cannot be divided evenly into {stages} stages")
    requests = WORKLOADS[name](model)
    if not traced:
        requests = tuple(replace(request, blocks=()) for request in requests)
    return Case(stages, 1, model.layers // stages, requests=requests)
