"""Many traces, long ones, and more than fit at once: nothing of them stays, and memory is flat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ppcore.vllm.traces.perform import at_rest, status
from tests.layouts import longrun
from tests.layouts.engines import Engine

#: A wait inside the engine that ends by its deadline (300 s) still fails.
LONG_S = 280.0
LAYERS, HIDDEN, FLOAT_BYTES = 8, 64, 4


def started(stages: int, **settings: Any) -> Engine:
    from ppcore.vllm.checkpoints import random_llama

    checkpoint = str(random_llama(layers=LAYERS, hidden=HIDDEN))
    engine = Engine(
        checkpoint, pipeline_parallel_size=stages, **{"max_model_len": 512, **settings}
    ).wait()
    assert not engine.error, engine.error
    return engine


@pytest.fixture(scope="module")
def staged() -> Iterator[Any]:
    """The engine of two stages."""
    engine = started(2)
    yield engine.process
    assert engine.stop() == []


def test_many_traces_in_a_row_keep_memory_flat(staged: Any) -> None:
    resident = staged.call(longrun.many_in_a_row, 200, timeout_s=LONG_S)
    for pid in resident[0]:
        settled, end = resident[20][pid], resident[-1][pid]
        assert end <= settled * 1.02, f"{pid}: from {settled:,} to {end:,} bytes"
    assert {rank["buffer_bytes"] for rank in staged.call(status)} == {0}


def test_a_long_loop_that_keeps_nothing_holds_a_few_steps(staged: Any) -> None:
    held = staged.call(longrun.reads_and_keeps_nothing, 500, timeout_s=LONG_S)["held"]
    assert len(held) == 500
    # What is published of a step is one row of every layer of a stage; a few steps are in hand.
    assert max(held) <= 4 * LAYERS * HIDDEN * FLOAT_BYTES


def test_preempted_requests_go_on() -> None:
    count, steps = 6, 40
    # Room for fewer tokens than the requests need together.
    small = {"num_gpu_blocks_override": 7, "block_size": 32, "max_model_len": 96}
    found = {}
    for stages in (1, 2):
        settings = {"disable_log_stats": False, **small} if stages == 2 else {}
        engine = started(stages, **settings)
        try:
            found[stages] = engine.process.call(longrun.preempted, count, steps, timeout_s=LONG_S)
            if stages == 2:
                assert engine.process.call(longrun.preemptions) > 0
                assert at_rest(engine.process.call(status)) == {}
        finally:
            assert engine.stop() == []
    assert found[2] == found[1]
