"""Two or three cores and the messages between them, for protocol stories without torch.

A message lies on its link, spelled, until the story delivers it; so a story decides what arrives
before what. Payloads are opaque here as they are to the core: a served value arrives as the text
``expression of token``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ppcore.core import Available, Core, Decision
from ppcore.effects import Abandoned, Compute, Describe, Dropped, Effect, Landed, Send, Serve
from ppcore.messages import Key, Message, Reply, Worker, parse, spell
from ppcore.schedule import Schedule

A = "model.a.output"
B = "model.b.output"
C = "model.c.output"
LOGITS = "model.logits"

#: Stage 0 visits a, stage 1 visits b and the logits; with three stages, c lies between.
TWO = ([A], [B, LOGITS])
THREE = ([A], [B], [C, LOGITS])

WORKER = Worker("r")


class Network:
    """The cores of one column, one for each stage, and what they have to say to each other."""

    def __init__(self, visits: Sequence[Iterable[str]] = TWO, **homes: Iterable[int]) -> None:
        self.schedule = Schedule.build([list(found) for found in visits])
        paths = {path.replace("__", "."): stages for path, stages in homes.items()}
        self.cores = [Core(stage, self.schedule, paths) for stage in range(len(visits))]
        #: (from, to) -> what was sent and not delivered, with its payload.
        self.links: dict[tuple[int, int], deque[tuple[str, Any]]] = {}
        #: For each stage, what landed: pull number -> payload, or the reason why never.
        self.landed: list[dict[int, Any]] = [{} for _ in visits]
        self.refused: list[dict[int, str]] = [{} for _ in visits]
        self.abandoned: list[dict[Worker, str]] = [{} for _ in visits]
        self.dropped: list[list[str]] = [[] for _ in visits]
        #: Every message sent, for counting: (from, to, spelled).
        self.said: list[tuple[int, int, str]] = []

    # --- what happens between the ranks -------------------------------------------------------

    def do(self, stage: int, effects: Iterable[Effect]) -> None:
        """Carry out what a core returned."""
        for effect in effects:
            match effect:
                case Send(peer, message, token):
                    self._post(stage, peer, message, token)
                case Compute(_, key, location, _, token, of):
                    result = f"{location} of {of[0] if of else token}"
                    self.do(stage, self.cores[stage].computed(key, location, result, len(result)))
                case Serve(peer, number, _, expression, token):
                    payload = f"{expression} of {token}" if expression else token
                    self._post(stage, peer, Reply(number), payload)
                case Describe(peer, number, call):
                    self._post(stage, peer, Reply(number), f"structure of {call}")
                case Landed(number, token, None):
                    self.landed[stage][number] = token
                case Landed(number, _, reason):
                    self.refused[stage][number] = str(reason)
                case Abandoned(worker, _, error):
                    self.abandoned[stage][worker] = error
                case Dropped(request):
                    self.dropped[stage].append(request)

    def _post(self, source: int, target: int, message: Message, payload: Any = None) -> None:
        text = spell(message)
        self.said.append((source, target, text))
        self.links.setdefault((source, target), deque()).append((text, payload))

    def deliver(self, source: int, target: int) -> None:
        """The oldest message from one stage arrives at another."""
        text, payload = self.links[source, target].popleft()
        self.do(target, self.cores[target].take(source, parse(text), payload))

    def settle(self) -> None:
        """Deliver until nothing is under way."""
        while waiting := [pair for pair, queue in self.links.items() if queue]:
            for source, target in waiting:
                self.deliver(source, target)

    def under_way(self) -> list[str]:
        """Words of the messages that are sent and not delivered."""
        return [text.split()[0] for queue in self.links.values() for text, _ in queue]

    # --- what the ranks do --------------------------------------------------------------------

    def open_round(self, *requests: str, stages: Iterable[int] | None = None) -> None:
        """The next round opens, on every stage or on those named."""
        for stage in range(len(self.cores)) if stages is None else stages:
            self.do(stage, self.cores[stage].open_round(requests))

    def begin(self, worker: Worker = WORKER) -> None:
        """Every rank opens a round for the worker's request and starts its block."""
        self.open_round(worker.request)
        for core in self.cores:
            core.start(worker)

    def touch(
        self, stage: int, location: str, occurrence: int | None = None, worker: Worker = WORKER
    ) -> Decision:
        """The worker parks on a location; relaxed where no occurrence is named."""
        core = self.cores[stage]
        wanted = core.wanted(worker, location) if occurrence is None else occurrence
        return core.access(worker, location, wanted)

    def serve(self, stage: int, decision: Decision, location: str, token: str) -> None:
        """The forward serves a local read, which is published."""
        core = self.cores[stage]
        core.served(decision.key.worker, decision.place)
        self.do(stage, core.publish(decision.key, location, token, len(token)))

    def read(self, stage: int, location: str, token: str, worker: Worker = WORKER) -> Decision:
        """The worker reads a location that is local to the stage, and is served."""
        decision = self.touch(stage, location, worker=worker)
        self.serve(stage, decision, location, token)
        return decision

    def pull(self, stage: int, decision: Decision, location: str, expression: str = "") -> int:
        """A lazy of the decision's access is forced; the pull's number."""
        when = Available(decision.place.turn, decision.owner)
        number, effects = self.cores[stage].pull(
            decision.key, location, expression, decision.owner, when
        )
        self.do(stage, effects)
        return number

    def release(self, stage: int, owner: int, *keys: Key) -> None:
        """The stage tells an owner that it can force these values no more."""
        self.do(stage, self.cores[stage].release((owner, key) for key in keys))

    def finish(self, stage: int, worker: Worker = WORKER) -> None:
        """The worker's block is over on this stage."""
        self.do(stage, self.cores[stage].finish(worker))

    def end(self, *stages: int, request: str = "r") -> None:
        """The request ends on these stages, and they pull nothing more of it."""
        for stage in stages:
            self.cores[stage].end(request)
            self.do(stage, self.cores[stage].say_done(request))

    def kill(self, stage: int) -> None:
        """A rank dies; the others notice."""
        for other, core in enumerate(self.cores):
            if other != stage:
                self.do(other, core.peer_died(stage, "connection reset"))

    # --- what can be seen ---------------------------------------------------------------------

    def entries(self, stage: int) -> int:
        """Values published on the stage."""
        return self.cores[stage].buffered()[0]

    def at_rest(self) -> bool:
        """Whether nothing is left of any request anywhere."""
        return not any(
            core.requests or core.pending() or core.buffered() != (0, 0) for core in self.cores
        ) and not any(self.links.values())
