"""A Hypothesis state machine: three cores, the messages between them, and a worker on each.

The simulator decides the same things in a whole run; here Hypothesis decides them, and shrinks what
fails to the few steps that matter, printed as the calls to make. The model is a handful of lines that
know nothing of the protocol: what a read at a line of the program must give, and that waits go
backwards.

A step that has many small choices (which message arrives) draws them at once, as bytes: one draw a
choice makes a run ten times slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ppcore.core import Decision, Verdict
from ppcore.schedule import Place
from ppcore.seat import Move, Seat
from tests.unit.network import LOGITS, THREE, WORKER, A, B, C, Network

STAGES = range(len(THREE))


@dataclass
class Rank:
    """A rank's loop, as far as the protocol sees it.

    Attributes:
        turn: the open turn; -1 before the first.
        visits: how many visits its forward has made in that turn.
        line: the program's line that the worker is parked on, or would be on next.
        lazies: (line, decision) of what was answered at once.
        pulled: number -> (line, expression).
    """

    seat: Seat
    turn: int = -1
    visits: int = 0
    line: int = 0
    pending: Decision | None = None
    lazies: dict[int, Decision] = field(default_factory=dict)
    pulled: dict[int, tuple[int, str]] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    ended: bool = False
    done: bool = False


class CoreMachine(RuleBasedStateMachine):
    """One request with one worker, that reads locations in any order over a few turns."""

    @initialize(
        program=st.lists(st.sampled_from([A, B, C, LOGITS]), min_size=1, max_size=8),
        turns=st.integers(1, 3),
    )
    def begin(self, program: list[str], turns: int) -> None:
        self.net = Network(THREE)
        self.program = program
        self.turns = turns
        self.ranks = [Rank(Seat(core, WORKER)) for core in self.net.cores]
        # What every rank must agree on: where a line's read belongs.
        self.places: dict[int, Place] = {}

    # --- steps --------------------------------------------------------------------------------

    @rule(stage=st.sampled_from(STAGES), times=st.integers(1, 4))
    def forward(self, stage: int, times: int) -> None:
        """The stage's forward goes on: a visit, or the next turn opens."""
        for _ in range(times):
            rank = self.ranks[stage]
            visits = THREE[stage]
            if rank.turn >= 0 and rank.visits < len(visits):
                self._visit(stage, visits[rank.visits])
            elif rank.turn + 1 < self.turns and self._fed(stage):
                rank.turn, rank.visits = rank.turn + 1, 0
                self.net.open_round(WORKER.request, stages=[stage])
                if rank.turn == 0:
                    self.net.cores[stage].start(WORKER)
                    self._run(stage)
                else:
                    self._go_on(stage)

    @rule(
        stage=st.sampled_from(STAGES),
        which=st.integers(0),
        expression=st.sampled_from(["", "x", "y"]),
    )
    def force(self, stage: int, which: int, expression: str) -> None:
        """A lazy's data is asked for."""
        rank = self.ranks[stage]
        if rank.lazies and not rank.done:
            line = sorted(rank.lazies)[which % len(rank.lazies)]
            number = self.net.pull(stage, rank.lazies[line], self.program[line], expression)
            before = rank.pulled.setdefault(number, (line, expression))
            assert before == (line, expression), "one number for two questions"

    @rule(stage=st.sampled_from(STAGES), which=st.integers(0))
    def forget(self, stage: int, which: int) -> None:
        """A lazy dies, and its owner is told."""
        rank = self.ranks[stage]
        if rank.lazies and not rank.done:
            line = sorted(rank.lazies)[which % len(rank.lazies)]
            if all(line != other for other, _ in self._unanswered(stage).values()):
                decision = rank.lazies.pop(line)
                self.net.release(stage, decision.owner, decision.key)

    @rule(choices=st.binary(min_size=1, max_size=12))
    def deliver(self, choices: bytes) -> None:
        """Messages arrive, each choice the oldest of one link."""
        for choice in choices:
            waiting = sorted(link for link, queue in self.net.links.items() if queue)
            if not waiting:
                return
            self.net.deliver(*waiting[choice % len(waiting)])

    @precondition(lambda self: all(self._through(stage) for stage in STAGES))
    @rule(stage=st.sampled_from(STAGES))
    def end(self, stage: int) -> None:
        """The request ends here; and once nothing is asked for any more, the rank says so."""
        rank, core = self.ranks[stage], self.net.cores[stage]
        if not rank.ended:
            rank.ended = True
            core.end(WORKER.request)
            self._go_on(stage)
            self.net.finish(stage)
        elif not rank.done and not self._unanswered(stage):
            rank.done = True
            rank.lazies.clear()
            self.net.do(stage, core.say_done(WORKER.request))

    # --- what must hold -----------------------------------------------------------------------

    @invariant()
    def answers_are_right(self) -> None:
        for stage, rank in enumerate(self.ranks if hasattr(self, "ranks") else []):
            for number, (line, expression) in rank.pulled.items():
                token = self._token(line)
                expected = f"{expression} of {token}" if expression else token
                assert self.net.landed[stage].get(number, expected) == expected
                if number in self.net.refused[stage]:
                    owner = self.net.schedule.owner(self.program[line], self.places[line].turn)
                    assert line not in self.ranks[owner].served, self.net.refused[stage][number]

    @invariant()
    def waits_go_backwards(self) -> None:
        for stage, rank in enumerate(self.ranks if hasattr(self, "ranks") else []):
            for number, (line, _) in self._unanswered(stage).items():
                place = self.places[line]
                due = (place.turn, self.net.schedule.stage_of(place.index))
                may = self.net.cores[stage].may_wait([number])
                assert may == (rank.ended or due < (rank.turn, stage)), (stage, number, due)

    @invariant()
    def published_values_have_takers(self) -> None:
        for core in self.net.cores if hasattr(self, "net") else []:
            for state in core._requests.values():
                assert all(entry.peers for entry in state.buffer.values())

    def teardown(self) -> None:
        """Let everything come to its end: nothing may be left anywhere."""
        if not hasattr(self, "net"):
            return
        for _ in range(3 * self.turns + 3):
            for stage in STAGES:
                self.forward(stage, 4)
        for _ in STAGES:
            for stage in STAGES:
                if not self.ranks[stage].done:
                    self.end(stage)
            self.net.settle()
            self.answers_are_right()
        assert all(rank.done for rank in self.ranks), "a pull is never answered"
        assert self.net.at_rest()

    # --- the ranks' loops ---------------------------------------------------------------------

    def _fed(self, stage: int) -> bool:
        """Whether the stage before has finished the turn that this one would open."""
        if stage == 0:
            return True
        before = self.ranks[stage - 1]
        turn = self.ranks[stage].turn + 1
        return before.turn > turn or (before.turn == turn and self._over(stage - 1))

    def _over(self, stage: int) -> bool:
        return self.ranks[stage].visits == len(THREE[stage])

    def _through(self, stage: int) -> bool:
        return self.ranks[stage].turn == self.turns - 1 and self._over(stage)

    def _token(self, line: int) -> str:
        return f"{self.program[line]}#{self.places[line].turn}"

    def _unanswered(self, stage: int) -> dict[int, tuple[int, str]]:
        answered = {*self.net.landed[stage], *self.net.refused[stage]}
        pulled = self.ranks[stage].pulled
        return {number: what for number, what in pulled.items() if number not in answered}

    def _visit(self, stage: int, location: str) -> None:
        rank = self.ranks[stage]
        while rank.pending is not None and self._here(stage, location):
            decision, rank.pending = rank.pending, None
            rank.served.add(rank.line)
            self.net.serve(stage, decision, location, self._token(rank.line))
            rank.line += 1
            self._run(stage)
        rank.visits += 1

    def _here(self, stage: int, location: str) -> bool:
        rank = self.ranks[stage]
        assert rank.pending is not None
        return self.program[rank.line] == location and rank.pending.place.turn == rank.turn

    def _run(self, stage: int) -> None:
        """The worker runs on until it parks, or to its end."""
        rank = self.ranks[stage]
        while rank.line < len(self.program):
            location = self.program[rank.line]
            occurrence = self.net.cores[stage].wanted(WORKER, location)
            verdict = rank.seat.ask(
                location, occurrence, passed=self._passed(stage, location, occurrence)
            )
            if not self._apply(stage, verdict):
                return
        self.net.finish(stage)

    def _passed(self, stage: int, location: str, occurrence: int) -> bool:
        rank = self.ranks[stage]
        if location not in THREE[stage]:
            return False
        gone = THREE[stage].index(location) < rank.visits
        return occurrence < rank.turn + gone

    def _apply(self, stage: int, verdict: Verdict) -> bool:
        """Do what was decided; whether the worker goes on."""
        rank = self.ranks[stage]
        decision = rank.seat.decision
        assert decision is not None
        place = self.places.setdefault(rank.line, decision.place)
        assert place == decision.place, f"line {rank.line} belongs to two places"
        if verdict is Verdict.ANSWER:
            rank.lazies[rank.line] = decision
            rank.line += 1
            return True
        if verdict is Verdict.LOCAL:
            rank.pending = decision
        return False

    def _go_on(self, stage: int) -> None:
        rank = self.ranks[stage]
        if rank.seat.go_on() is Move.RETRY:
            assert rank.seat.held is not None
            passed = self._passed(stage, *rank.seat.held)
            if self._apply(stage, rank.seat.retry(passed=passed)):
                self._run(stage)
