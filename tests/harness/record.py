"""Records of real runs: generated programs on real processes over gloo, checked as they are made.

    python -m tests.harness.record --runs 1000 FOLDER

makes a folder for each run in ``FOLDER``, with a record for each rank, and says how many
``ppsim conform`` accepts. A column of processes serves many runs, with a new core for each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ppcore.core import Core
from ppcore.record import Recorder
from ppcore.runtime.link import Link
from ppcore.runtime.transport import GlooTransport, OnDeath, OnFrame, Transport
from ppsim import generate, world
from ppsim.cases import Case
from ppsim.conform import Verdict, check_files
from ppsim.real import execute
from ppsim.real import stage as real
from ppsim.real.exact import Exact
from ppsim.real.translate import prompt
from ppsim.strategies import RandomWalk
from tests.harness.cluster import Cluster
from tests.harness.stage import Job, Stage


def cases(stages: int, start: int = 0) -> Iterator[tuple[int, Case]]:
    """(seed, case) of generated cases for columns of so many stages in which something crosses.

    Whether something does the simulator knows. Registered blocks are left out.
    """
    seed = start
    while True:
        case = generate.case(seed, faults=False)
        requests = tuple(
            replace(request, blocks=tuple(block for block in request.blocks if not block[0]))
            for request in case.requests
        )
        requests = tuple(request for request in requests if request.blocks)
        case = execute.plain(replace(case, requests=requests))
        if case.stages == stages and requests and _pulls(case):
            yield seed, case
        seed += 1


def _pulls(case: Case) -> int:
    done = world.run(case, RandomWalk(0))
    return sum(rank.core.counters.pulls for rank in done.ranks.values())


def jobs(seed: int, case: Case) -> list[Job]:
    """The requests of a case, under names that no other seed's have."""
    payloads = execute.payloads(case)
    return [
        Job(
            f"{seed}.{request.name}",
            payloads[request.name][""],
            prompt(case, request),
            request.tokens,
            number,
        )
        for number, request in enumerate(case.requests)
    ]


# --- on the ranks -----------------------------------------------------------------------------


class _Carrier:
    """A transport that serves one link after another: a run begins with nothing of the run before."""

    def __init__(self, stages: int) -> None:
        self._carrier = GlooTransport.create([list(range(stages))])
        self.send, self.close = self._carrier.send, self._carrier.close
        self._carrier.start(
            lambda *frame: self._on_frame(*frame), lambda *death: self._on_death(*death)
        )

    def start(self, on_frame: OnFrame, on_death: OnDeath) -> None:
        """Bring what comes to these from now on."""
        self._on_frame, self._on_death = on_frame, on_death


def become(stage: Stage, shape: execute.Shape) -> None:
    """Serve the exact model of this shape from now on, over gloo."""
    if stage.link is not None:
        stage.link.close()
    stage.rank = real.Stage(Exact(*shape), stage.stage, stage.stages, stage.gather)
    carrier = _Carrier(stage.stages)
    _serve(stage, stage.rank.core(), carrier)


def _serve(stage: Stage, core: Core, carrier: Transport) -> None:
    """Have the rank speak through a link of its own to this core."""
    rank = stage.rank
    assert isinstance(rank, real.Stage)
    stage.link = Link(
        core,
        carrier,
        torch.device("cpu"),
        deadline_s=20.0,
        parameter=rank.calls.value_of,
        describe=rank.calls.describe,
        compute=rank.calls.compute,
        dropped=rank.calls.dropped,
    )
    rank.connect(stage.link)


def record(stage: Stage, path: str, wanted: list[Job]) -> dict[str, Any]:
    """Serve the requests, with a new link and a new core that records."""
    old, rank = stage.link, stage.rank
    assert old is not None and old.transport is not None and isinstance(rank, real.Stage)
    with open(path, "w", buffering=1) as file:
        made = rank.core()
        core = Recorder(made.stage, made.schedule, made.homes, lambda line: print(line, file=file))
        _serve(stage, core, old.transport)
        stage.gather(None)  # before any rank's new core is spoken to
        answer = stage.run(wanted)
        stage.gather(None)  # every rank is at rest
        recorded = stage.link
        _serve(stage, rank.core(), old.transport)
        with recorded._changed:  # a frame may just be taken
            core.close()
    return answer


# --- the tests' side --------------------------------------------------------------------------


@contextmanager
def column(stages: int) -> Iterator[Cluster]:
    """The processes of a column."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(stages, Path(folder))
        try:
            cluster.wait_ready()
            yield cluster
        finally:
            cluster.stop()


def runs(cluster: Cluster, count: int, folder: Path, start: int = 0) -> Iterator[list[Path]]:
    """Serve so many generated cases; the records of each."""
    found = cases(cluster.stages, start)
    chosen = [next(found) for _ in range(count)]
    current: execute.Shape | None = None
    for seed, case in sorted(chosen, key=lambda item: execute.shape(item[1])):
        if current != execute.shape(case):
            current = execute.shape(case)
            cluster.each(become, current)
        run = folder / f"{cluster.stages}-{seed:06}"
        run.mkdir(parents=True)
        paths = [run / f"stage{stage}.log" for stage in range(cluster.stages)]
        wanted = jobs(seed, case)
        for stage, path in enumerate(paths):
            cluster.send(stage, record, str(path), wanted)
        for stage in range(cluster.stages):
            cluster.answer(stage)
        yield paths


def main(argv: Sequence[str] | None = None) -> int:
    """Make records and check them; 1 if any is rejected."""
    parser = argparse.ArgumentParser("tests.harness.record")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    verdicts: list[Verdict] = []
    began = time.monotonic()
    for number, stages in enumerate(options.stages):
        left = len(options.stages) - number
        with column(stages) as cluster:
            count = (options.runs - len(verdicts)) // left
            for paths in runs(cluster, count, options.folder, options.seed):
                verdicts.append(check_files(paths))
                for finding in verdicts[-1].findings:
                    print(finding)
    accepted = sum(verdict.accepted for verdict in verdicts)
    print(
        f"{accepted} of {len(verdicts)} runs accepted: "
        f"{sum(verdict.ranks for verdict in verdicts)} ranks, "
        f"{sum(verdict.events for verdict in verdicts)} events, "
        f"{sum(verdict.messages for verdict in verdicts)} messages, "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(accepted < len(verdicts))


if __name__ == "__main__":
    from tests.harness.record import main as run_as_imported  # what is pickled names this module

    sys.exit(run_as_imported())
