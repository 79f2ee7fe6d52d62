"""The real runtime under the scheduler: a case on a column of ranks, each with its threads.

`World` is to `ppcore.runtime` what `ppsim.world.World` is to the core. The forwards of the ranks, their
listeners and the engine are threads, as in a real run, so that what torch, greenlet and nnsight keep
per thread is each rank's own, and one of them moves at a time (see `ppsim.real.baton`). A run is a
function of its case and its schedule. A wait has no deadline here; a run in which no task can move is a
hang, and its report says who waits for what.

What a destructor does happens where the last reference goes; the cycle collector, which runs whenever
it likes, is off while a case runs.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch

from ppcore.runtime.collect import entry
from ppcore.runtime.link import Link
from ppcore.runtime.transport import Buffer
from ppcore.saves import Shipment
from ppsim.cases import Case, Request
from ppsim.engine import choose, coin, lingers
from ppsim.failures import Leak, Liveness
from ppsim.world import Note, Strategy

from .baton import LIMIT, Baton, Lock, Wait
from .outcome import Outcome, outcome_of
from .stage import New, Output, Part, Rank, Stage
from .translate import prompt


class Channels:
    """One rank's transport: a queue for each peer, drained by listener tasks."""

    def __init__(self, world: World, stage: int) -> None:
        self._world, self._stage = world, stage

    def start(self, on_frame: Callable[..., None], on_death: Callable[[int, str], None]) -> None:
        for peer in range(self._world.case.stages):
            if peer != self._stage:
                self._world.listen(self._stage, peer, on_frame)

    def send(self, peer: int, text: str, payload: Sequence[Buffer] = ()) -> None:
        self._world.sent(self._stage, peer, text, b"".join(payload))

    def close(self, timeout_s: float = 2.0) -> bool:
        return True


#: Request -> its blocks, serialized; the traced one is named ``""``.
Blocks = dict[str, dict[str, bytes]]


def register(rank: Rank, blocks: Blocks) -> None:
    """Install all registered blocks, each under its request's name and its own."""
    for name, mine in blocks.items():
        rank.register({f"{name}.{block}": payload for block, payload in mine.items() if block})


def arrival(name: str, mine: dict[str, bytes]) -> New:
    """A request as it arrives."""
    return New(name, mine.get(""), [f"{name}.{block}" for block in mine if block])


@dataclass
class Progress:
    """One request's run, as the engine sees it.

    Attributes:
        rounds: how many steps it has taken part in.
        recomputed: the turns before which it was preempted.
    """

    index: int
    request: Request
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    recomputed: set[int] = field(default_factory=set)
    busy: bool = False
    over: bool = False

    def preempt(self) -> None:
        """See `ppsim.engine.Waiting`."""
        if self.rounds:
            self.recomputed.add(self.rounds)

    def part(self) -> Part:
        """What it puts into its next step: its last token, or all where it begins or was preempted."""
        name, tokens = self.request.name, self.tokens
        if tokens and self.rounds not in self.recomputed:
            return Part(name, tokens[-1:], len(self.prompt) + len(tokens) - 1)
        return Part(name, [*self.prompt, *tokens], 0)


@dataclass(frozen=True)
class Step:
    """A command to every rank: one forward step."""

    parts: tuple[Part, ...]
    new: tuple[str, ...]
    finished: tuple[str, ...]


@dataclass(frozen=True)
class Collect:
    """A command to every rank: wind up this request."""

    name: str
    tokens: tuple[int, ...]


class World(Baton):
    """One run of a case on a column of stages.

    Attributes:
        commands: what the engine had every rank do; None is the last.
        outcomes: request -> what its client gets.

    Args:
        case: what is run; one column, no faults but blocks that raise on one rank.
        blocks: the requests' blocks.
        stages: the ranks, which are left as they were found.
        record: keep the schedule, and notes to draw.
    """

    def __init__(
        self,
        case: Case,
        blocks: Blocks,
        stages: list[Stage],
        *,
        record: bool = False,
        limit: int = LIMIT,
    ) -> None:
        super().__init__(record=record, limit=limit)
        self.case, self.blocks, self.stages = case, blocks, stages
        self.ranks = {(stage.stage, 0): stage for stage in stages}
        self.notes: list[Note] = []
        self.outcomes: dict[str, Outcome] = {}
        self.progress = {
            request.name: Progress(index, request, prompt(case, request))
            for index, request in enumerate(case.requests)
        }
        self._channels: dict[tuple[int, int], deque[tuple[str, bytes]]] = {}
        self._inboxes: dict[int, deque[Any]] = {stage.stage: deque() for stage in stages}
        self.commands: list[Step | Collect | None] = []
        self._results: deque[tuple[Step, list[int], set[str]]] = deque()
        self._collected: dict[str, dict[int, tuple[Shipment | None, list[str]]]] = {}
        self._running = 0
        self._steps = 0
        self.task("engine", self._engine)
        for stage in stages:
            self.task(f"f{stage.stage}.0", lambda stage=stage: self._forward(stage))
        for stage in stages:
            link = Link(
                stage.core(),
                Channels(self, stage.stage),
                torch.device("cpu"),
                deadline_s=1e9,
                parameter=stage.calls.value_of,
                describe=stage.calls.describe,
                compute=stage.calls.compute,
                dropped=stage.calls.dropped,
                changed=Lock(self),  # type: ignore[arg-type]
            )
            # It runs on at least once: raising before its first statement is no fault of a rank.
            stage.connect(
                link, {f.request: f.at + 1 for f in case.faults if f.stage == stage.stage}
            )

    def run(self, strategy: Strategy) -> World:
        """Run to the end; what went wrong, if anything did, is in ``failure`` afterwards."""
        gc.collect(0)
        gc.disable()
        try:
            self.run_tasks(strategy)
        finally:
            gc.enable()
        return self

    # --- the network --------------------------------------------------------------------------

    def listen(self, stage: int, peer: int, on_frame: Callable[..., None]) -> None:
        """Add the task that takes what ``peer`` sends to ``stage``."""
        channel = self._channels[peer, stage] = deque()

        def run() -> None:
            while True:
                if not channel:
                    self.pause(lambda: bool(channel))
                text, payload = channel.popleft()
                if self.record:
                    self.notes.append(Note(self.events, "take", stage, 0, peer, text))
                on_frame(peer, text, memoryview(payload))

        self.task(f"l{stage}.0<{peer}", run)

    def sent(self, stage: int, peer: int, text: str, payload: bytes) -> None:
        """A message is on its way; how long that takes is the scheduler's choice."""
        # An error's text has addresses in it, which are no part of what happened.
        word = text.partition(" ")[0]
        plain = word if word in ("failed", "never") else text
        self.mark(crc32(payload, crc32(plain.encode())) + peer)
        if self.record:
            self.notes.append(Note(self.events, "send", stage, 0, peer, text))
        self._channels[stage, peer].append((text, payload))

    # --- a rank -------------------------------------------------------------------------------

    def _forward(self, stage: Stage) -> None:
        number = 0
        register(stage, self.blocks)
        while True:
            if number >= len(self.commands):
                self.pause(lambda number=number: len(self.commands) > number)
            command = self.commands[number]
            number += 1
            if command is None:
                return
            if isinstance(command, Collect):
                found = stage.collect(command.name, Output(list(command.tokens)))
                self._collected.setdefault(command.name, {})[stage.stage] = found
            else:
                self._step(stage, command)

    def _step(self, stage: Stage, step: Step) -> None:
        inbox = self._inboxes[stage.stage]

        def receive(tokens: int) -> Any:
            if not inbox:
                self.pause(lambda: bool(inbox))
            return inbox.popleft()

        def hand_on(out: Any) -> None:
            self._inboxes[stage.stage + 1].append(tuple(tensor.clone() for tensor in out))
            self.pause()

        new = [arrival(name, self.blocks[name]) for name in step.new]
        tokens = stage.step(
            step.parts, new, step.finished, receive=receive, hand_on=hand_on,
            lingers=lingers(self.case.batching, stage.link.core.round + 1),
        )  # fmt: skip
        if stage.last:
            erred = {part.name for part in step.parts if stage.erred(part.name)}
            self.mark(crc32(repr(tokens).encode()))
            self._results.append((step, tokens, erred))

    # --- the engine ---------------------------------------------------------------------------

    def _engine(self) -> None:
        for wait in self._schedule():
            self.pause(wait)

    def _schedule(self) -> Generator[Wait, None, None]:
        """What matters of vLLM's scheduler; see `ppsim.engine`."""
        finished: list[str] = []
        while True:
            batch = self._choose() if self._running < self.case.stages else []
            if batch:
                self._submit(batch, finished)
                yield None
            elif self._results:
                ended = self._update(*self._results.popleft())
                finished += ended
                if ended and self._coin(3):  # the next step may come before the collect
                    batch = self._choose() if self._running < self.case.stages else []
                    if batch:
                        self._submit(batch, finished)
                        yield None
                for name in ended:
                    self.commands.append(Collect(name, tuple(self.progress[name].tokens)))
                if ended and not self._coin(2):
                    yield lambda ended=ended: all(self._home(name) for name in ended)
            elif all(p.over for p in self.progress.values()) and not self._running:
                break
            else:
                yield lambda: bool(self._results)
        yield lambda: all(self._home(name) for name in self.progress)
        self.commands.append(None)

    def _home(self, name: str) -> bool:
        return len(self._collected.get(name, ())) == self.case.stages

    def _coin(self, bit: int) -> bool:
        """A choice that the case's ``batching`` makes, the same in every run of it."""
        return coin(self.case.batching, self._steps, bit)

    def _choose(self) -> list[Progress]:
        free = {name: p for name, p in self.progress.items() if not p.busy and not p.over}
        taken = choose(free, self.case.batching, self._steps, idle=not self._running)
        return list(taken.values())

    def _submit(self, batch: list[Progress], finished: list[str]) -> None:
        parts = tuple(progress.part() for progress in batch)
        new = tuple(p.request.name for p in batch if not p.rounds)
        for progress in batch:
            progress.busy = True
            progress.rounds += 1
        self.commands.append(Step(parts, new, tuple(finished)))
        finished.clear()
        self._steps += 1
        self._running += 1

    def _update(self, step: Step, tokens: list[int], erred: set[str]) -> list[str]:
        self._running -= 1
        ended: list[str] = []
        for part, token in zip(step.parts, tokens, strict=True):
            progress = self.progress[part.name]
            progress.busy = False
            progress.tokens.append(token)
            stopped = part.name in erred and not progress.request.ignore_eos
            if stopped or len(progress.tokens) >= progress.request.tokens:
                progress.over = True
                ended.append(part.name)
        return ended

    # --- at rest ------------------------------------------------------------------------------

    def rest(self) -> None:
        """``ends`` and ``rest``: everything has ended, and nothing of it is left."""
        if self.failure is not None:
            return
        stuck = [task.name for task in self.left if not task.name.startswith("l")]
        if stuck:
            self.failure = Liveness("ends", f"{', '.join(stuck)} never end\n{self.report()}")
            return
        for name, progress in self.progress.items():
            found = [self._collected[name][stage] for stage in range(self.case.stages)]
            shipments = [shipment for shipment, _ in found if shipment is not None]
            made = entry(shipments) if shipments else {}
            warned = [tuple(warnings) for _, warnings in found]
            self.outcomes[name] = outcome_of(made, progress.tokens, warned)
        for stage in self.stages:
            link = stage.link
            if link._landed or link._refused:
                gc.collect()  # nnsight leaves what it unwinds in cycles with their tracebacks
            link.close_round()  # what the last references let go since the last one
            left = {
                **{k: v for k, v in stage.status().items() if k in _LEFT},
                "landed values": len(link._landed),
                "refusals": len(link._refused),
                "abandonments": len(link._abandoned),
                "results": len(stage.calls.results),
            }
            found_left = {name: count for name, count in left.items() if count}
            if found_left:
                self.failure = Leak("rest", f"stage {stage.stage} still has {found_left}")
                return

    def report(self) -> str:
        """Who waits for what: each rank, its round, its protocol waits, its workers."""
        lines: list[str] = []
        for stage in self.stages:
            core = stage.link.core
            lines.append(f"rank ({stage.stage}, 0): round {core.round}")
            lines += [f"  {line}" for line in core.waits()]
            for worker in stage.requests.workers():
                if worker.alive:
                    pulls = f"pulls {worker.seat.pulls}"
                    parked = worker.held or worker.pending or pulls
                    lines.append(f"  worker {worker.worker_id} parked on {parked}")
        for (peer, to), channel in self._channels.items():
            if channel:
                lines.append(f"channel {peer}->{to}: {len(channel)} messages")
        return "\n".join(lines)


_LEFT = ("requests", "workers", "buffer_entries", "buffer_bytes", "pending_pulls")
