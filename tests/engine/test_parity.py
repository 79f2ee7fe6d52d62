"""Every trace of the catalogue gives the same on two stages as on one."""

from __future__ import annotations

from typing import Any

import pytest

from ppcore.vllm.compare import compare
from ppcore.vllm.traces import CATALOGUE
from ppcore.vllm.traces.perform import perform
from tests.engine.limits import CALL_TIMEOUT_S


@pytest.mark.parametrize("name", CATALOGUE)
def test_same_as_on_one_stage(name: str, reference: Any, staged: Any) -> None:
    trace = CATALOGUE[name]
    reference.warnings(), staged.warnings()  # forget those of earlier tests
    one = reference.call(perform, name, timeout_s=CALL_TIMEOUT_S)
    two = staged.call(perform, name, timeout_s=CALL_TIMEOUT_S)

    found = compare(one.result, two.result, exact=not trace.batched)
    assert found.same, "\n".join(found.differences)
    assert reference.warnings() == staged.warnings()
    assert two.left == {}
    if trace.moves_nothing:
        assert two.pulls == 0


def test_the_catalogue_touches_both_stages_of_any_even_split() -> None:
    from ppcore.vllm.traces import Context

    for n_layers in (4, 8, 16, 30, 32):
        ctx = Context(n_layers=n_layers, tokenizer=None)
        assert ctx.early < n_layers // 2 <= ctx.late < n_layers
