"""The catalogue of planted bugs: every one applies, leaves no trace, and most are found at once."""

from __future__ import annotations

import pytest

from ppsim import fuzz, hunts, mutants
from ppsim.cases import Case, schedule
from ppsim.mutants import CATALOGUE, HARD, Misplaced, Mutant, lifted, planted


def test_every_mutant_applies_to_the_code_as_it_is_and_is_taken_out_again() -> None:
    from ppcore.core import Core
    from ppcore.seat import Seat

    before = (dict(Core.__dict__), dict(Seat.__dict__))
    for mutant in CATALOGUE:
        with planted(mutant):
            pass
    assert (dict(Core.__dict__), dict(Seat.__dict__)) == before


def test_planted_bugs_can_be_lifted_for_a_while() -> None:
    from ppcore.core import Core

    right = Core.say_done, Core.fail
    with lifted() as any_planted:
        assert not any_planted
    with (
        planted(mutants.named("done-to-one-peer-only")),
        planted(mutants.named("failure-not-told")),
    ):
        wrong = Core.say_done, Core.fail
        with lifted() as any_planted:
            assert any_planted and (Core.say_done, Core.fail) == right
        assert wrong != right and (Core.say_done, Core.fail) == wrong
    assert (Core.say_done, Core.fail) == right


def test_what_was_worked_out_with_a_bug_is_not_kept_without_it() -> None:
    # Met for real: the schedule keeps counts, so a bug in counting outlived its hunt.
    case = Case(stages=2, shared=True)
    right = schedule(case).local_occurrence("S.out", 1, 0, 0)
    with planted(mutants.named("shared-visits-of-earlier-stages-forgotten")):
        assert schedule(case).local_occurrence("S.out", 1, 0, 0) != right
        with lifted():
            assert schedule(case).local_occurrence("S.out", 1, 0, 0) == right
    assert schedule(case).local_occurrence("S.out", 1, 0, 0) == right


def test_names_are_unique_and_there_are_enough() -> None:
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE) >= 60
    assert sum(mutant.layer in ("core", "seat") for mutant in CATALOGUE) >= 30


def test_a_mutant_whose_text_is_gone_says_so() -> None:
    gone = Mutant("gone", "ppcore.core:Core.end", "no such text", "")
    with pytest.raises(Misplaced, match="occurs 0 times"), planted(gone):
        pass


def test_code_that_fails_without_the_bug_is_no_find(monkeypatch: pytest.MonkeyPatch) -> None:
    # Met for real: the core was edited during a hunt, every execution crashed, and all counted as kills.
    def broken(self: object, requests: object) -> None:
        raise RuntimeError("broken before any mutant")

    monkeypatch.setattr("ppcore.core.Core.open_round", broken)
    seeds = range(6)
    assert all(fuzz.execution(number).failure for number in seeds)
    found = hunts.hunt(mutants.named("done-not-said"), executions=len(seeds), seconds=0)
    assert not found.killed and found.executions == len(seeds)


@pytest.mark.parametrize(
    "name", sorted({mutant.name for mutant in CATALOGUE if mutant.mode == "core"} - HARD)[::6]
)
def test_the_fuzzer_finds_a_sample(name: str) -> None:
    assert hunts.hunt(mutants.named(name), executions=2000, seconds=10).killed
