"""``predict``: what the benchmark's traces cost on a network and a number of stages."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import calibrate, workloads
from ..compiled import needs_sources
from ..costs import Costs, Model
from ..timed import TimedWorld
from . import Answer, Command

#: Seconds, or bytes a second, of a unit.
_UNITS = {
    "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9,
    "B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
    "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8,
}  # fmt: skip

#: By how much the latency is raised to see how often it is on the way; seconds.
_NUDGE_S = 1e-6


def quantity(*units: str) -> Callable[[str], float]:
    """A reader of numbers with one of these units, into seconds or bytes a second."""

    def read(text: str) -> float:
        found = re.fullmatch(r"([\d.]+(?:e-?\d+)?)\s*([A-Za-z/]+)", text)
        if found is None or found[2] not in units:
            raise argparse.ArgumentTypeError(f"{text!r}: a number and one of {', '.join(units)}")
        return float(found[1]) * _UNITS[found[2]]

    return read


_TIME = quantity("s", "ms", "us", "ns")
_RATE = quantity("B/s", "KB/s", "MB/s", "GB/s", "TB/s", "Mbit/s", "Gbit/s")


def add(command: Command) -> None:
    """Name the command."""
    parser = command("predict", run, "what the benchmark's traces cost on a network")
    parser.add_argument("--latency", type=_TIME, help="of the network, one way: 50us")
    parser.add_argument("--bandwidth", type=_RATE, help="of the network: 12.5GB/s, 100Gbit/s")
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--hidden", type=int, help="extent of its hidden states")
    parser.add_argument("--vocabulary", type=int, help="extent of its logits")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt")
    parser.add_argument("--step", type=_TIME, help="a step of one token, through all stages: 20ms")
    parser.add_argument("--only", nargs="+", choices=workloads.WORKLOADS, help="these traces")
    parser.add_argument(
        "--measured",
        type=Path,
        help="results of `python -m bench --json`: take the costs from them, and compare",
    )


@dataclass(frozen=True)
class Prediction:
    """A trace on so many stages; milliseconds.

    Attributes:
        untraced_ms: the same requests without a block.
        overhead_ms: what the trace adds.
        one_stage_ms: what it adds on one stage.
        pulls: values that cross.
        bytes: of them.
        waited_ms: how long forwards are blocked for values, all together.
        latencies: how often the network's latency lies on the way to the client's result, more often
            than without a trace.
    """

    name: str
    stages: int
    untraced_ms: float
    overhead_ms: float
    one_stage_ms: float
    pulls: int
    bytes: int
    waited_ms: float
    latencies: int


def predict(name: str, stages: int, model: Model, costs: Costs) -> Prediction:
    """What a workload costs.

    Raises:
        ValueError: the model's layers cannot be divided evenly into so many stages.
    """

    def timed(stages: int, costs: Costs, *, traced: bool = True) -> tuple[float, TimedWorld]:
        world = TimedWorld(workloads.case(name, model, stages, traced=traced), model, costs)
        return world.seconds(), world

    took, world = timed(stages, costs)
    plain, _ = timed(stages, costs, traced=False)
    slower = replace(costs, latency_s=costs.latency_s + _NUDGE_S)
    late = timed(stages, slower)[0] - timed(stages, slower, traced=False)[0]
    alone = timed(1, costs)[0] - timed(1, costs, traced=False)[0]
    return Prediction(
        name,
        stages,
        round(1e3 * plain, 3),
        round(1e3 * (took - plain), 3),
        round(1e3 * alone, 3),
        sum(rank.core.counters.pulls for rank in world.timed.values()),
        world.bytes,
        round(1e3 * world.waited_s, 3),
        round((late - (took - plain)) / _NUDGE_S),
    )


def run(options: argparse.Namespace) -> Answer:
    """``ppsim predict``."""
    needs_sources("predicting")
    measured = json.loads(options.measured.read_text()) if options.measured else {}
    model, costs = calibrate.costs(measured)
    given = {name: getattr(options, name) for name in ("layers", "hidden", "vocabulary", "prompt")}
    given["step_s"] = options.step
    model = replace(model, **{name: value for name, value in given.items() if value is not None})
    network = {"latency_s": options.latency, "bandwidth": options.bandwidth}
    costs = replace(costs, **{name: value for name, value in network.items() if value is not None})
    found = []
    try:
        for stages in options.stages:
            for name in options.only or workloads.WORKLOADS:
                found.append(predict(name, stages, model, costs))
    except ValueError as error:
        print(error)
        return 2, {"error": str(error)}
    overheads = calibrate.overheads(measured)
    print(table(found, overheads))
    rows = [asdict(one) | {"measured_ms": overheads.get((one.name, one.stages))} for one in found]
    return 0, {"predictions": rows, "model": asdict(model), "costs": asdict(costs)}


def table(found: list[Prediction], measured: dict[tuple[str, int], float]) -> str:
    """The predictions for people, beside what was measured where it was."""
    lines = [
        f"{'trace':<13}{'stages':>7}{'untraced ms':>13}{'overhead ms':>13}{'on 1 stage':>12}"
        f"{'values':>8}{'bytes':>9}{'waited ms':>11}{'latencies':>11}"
        + (f"{'measured ms':>13}{'ratio':>7}" if measured else "")
    ]
    for one in found:
        there = measured.get((one.name, one.stages))
        beside = f"{there:>13.1f}{one.overhead_ms / there:>7.2f}" if there else ""
        lines.append(
            f"{one.name:<13}{one.stages:>7}{one.untraced_ms:>13.1f}{one.overhead_ms:>13.2f}"
            f"{one.one_stage_ms:>12.2f}{one.pulls:>8}{one.bytes:>9}{one.waited_ms:>11.2f}"
            f"{one.latencies:>11}{beside}"
        )
    return "\n".join(lines)
