"""Programs and cases: what is printed parses back, and shrinking only ever shrinks."""

from __future__ import annotations

import pytest

from ppsim import cases, generate, programs, shrink, world
from ppsim.strategies import RandomWalk


@pytest.mark.parametrize("seed", range(0, 300, 3))
def test_generated_cases_parse_back(seed: int) -> None:
    case = generate.case(seed)
    text = cases.spell(case)
    assert cases.spell(cases.parse(text)) == text


def test_every_loop_form_parses_back() -> None:
    text = (
        "for :\n  a = read L0.out\nfor 0:3\n  b = read L1.in\nfor 2:\n  if a\n    edit a 3\n"
        "for [0,2]\n  write L1.in a\n"
    )
    spelled = programs.spell(programs.parse(text))
    assert programs.spell(programs.parse(spelled)) == spelled
    assert [type(s).__name__ for s in programs.parse(text)] == ["For"] * 4


def test_every_statement_parses_back() -> None:
    text = (
        "cache k\ncache k in L0 L1\ncache k L0\na = read L0.out\nedit a 5\nblend a b\n"
        "c = derive a 3\nd = mix a c\nwrite L2.in d\nskip L2 d\nsave x c\nappend out c\n"
        "put rows 1 c\ne = call N a\np = param N.w\nstop\nraise 7\n"
    )
    assert programs.spell(programs.parse(text)) == text
    assert len({type(s) for s in programs.parse(text)}) == 15


def test_every_setting_and_fault_of_a_case_parses_back() -> None:
    text = (
        "stages 2 columns 2 layers 1 shared 0 batching 7\ncontainer rows 3\n"
        "request A tokens 3 ignore_eos eos 1 stop 2 n 2 after 2\n  a = read L0.out\n"
        "block A tap\n  a = read L0.out\n"
        "fault raise 1 0 A 3\nfault abort A 4\nfault die 0 1 5\nfault stall 1 0 0 3 5\n"
        "fault late 1 0 0 3\n"
    )
    assert cases.spell(cases.parse(text)) == text


@pytest.mark.parametrize("line", ["request A tokens 3 slow", "fault flood 1 2 3", "container out"])
def test_what_is_no_case_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        cases.parse(line)


def test_a_block_that_has_touched_a_value_opens_no_cache() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 1\n  a = read L1.out\n  save x a\n  cache k\n"
    )
    done = world.run(case, RandomWalk(0))
    merged = done.engine.outcomes["A"].merged
    assert done.failure is None and merged is not None and merged.error == "raise:cache"


def test_the_generator_draws_everything() -> None:
    text = "".join(cases.spell(generate.case(seed)) for seed in range(400))
    words = (
        "skip cache param put call append blend stop raise n eos after ignore_eos container".split()
    )
    words += "abort die stall late".split()
    assert [word for word in words if f" {word} " not in f" {text} ".replace("\n", " ")] == []


@pytest.mark.parametrize("line", ["a = peel L0.out", "write", "for :", "stop now"])
def test_what_is_no_program_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        programs.parse(line)


@pytest.mark.parametrize("seed", range(40))
def test_shrinking_shrinks(seed: int) -> None:
    case = generate.case(seed)
    for smaller in shrink.smaller(case):
        assert smaller != case
        cases.parse(cases.spell(smaller))
