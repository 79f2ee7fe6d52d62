"""Exhaustive exploration: it proves, it refutes, and it says when it was cut."""

from __future__ import annotations

from ppsim import mutants
from ppsim.strategies import exhaustive
from ppsim.strategies.exhaustive import CONFIGURATIONS, Verdict
from ppsim.world import run


def explore(name: str, seconds: float = 25.0) -> exhaustive.Exploration:
    return exhaustive.explore(name, CONFIGURATIONS[name], seconds=seconds)


def test_a_small_case_is_proved_and_counted() -> None:
    found = explore("2x1-save")
    assert found.verdict is Verdict.PROVED, found.reason
    assert found.states > 1000 and found.edges > found.states and found.diameter > 40
    assert found.interleavings > 10**12


def test_a_bug_is_refuted_with_a_schedule_that_replays() -> None:
    with mutants.planted(mutants.named("done-not-said")):
        found = explore("2x1-save")
    assert found.verdict is Verdict.REFUTED
    assert found.failure is not None and found.failure.name == "rest"
    assert found.schedule


def test_a_search_that_is_cut_proves_nothing() -> None:
    found = explore("2x8-loop", seconds=0.2)
    assert found.verdict is Verdict.UNDETERMINED and "cut" in found.reason


def test_configurations_pass_a_walk_too() -> None:
    from ppsim.strategies import RandomWalk

    for case in CONFIGURATIONS.values():
        assert run(case, RandomWalk(1)).failure is None
