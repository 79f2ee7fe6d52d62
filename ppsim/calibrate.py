"""Costs from measurements: what `python -m bench --json` found on a machine.

What a trace costs on several stages is what is predicted, and is not looked at. From the bare exchanges
come the network's latency and bandwidth, from the pulls what a message costs its two ends, from single
accesses what lazies and published values cost, from the traces on one stage what nnsight costs, and from
the requests without a trace how long steps take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import workloads
from .costs import Costs, Model
from .timed import TimedWorld

#: Of `Costs`: what a trace costs on one stage.
_ALONE = ("trace_s", "request_s", "visit_s", "leaf_s")

_SWEEPS = 5000


def costs(measured: Mapping[str, Any]) -> tuple[Model, Costs]:
    """The model and the costs, as far as there are measurements; the rest as `Model` and `Costs` have it."""
    model, found = Model(), Costs()
    cells = measured.get("traces", {}).get("cells", [])
    if "pulls" in measured:
        found = replace(found, **_network(measured["pulls"]["cells"]))
    if "accesses" in measured:
        found = replace(found, **_accesses(measured["accesses"]["cells"]))
    found = replace(found, **_commands(measured.get("traces", {})))
    if cells:
        step_s, token_s = _steps(cells)
        model = replace(model, step_s=step_s, token_s=token_s)
        found = replace(found, **_alone([cell for cell in cells if cell["stages"] == 1], model))
    return model, found


def overheads(measured: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """(trace, stages) -> what it was found to add, in milliseconds."""
    cells = measured.get("traces", {}).get("cells", [])
    return {(cell["name"], cell["stages"]): cell["overhead_ms"] for cell in cells}


def _network(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    seconds = {(cell["way"], cell["bytes"]): cell["median_us"] / 1e6 for cell in cells}
    small, large = (which(size for _, size in seconds) for which in (min, max))
    bare, pull = seconds["unix", small], seconds["direct", small]
    return {
        "latency_s": bare / 2,
        "bandwidth": large / (seconds["direct", large] - pull),
        # Asked and heard, answered and heard.
        "message_s": (pull - bare) / 4,
    }


def _accesses(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    seconds = {cell["kind"]: (cell["us"] / 1e6, cell["plain_us"] / 1e6) for cell in cells}
    read, plain = seconds["read"]
    return {"keep_s": max(0.0, read - plain), "lazy_s": seconds["lazy read, summed"][0]}


def _commands(traces: Mapping[str, Any]) -> dict[str, float]:
    """A call goes to all ranks and back; on one stage the only rank is in the engine's process."""
    calls = {int(stages): took / 1e3 for stages, took in traces.get("call_ms", {}).items()}
    if len(calls) < 2:
        return {}
    return {"command_s": max(0.0, calls[max(calls)] - calls[1]) / 2}


def _steps(cells: Sequence[Mapping[str, Any]]) -> list[float]:
    """A step's time, and a further token's, of requests without a block, on as many stages as were measured."""
    stages = max(cell["stages"] for cell in cells)
    rows, times = [], []
    for cell in cells:
        if cell["stages"] == stages and cell["name"] in workloads.WORKLOADS:
            requests = workloads.WORKLOADS[cell["name"]](Model())
            steps = max(request.tokens for request in requests)
            tokens = sum(Model().prompt + request.tokens - 1 for request in requests)
            rows.append([steps, tokens - steps])
            times.append(cell["untraced_ms"] / 1e3)
    return fit(rows, times)


def _alone(cells: Sequence[Mapping[str, Any]], model: Model) -> dict[str, float]:
    """What traces cost on one stage is a sum, of which every part is a number times a cost."""
    idle = replace(model, step_s=0.0, token_s=0.0)
    nothing = Costs(*[0.0] * len(Costs.__dataclass_fields__))
    nothing = replace(nothing, bandwidth=1.0, copy=1.0)
    rows, times = [], []
    for cell in cells:
        if cell["name"] in workloads.WORKLOADS:
            case = workloads.case(cell["name"], idle, 1)
            rows.append(
                [
                    TimedWorld(case, idle, replace(nothing, **{name: 1.0})).seconds()
                    for name in _ALONE
                ]
            )
            times.append(cell["overhead_ms"] / 1e3)
    return dict(zip(_ALONE, fit(rows, times), strict=True))


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Numbers, none below zero, whose sums weighted by the rows come closest to the values, in ratio.

    Coordinate descent: each number in turn is set to what is best beside the others.
    """
    scaled = [[x / value for x in row] for row, value in zip(rows, values, strict=True)]
    found = [0.0] * len(rows[0])
    left = [1.0] * len(rows)
    squares = [sum(row[i] ** 2 for row in scaled) for i in range(len(found))]
    for _ in range(_SWEEPS):
        for i, square in enumerate(squares):
            if not square:
                continue
            better = (
                found[i] + sum(r * row[i] for r, row in zip(left, scaled, strict=True)) / square
            )
            step = max(0.0, better) - found[i]
            found[i] += step
            left = [r - step * row[i] for r, row in zip(left, scaled, strict=True)]
    return found
