"""One rank as a process: `ppsim.real.stage` with torch.distributed between the stages.

`Stage` with ``stages=None`` is the reference: plain nnsight workers on one rank, driven by the same
loop. Run as a module, this file serves commands on a socket that it inherits.
"""

from __future__ import annotations

import pickle
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ppcore.runtime.link import Link
from ppcore.runtime.ranks import gather
from ppcore.runtime.transport import connect
from ppcore.runtime.watchdog import Watchdog
from ppsim.real import stage as real
from ppsim.real.stage import New, Part
from tests.harness import model as tiny

#: Seconds that a block may run without touching the model.
BLOCK_TIMEOUT_S = 2.0


@dataclass
class Job:
    """A request: a block (or none), a prompt, and how many tokens to generate.

    Attributes:
        start: the round in which it arrives.
        edits: registered blocks that it runs, by name.
        ignore_eos: whether it goes on after its block has raised or stopped.
    """

    id: str
    payload: bytes | None
    prompt: list[int]
    max_tokens: int = 1
    start: int = 0
    edits: dict[str, bytes] = field(default_factory=dict)
    ignore_eos: bool = False

    def new(self) -> New:
        """The request as it arrives."""
        return New(self.id, self.payload, [f"{self.id}.{name}" for name in self.edits])


@dataclass
class Request:
    job: Job
    tokens: list[int] = field(default_factory=list)

    @property
    def part(self) -> Part:
        """What it puts into its next step."""
        at = len(self.job.prompt) + len(self.tokens) - 1
        if self.tokens:
            return Part(self.job.id, self.tokens[-1:], at)
        return Part(self.job.id, self.job.prompt, 0)


class Stage:
    """A rank and everything on it.

    Args:
        stage: this rank's stage; 0 on the reference.
        stages: how many there are; None for the reference.
        rank: the reference's rank, if it is not to have the small model of these tests.
    """

    def __init__(
        self,
        stage: int = 0,
        stages: int | None = None,
        deadline_s: float = 20.0,
        rank: real.Whole | None = None,
    ) -> None:
        self.stage, self.stages = stage, stages or 1
        self.last = stage == self.stages - 1
        self.requests: dict[str, Request] = {}
        self.peak_entries = 0
        self.link: Link | None = None
        self.rank: real.Whole | real.Stage
        if stages is None:
            self.rank = rank or real.Whole(tiny.build())
            return
        self.rank = real.Stage(tiny.build(), stage, stages, self.gather)
        self.link = Link(
            self.rank.core(),
            connect([list(range(stages))]),
            torch.device("cpu"),
            deadline_s=deadline_s,
            watchdog=Watchdog(BLOCK_TIMEOUT_S),
            parameter=self.rank.calls.value_of,
            describe=self.rank.calls.describe,
        )
        self.rank.connect(self.link)

    def gather(self, value: Any) -> list:
        return gather(value)

    # --- a run --------------------------------------------------------------------------------

    def run(self, jobs: list[Job]) -> dict[str, Any]:
        """Serve the requests to their ends: what each ships, and what was left."""
        shipped: dict[str, bytes] = {}
        waiting, number = list(jobs), 0
        self.peak_entries = 0
        over: list[str] = []
        for job in jobs:
            self.rank.register({f"{job.id}.{name}": block for name, block in job.edits.items()})
        while waiting or self.requests:
            new = [job for job in waiting if job.start <= number]
            for job in new:
                waiting.remove(job)
                self.requests[job.id] = Request(job)
            if self.requests:
                over = self._round([job.new() for job in new], over)
                for name in over:
                    request = self.requests.pop(name)
                    found, warned = self.rank.collect(name, real.Output(list(request.tokens)))
                    shipped[name] = pickle.dumps((found, warned, request.tokens))
            number += 1
        for job in jobs:
            self.rank.unregister(f"{job.id}.{name}" for name in job.edits)
        return {"shipped": shipped, "status": self.status()}

    def _round(self, new: list[New], finished: list[str]) -> list[str]:
        """One forward step of every request; the names of those that are over."""
        batch = list(self.requests.values())
        parts = [request.part for request in batch]
        tokens = self.rank.step(parts, new, finished, receive=self._receive, hand_on=self._send)
        if self.link is not None:
            self.peak_entries = max(self.peak_entries, self.link.status()["buffer_entries"])
        return self._advance(batch, tokens)

    def _receive(self, tokens: int) -> tuple[torch.Tensor, ...]:
        passed = self.rank.root.passed(tokens)
        for tensor in passed:
            dist.recv(tensor, src=self.stage - 1)
        return passed

    def _send(self, out: tuple[torch.Tensor, ...]) -> None:
        for tensor in out:
            dist.send(tensor.contiguous(), dst=self.stage + 1)

    def _advance(self, batch: list[Request], tokens: list[int]) -> list[str]:
        """Tell every rank the tokens, and which requests are over."""
        told = torch.zeros(len(batch), 2, dtype=torch.int64)
        for row, (token, request) in enumerate(zip(tokens, batch, strict=bool(tokens))):
            over = len(request.tokens) + 1 >= request.job.max_tokens
            told[row, 0] = token
            stopped = self.rank.erred(request.job.id) and not request.job.ignore_eos
            told[row, 1] = over or stopped
        if self.stages > 1:
            dist.broadcast(told, src=self.stages - 1)
        for (token, _), request in zip(told.tolist(), batch, strict=True):
            request.tokens.append(token)
        return [r.job.id for (_, over), r in zip(told.tolist(), batch, strict=True) if over]

    def status(self) -> dict[str, int]:
        """What is left of requests here, and the running totals."""
        if not isinstance(self.rank, real.Stage):
            return {}
        self.rank.link.wait_drained()
        return {"peak_entries": self.peak_entries, **self.rank.status()}


# --- the process ------------------------------------------------------------------------------


def serve(connection: Any, stage: Stage) -> None:
    """Run functions of the parent's choice on the stage until it hangs up."""
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(stage, *args))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        connection.send(answer)


def main() -> None:
    from multiprocessing.connection import Connection

    fd, stage, stages, store, deadline_s = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-4)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(stage), world_size=int(stages)
    )
    connection = Connection(int(fd))
    built = Stage(int(stage), int(stages), float(deadline_s))
    connection.send((True, "ready"))
    serve(connection, built)


if __name__ == "__main__":
    from tests.harness.stage import main as run_as_imported  # what is pickled names this module

    run_as_imported()
