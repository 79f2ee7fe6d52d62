"""Each property holds on the code as it is, and fails on a bug of its kind."""

from __future__ import annotations

import pytest

from ppsim import cases, fuzz, mutants, world
from ppsim.failures import Crash, Leak, Liveness, Sameness
from ppsim.strategies import RandomWalk


def test_the_code_as_it_is_passes_the_fuzzer() -> None:
    for seed, done in fuzz.executions(10_000, 1500):
        assert done.failure is None, f"execution {seed}: {done.failure}"


@pytest.mark.parametrize(
    ("mutant", "name", "kind"),
    [
        ("second-read-forgets-the-edit", "sameness", Sameness),
        ("published-after-it-was-asked-for", "ends", Liveness),
        ("waits-for-a-later-stage", "wait-rule", Liveness),
        ("dropped-at-any-done", "rest", Leak),
        ("never-cleared", "bounded", Leak),
        ("pulled-again-each-time", "once", Leak),
        ("everybody-ships", "once", Leak),
        ("death-not-noticed", "dead-ends", Liveness),
        ("deadline-report-without-the-turn", "deadline", Liveness),
        ("deadline-silences-the-stage", "ends", Liveness),
        ("aborted-request-stays", "rest", Leak),
        ("own-error-of-any-worker", "sameness", Sameness),
        ("shared-module-recorded-by-one-stage", "sameness", Sameness),
    ],
)
def test_a_bug_of_its_kind_fails_each_property(mutant: str, name: str, kind: type) -> None:
    # Odds: each of these is found within 700 executions in every one of ten seeds tried.
    with mutants.planted(mutants.named(mutant)):
        for _, done in fuzz.executions(0, 3000):
            failure = done.failure
            if failure is not None and failure.name == name:
                assert isinstance(failure, kind)
                return
    pytest.fail(f"{mutant} never failed {name!r}")


def test_a_hang_prints_who_waits_for_whom() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 2\n  for :\n    a = read L0.out\n    if a\n      save x a\n"
    )
    with mutants.planted(mutants.named("published-after-it-was-asked-for")):
        failures = [world.run(case, RandomWalk(seed)).failure for seed in range(40)]
    texts = [str(failure) for failure in failures if failure is not None]
    assert any("waits for" in text and "rank (1, 0)" in text for text in texts), texts


def test_a_program_that_does_not_end_is_no_finding() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 1\n  for :\n    stop_here = derive x 1\n"
    )
    assert isinstance(world.run(case, RandomWalk(0)).failure, Crash)
    assert fuzz.execute(case, RandomWalk(0)).failure is None
