"""The tests' side: processes of one column, the reference, and a client that traces on either."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from nnsight.intervention.errors import raise_deferred
from nnsight.intervention.serialization import dumps
from nnsight.tracing.tracer import mark

from ppcore.runtime.collect import entry
from ppcore.saves import Shipment
from ppsim.real.tree import Tree
from tests.harness import model as tiny
from tests.harness.stage import Job, Stage

REPO = Path(__file__).resolve().parents[2]

#: Nothing here takes longer, unless it hangs.
ANSWER_TIMEOUT_S = 40.0

#: Starting is importing torch and nnsight, on cores that others may use too.
START_TIMEOUT_S = 120.0

_ids = itertools.count()


@dataclass
class Outcome:
    """What came home of one request."""

    saves: dict[str, Any]
    error: Any
    tokens: list[int]
    #: For each stage, what it warned of.
    warnings: list[list[str]]
    shipments: list[Shipment] = field(default_factory=list)
    #: What registered blocks saved.
    registered: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Where a client's requests run."""

    def serve(self, jobs: list[Job]) -> dict[str, Outcome]: ...


def run_jobs(stage: Stage, jobs: list[Job]) -> dict[str, Any]:
    return stage.run(jobs)


def status(stage: Stage) -> dict[str, int]:
    return stage.status()


def outcomes(answers: list[dict[str, Any]]) -> dict[str, Outcome]:
    """Merge what the stages shipped, as the engine's client side does."""
    found: dict[str, Outcome] = {}
    for name in answers[0]["shipped"]:
        parts = [pickle.loads(answer["shipped"][name]) for answer in answers]
        warned = [part[1] for part in parts]
        shipped = [part[0] for part in parts]
        shipments = [found for found in shipped if isinstance(found, Shipment)]
        if shipments:
            made = entry(shipments)
        else:  # the reference's, which has nothing to merge; or nobody traced the request
            made = shipped[0] or {"saves": {}, "error": None}
        found[name] = Outcome(
            made["saves"],
            made["error"],
            parts[-1][2],
            warned,
            shipments,
            made.get("registered", {}),
        )
    return found


class Reference:
    """Plain nnsight on one rank, in this process."""

    def __init__(self) -> None:
        # As on the ranks: the order of a sum depends on the number of threads.
        torch.set_num_threads(1)
        self._stage = Stage()

    def serve(self, jobs: list[Job]) -> dict[str, Outcome]:
        return outcomes([self._stage.run(jobs)])


class Cluster:
    """The processes of one column. Every wait is bounded; they are stopped through their handles."""

    def __init__(self, stages: int, folder: Path, deadline_s: float = 20.0) -> None:
        self.stages = stages
        self.folder = folder
        self.processes: list[subprocess.Popen] = []
        self.pipes: list[Any] = []
        #: Statuses after the last run, and before it.
        self.after: list[dict[str, int]] = []
        self.before: list[dict[str, int]] = []
        for stage in range(stages):
            ours, theirs = multiprocessing.Pipe()
            arguments = [theirs.fileno(), stage, stages, folder / "store", deadline_s]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.harness.stage", *map(str, arguments)],
                    cwd=REPO,
                    pass_fds=[theirs.fileno()],
                    stderr=(folder / f"stage{stage}.log").open("wb"),
                )
            )
            theirs.close()
            self.pipes.append(ours)

    def wait_ready(self) -> None:
        for stage in range(self.stages):
            self.answer(stage, START_TIMEOUT_S)
        self.before = self.after = self.each(status)

    def send(self, stage: int, function: Callable, *args: Any) -> None:
        """Have a stage call ``function(stage, *args)``; `answer` brings the result."""
        self.pipes[stage].send((function, args))

    def answer(self, stage: int, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The result of the oldest call that was sent to a stage."""
        if not self.pipes[stage].poll(timeout_s):
            raise TimeoutError(f"stage {stage} said nothing for {timeout_s} s; {self.log(stage)}")
        try:
            fine, result = self.pipes[stage].recv()
        except (EOFError, ConnectionResetError) as error:
            raise RuntimeError(f"stage {stage} is gone; {self.log(stage)}") from error
        if not fine:
            raise StageError(result)
        return result

    def log(self, stage: int) -> str:
        return (self.folder / f"stage{stage}.log").read_text()[-3000:]

    def each(self, function: Callable, *args: Any) -> list[Any]:
        for stage in range(self.stages):
            self.send(stage, function, *args)
        return [self.answer(stage) for stage in range(self.stages)]

    def on(self, stage: int, function: Callable, *args: Any) -> Any:
        self.send(stage, function, *args)
        return self.answer(stage)

    def serve(self, jobs: list[Job]) -> dict[str, Outcome]:
        """Run the requests; afterwards nothing may be left of them on any rank."""
        self.before = self.after
        answers = self.each(run_jobs, jobs)
        self.after = [answer["status"] for answer in answers]
        for stage, found in enumerate(self.after):
            left = {
                name: found[name]
                for name in (
                    "requests",
                    "workers",
                    "buffer_entries",
                    "buffer_bytes",
                    "pending_pulls",
                )
            }
            assert not any(left.values()), f"left on stage {stage}: {left}"
        return outcomes(answers)

    def moved(self, name: str) -> list[int]:
        """How much a total grew in the last run, for each stage."""
        return [
            after[name] - before[name]
            for after, before in zip(self.after, self.before, strict=True)
        ]

    def answers(self) -> bool:
        """Whether every stage is there and listens."""
        try:
            self.after = self.each(status)
        except (OSError, RuntimeError, StageError, TimeoutError):
            return False
        return True

    def kill(self, stage: int) -> None:
        self.processes[stage].kill()
        self.processes[stage].wait(10)

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(10)


class StageError(Exception):
    """What a call raised on a stage."""


class Client(Tree):
    """A tree over the model without weights, whose traces run on a backend."""

    def __init__(self, backend: Backend) -> None:
        with torch.device("meta"):
            module = tiny.Causal()
        super().__init__(module)
        self.__dict__["backend"] = backend
        #: The outcomes of the last trace, in the order of its invokes.
        self.__dict__["last"] = []

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        state["backend"], state["last"] = None, []
        return state

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        return 1 if inputs else 0

    def interleave(self, fn: Any, *args: Any, batcher: Any = None, **kwargs: Any) -> None:
        """Ship the trace's blocks, one request each, and bring their saves home."""
        mediators = [m for m in self.interleaver.mediators if m.batch_group is not None]
        jobs = []
        for mediator, (inputs, own) in zip(mediators, batcher.invokes, strict=True):
            name = f"r{next(_ids)}"
            jobs.append(Job(name, dumps(mediator), list(inputs[0]), **{**kwargs, **own}))
        found = self.backend.serve(jobs)
        self.__dict__["last"] = [found[job.id] for job in jobs]
        for mediator, outcome in zip(mediators, self.last, strict=True):
            for name, value in outcome.saves.items():
                mediator.lcls[name] = mark(value)
        for outcome in self.last:
            if isinstance(outcome.error, Exception):
                raise outcome.error
            raise_deferred(outcome.error)
