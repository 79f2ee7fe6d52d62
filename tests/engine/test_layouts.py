"""Three stages of unequal size, and two of two columns. `nox -s engine` has the other layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ppcore.vllm.compare import compare
from ppcore.vllm.traces.perform import perform
from tests.engine.limits import CALL_TIMEOUT_S
from tests.layouts.engines import Engine

#: Reads everywhere, carries values in both directions, calls modules.
TRACES = [
    "reads_each_stage",
    "write_early_to_late",
    "write_late_to_early",
    "logit_lens",
    "cache_modules",
]


@pytest.fixture(scope="module", params=[(3, 1), (2, 2)], ids=["PP=3", "PP=2 TP=2"])
def layout(request: pytest.FixtureRequest, checkpoint: str) -> Iterator[tuple[int, Any]]:
    stages, columns = request.param
    engine = Engine(
        checkpoint, pipeline_parallel_size=stages, tensor_parallel_size=columns, max_model_len=512
    ).wait()
    assert not engine.error, engine.error
    yield columns, engine.process
    assert engine.stop() == []


@pytest.mark.parametrize("name", TRACES)
def test_same_as_on_one_stage(name: str, layout: tuple[int, Any], reference: Any) -> None:
    columns, engine = layout
    one = reference.call(perform, name, timeout_s=CALL_TIMEOUT_S)
    many = engine.call(perform, name, timeout_s=2 * CALL_TIMEOUT_S)
    # Sums over two columns are added up in another order.
    found = compare(one.result, many.result, exact=columns == 1)
    assert found.same, "\n".join(found.differences)
    assert many.left == {}
