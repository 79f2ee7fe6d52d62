"""The catalogue of planted bugs: every one applies, leaves no trace, and most are found at once."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from ppsim import fuzz, hunts, mutants, tested
from ppsim.cases import Case, schedule
from ppsim.mutants import CATALOGUE, Misplaced, Mutant, lifted, planted
from ppsim.tested import TESTED, tried


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
    everything = (*CATALOGUE, *TESTED)
    assert len({mutant.name for mutant in everything}) == len(everything)
    assert len(CATALOGUE) >= 60
    assert sum(mutant.layer in ("core", "seat") for mutant in CATALOGUE) >= 30


def test_a_mutant_of_a_method_that_calls_its_base_class_runs() -> None:
    # Met for real: it crashed every caller, and counted as found.
    class Base:
        def number(self) -> int:
            return 1

    class Derived(Base):
        def number(self) -> int:
            return super().number() + 1

    globals()["Derived"] = Derived
    try:
        with planted(Mutant("more", f"{__name__}:Derived.number", "+ 1", "+ 2")):
            assert Derived().number() == 3
        assert Derived().number() == 2
    finally:
        del globals()["Derived"]


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
    "name", sorted(mutant.name for mutant in CATALOGUE if mutant.mode == "core")[::6]
)
def test_the_fuzzer_finds_a_sample(name: str) -> None:
    assert hunts.hunt(mutants.named(name), executions=2000, seconds=10).killed


def test_every_mutant_that_a_test_finds_applies_and_names_a_test() -> None:
    pytest.importorskip("nnsight")
    for mutant in TESTED:
        with planted(mutant):
            pass
        file, name = mutant.test.split("::")
        assert f"\ndef {name}(" in (tested.ROOT / file).read_text(), mutant.name


@pytest.mark.parametrize("name", ["a-header-that-lies-is-believed", "divergence-is-not-noticed"])
def test_a_test_finds_its_mutant(name: str) -> None:
    assert tried(mutants.named(name)).killed


def test_a_test_that_sees_nothing_lets_the_bug_live(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = dataclasses.replace(
        mutants.named("a-header-that-lies-is-believed"),
        new="if False or (text_bytes > TEXT_LIMIT or payload_bytes > PAYLOAD_LIMIT):",
    )
    monkeypatch.setattr(mutants, "named", lambda name: harmless)
    monkeypatch.setattr(tested, "named", lambda name: harmless)
    assert tested.main(harmless.name) == 1


def test_a_test_that_fails_anyway_finds_nothing() -> None:
    gone = Mutant(
        "no-such-mutant", "ppcore.wire:sizes", "", "", test="tests/unit/test_wire.py::gone"
    )
    with pytest.raises(Misplaced, match="does not pass as the code is"):
        tried(gone)


def test_the_pages_table_names_mutants_of_the_right_kind() -> None:
    page = (tested.ROOT / "docs/simulator.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    known = {mutant.name: "fuzzer" for mutant in CATALOGUE} | {m.name: "test" for m in TESTED}
    start = next(at for at, row in enumerate(rows) if row[0].strip() == "semantic")
    named = set()
    for row in itertools.takewhile(lambda row: len(row) == 3, rows[start + 2 :]):
        for kind, cell in zip(("fuzzer", "test"), row[1:], strict=True):
            for name in re.findall(r"`([^`]+)`", cell):
                assert known.get(name) == kind, name
                named.add(name)
    assert {mutant.name for mutant in TESTED} <= named
