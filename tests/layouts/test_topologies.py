"""The whole catalogue of traces on every shape of pipeline, against one stage.

Rows of the table are layouts. An engine of one stage is the reference for each number of columns: sums over two
columns are added up in another order than on one, so bits are compared between equals.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.layouts.engines import Engine, Table

TITLE = "the catalogue of traces, by layout"
LAYERS = 8


#: In every process of an engine on Ray this is imported first.
ON_CPU = Path(__file__).resolve().parent / "ray_on_cpu"


@dataclass(frozen=True)
class Layout:
    """So many stages and columns.

    Attributes:
        partition: vLLM's setting of layers to stages.
        ray: which of vLLM's Ray executors, 1 or 2; 0 is none. Its first runs forwards on one thread
            and RPCs on another.
    """

    stages: int
    columns: int = 1
    partition: str = ""
    ray: int = 0

    def __str__(self) -> str:
        name = f"PP={self.stages}" + (f" TP={self.columns}" if self.columns > 1 else "")
        notes = [self.partition] if self.partition else []
        notes += [f"Ray {self.ray}"] if self.ray else []
        return name + (f" ({', '.join(notes)})" if notes else "")

    def start(self, checkpoint: str) -> Engine:
        env: dict[str, str] = {}
        settings: dict[str, Any] = {}
        if self.partition:
            env["VLLM_PP_LAYER_PARTITION"] = self.partition
        if self.ray:
            settings["distributed_executor_backend"] = "ray"
            env |= {
                "PYTHONPATH": os.pathsep.join([str(ON_CPU), *filter(None, sys.path)]),
                "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": self.stages * self.columns}),
                "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": str(self.ray - 1),
                "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": "shm",
                "VLLM_USE_RAY_WRAPPED_PP_COMM": "0",
            }
        return Engine(
            checkpoint,
            env=env,
            warm=not self.ray,
            pipeline_parallel_size=self.stages,
            tensor_parallel_size=self.columns,
            **settings,
        ).wait()


#: Traces that act in one step on what a module of another stage made of an early value. With several
#: columns that module gathers on the forward's thread, later: such a trace is refused, and says why.
REFUSED_WITH_COLUMNS = ("exchanged_mlps", "steering_by_lens")


def refused(layout: Layout) -> tuple[str, ...]:
    """The traces that end in an error on a layout, and on one stage do not."""
    return REFUSED_WITH_COLUMNS if layout.columns > 1 else ()


LAYOUTS = [
    Layout(2),
    Layout(2, partition="1,7"),
    Layout(2, partition="7,1"),
    Layout(3),  # eight layers are not divisible: vLLM makes it 3, 3, 2
    Layout(3, partition="1,6,1"),
    Layout(4, partition="2,1,3,2"),
    Layout(2, columns=2),
    Layout(2, ray=1),
    Layout(2, ray=2),
]


@dataclass
class References:
    """What one stage answered, by columns; its engine runs no longer than it takes to ask."""

    checkpoint: str
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)

    def get(self, columns: int) -> dict[str, Any]:
        if columns not in self.answers:
            engine = Layout(1, columns).start(self.checkpoint)
            try:
                self.answers[columns] = catalogue_on(engine)
            finally:
                left = engine.stop()
            assert left == []
        return self.answers[columns]


def agents_of_ray(engine: Engine) -> set[int]:
    """Ray's own agents among an engine's processes: they end some time after their raylet."""
    found = set()
    for pid in engine.process.processes():
        with contextlib.suppress(OSError):
            if re.match(rb"ray::\w+Agent\b", Path(f"/proc/{pid}/cmdline").read_bytes()):
                found.add(pid)
    return found


def catalogue_on(engine: Engine) -> dict[str, Any]:
    """Name -> (performance or error text, warnings)."""
    from ppcore.vllm.child import EngineError
    from ppcore.vllm.traces import CATALOGUE
    from ppcore.vllm.traces.perform import perform
    from tests.layouts.engines import CALL_S

    assert not engine.error, engine.error
    answers: dict[str, Any] = {}
    for name in CATALOGUE:
        engine.process.warnings()
        try:
            answer = engine.process.call(perform, name, timeout_s=CALL_S)
        except EngineError as error:
            answer = str(error)
        answers[name] = (answer, engine.process.warnings())
    return answers


@pytest.fixture(scope="session")
def references() -> References:
    from ppcore.vllm.checkpoints import random_llama

    return References(str(random_llama(layers=LAYERS, vocab=320)))


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def answers(
    request: pytest.FixtureRequest, references: References, table: Table
) -> Iterator[tuple[Layout, dict[str, Any], dict[str, Any]]]:
    layout = request.param
    if layout.ray:
        pytest.importorskip("ray")
    alone = references.get(layout.columns)
    engine = layout.start(references.checkpoint)
    try:
        if layout.stages * layout.columns > len(os.sched_getaffinity(0)):
            said = engine.process.log.read_text(errors="replace")
            assert layout.columns == 1 or "CPU SHM communicator disabled for group tp" in said
        yield layout, alone, catalogue_on(engine)
    finally:
        rays = agents_of_ray(engine)
        left = engine.stop()
        table.enter(TITLE, str(layout), "seconds", f"{engine.age_s():.0f}")
    assert set(left) <= rays


def test_every_trace_is_answered_as_on_one_stage(
    answers: tuple[Layout, dict[str, Any], dict[str, Any]], table: Table
) -> None:
    from ppcore.vllm.compare import compare
    from ppcore.vllm.traces import CATALOGUE

    layout, alone, staged = answers
    wrong: list[str] = []
    for name, trace in CATALOGUE.items():
        (one, one_warned), (many, many_warned) = alone[name], staged[name]
        if name in refused(layout):
            if isinstance(one, str) or "Missed: " not in str(many):
                wrong.append(f"{name}: not refused: {many}")
            continue
        if isinstance(one, str) or isinstance(many, str):
            wrong.append(f"{name}: {one if isinstance(one, str) else many}")
            continue
        found = compare(one.result, many.result, exact=not trace.batched)
        wrong += [f"{name}: {difference}" for difference in found.differences]
        # What a worker prints comes through Ray late, and not every time.
        if one_warned != many_warned and not layout.ray:
            wrong.append(f"{name}: warned {many_warned}, one stage {one_warned}")
        if many.left:
            wrong.append(f"{name}: left {many.left}")
    bad = {line.partition(":")[0] for line in wrong}
    asked = len(CATALOGUE) - len(refused(layout))
    table.enter(TITLE, str(layout), "traces", str(asked))
    table.enter(TITLE, str(layout), "same", str(asked - len(bad)))
    table.enter(TITLE, str(layout), "differ", ",".join(sorted(bad)) or "0")
    assert not wrong, "\n".join(wrong)
