"""Generated programs on real engines, as `python -m fuzz --executors vllm` runs them."""

from __future__ import annotations

import itertools

import pytest

from fuzz.executors import started
from ppsim.real import translate

PROGRAMS = 8


@pytest.mark.parametrize("layout", ["pp2", "pp3", "tp2pp2"])
def test_generated_programs_are_the_same_as_on_one_stage(layout: str) -> None:
    with started(["vllm"], [layout]) as comparison:
        for seed, case in comparison.cases(itertools.count()):
            found = comparison.run(seed, case)
            assert found is None, (found.executor, found.text, translate.source(case))
            if comparison.tallies[f"vllm-{layout}"].programs == PROGRAMS:
                break
