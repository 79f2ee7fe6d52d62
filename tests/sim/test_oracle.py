"""The reference: what it remembers of a case, and what it works out anew."""

from __future__ import annotations

from dataclasses import replace

from ppsim import cases, oracle, terms, world
from ppsim.strategies import RandomWalk

CASE = cases.parse(
    "stages 2 columns 1 layers 1 shared 0 batching 0\n"
    "request A tokens 2\n  a = read L1.out\n  edit a 3\n  save x a\n"
)


def test_schedules_of_a_case_share_what_is_expected_of_it() -> None:
    first, second = (world.run(CASE, RandomWalk(seed)) for seed in (1, 2))
    assert first.hash != second.hash
    (request,) = CASE.requests
    expected = oracle.expect(CASE, request, first.engine.progress)
    assert oracle.expect(CASE, request, second.engine.progress) is expected


def test_another_course_of_the_run_is_expected_anew() -> None:
    done = world.run(CASE, RandomWalk(1))
    (request,) = CASE.requests
    expected = oracle.expect(CASE, request, done.engine.progress)
    preempted = {"A": replace(done.engine.progress["A"], recomputed={1})}
    other = oracle.expect(CASE, request, preempted)
    assert other.tokens["A"][0] == expected.tokens["A"][0]
    assert other.tokens["A"][1] != expected.tokens["A"][1]


def test_terms_of_the_reference_are_explained_though_it_is_remembered() -> None:
    done = world.run(CASE, RandomWalk(1))
    (request,) = CASE.requests
    with terms.recording():
        expected = oracle.expect(CASE, request, done.engine.progress)
        ((_, values),) = expected.saves.values()
        assert terms.explain(values[0]).startswith("edit(")
