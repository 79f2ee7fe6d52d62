"""Making a failing case smaller, one deletion or simplification at a time.

Greedy: the first smaller case that still fails in the same property is kept and tried on. The
schedule is looked for anew for each candidate, since a smaller case has other events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from .cases import Case
from .programs import Block, For, If, size

if TYPE_CHECKING:
    from .fuzz import Finding


def weight(case: Case) -> int:
    """How big a case is."""
    statements = sum(size(block) for r in case.requests for _, block in r.blocks)
    tokens = sum(request.tokens for request in case.requests)
    settings = 3 * case.stages + 3 * case.columns + case.layers + case.shared
    return (
        4 * statements + tokens + settings + 5 * len(case.faults) + 5 * len(case.requests)
        + 3 * bool(case.batching) + sum(r.ignore_eos for r in case.requests)
    )  # fmt: skip


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are a little smaller than this one, the boldest first."""
    for index, request in enumerate(case.requests):
        others = case.requests[:index] + case.requests[index + 1 :]
        faults = tuple(f for f in case.faults if f.request != request.name)
        if others:
            yield replace(case, requests=others, faults=faults)
        for name, _ in request.blocks:
            left = tuple(b for b in request.blocks if b[0] != name)
            yield _put(case, index, replace(request, blocks=left))
    if case.columns > 1:
        yield replace(case, columns=1, faults=tuple(replace(f, column=0) for f in case.faults))
    if case.batching:
        yield replace(case, batching=0)
    if case.shared:
        yield replace(case, shared=False)
    if case.layers > 1:
        yield replace(case, layers=case.layers - 1)
    if case.stages > 2:
        yield replace(case, stages=case.stages - 1)
    for index in range(len(case.faults)):
        yield replace(case, faults=case.faults[:index] + case.faults[index + 1 :])
    for index, request in enumerate(case.requests):
        if request.tokens > 1:
            yield _put(case, index, replace(request, tokens=request.tokens - 1))
        if request.ignore_eos:
            yield _put(case, index, replace(request, ignore_eos=False))
        for position, (name, block) in enumerate(request.blocks):
            for less in _blocks(block):
                if less:
                    blocks = list(request.blocks)
                    blocks[position] = (name, less)
                    yield _put(case, index, replace(request, blocks=tuple(blocks)))


def _put(case: Case, index: int, request: object) -> Case:
    requests = list(case.requests)
    requests[index] = request  # type: ignore[call-overload]
    return replace(case, requests=tuple(requests))


def _blocks(block: Block) -> Iterator[Block]:
    half = len(block) // 2
    if half:
        yield block[half:]
        yield block[:half]
    for index, statement in enumerate(block):
        before, after = block[:index], block[index + 1 :]
        yield (*before, *after)
        if isinstance(statement, If | For):
            yield (*before, *statement.body, *after)
            for body in _blocks(statement.body):
                if body:
                    yield (*before, replace(statement, body=body), *after)


def shrink_case(
    found: Finding,
    fails: Callable[[Case], Finding | None],
    tries: int,
    progress: Callable[[str], None] | None,
) -> Finding:
    """The smallest failing case that deletions lead to within so many tries."""
    best = found
    again = True
    while again and tries > 0:
        again = False
        for case in smaller(best.case):
            if tries <= 0 or weight(case) >= weight(best.case):
                continue
            tries -= 1
            smaller_one = fails(case)
            if smaller_one is not None:
                best, again = smaller_one, True
                if progress is not None:
                    progress(f"shrunk to weight {weight(case)}")
                break
    return best
