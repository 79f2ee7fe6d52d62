"""One program on the reference, the simulators and real processes."""

from __future__ import annotations

from typing import Any

import pytest

from fuzz.executors import Comparison, Gloo, Real, Sim, shared, started
from ppsim import cases, generate
from ppsim.real import translate

PROGRAM = """\
stages 2 columns 1 layers 1 shared 0 batching 0
container rows 2
request A tokens 3
  for :
    a = read L0.out
    b = read L1.out
    if b
      edit a 3
    append x a
  save y b
request B tokens 2
  a = read L1.in
  put rows 1 a
  write L1.out a
  b = call N a
  save y b
block B tap
  c = read L0.out
  save s c
"""


def test_a_program_is_the_same_on_every_executor() -> None:
    with started(["reference", "sim", "real", "gloo"]) as comparison:
        for seed in range(3):
            assert comparison.run(seed, cases.parse(PROGRAM)) is None
        tallies = comparison.tallies
    assert {name: tally.programs for name, tally in tallies.items()} == {
        "reference": 3, "sim": 3, "real": 3, "gloo": 3,
    }  # fmt: skip


def test_generated_programs_are_the_same_in_both_simulators() -> None:
    comparison = Comparison({"sim": Sim(), "real": Real()})
    for seed, case in comparison.cases(iter(range(12))):
        found = comparison.run(seed, case)
        assert found is None, (found.executor, found.text, translate.source(case))


def test_a_difference_names_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Real):
        def differs(self, case: Any, expected: Any, seed: int) -> str | None:
            return super().differs(case, {**expected, "A": expected["B"]}, seed)

    found = Comparison({"sim": Sim(), "odd": Odd()}).run(4, cases.parse(PROGRAM))
    assert found is not None and (found.executor, found.seed) == ("odd", 4)
    assert "on one rank" in found.text


def test_processes_take_the_cases_that_they_have_stages_for() -> None:
    case = shared(generate.case(0))
    assert Gloo(most=case.stages).fits(case)
    assert not Gloo(most=case.stages - 1).fits(case)
