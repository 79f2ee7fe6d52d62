"""Programs and cases: what is printed parses back, and shrinking only ever shrinks."""

from __future__ import annotations

import pytest

from ppsim import cases, generate, programs, shrink


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
