"""Many traces, long ones, and more than fit at once: nothing of them stays, and memory is flat."""

from __future__ import annotations

from typing import Any

from ppcore.vllm.traces.perform import at_rest, status
from tests.engine import longrun
from tests.engine.limits import LAYERS

#: A wait inside the engine that ends by its deadline still fails.
LONG_TIMEOUT_S = 280.0
HIDDEN, FLOAT_BYTES = 64, 4


def test_many_traces_in_a_row_keep_memory_flat(staged: Any) -> None:
    resident = staged.call(longrun.many_in_a_row, 200, timeout_s=LONG_TIMEOUT_S)
    for pid in resident[0]:
        settled, end = resident[20][pid], resident[-1][pid]
        assert end <= settled * 1.02, f"{pid}: from {settled:,} to {end:,} bytes"
    assert {rank["buffer_bytes"] for rank in staged.call(status)} == {0}


def test_a_long_loop_that_keeps_nothing_holds_a_few_steps(staged: Any) -> None:
    held = staged.call(longrun.reads_and_keeps_nothing, 500, timeout_s=LONG_TIMEOUT_S)["held"]
    assert len(held) == 500
    # What is published of a step is one row of every layer of a stage; a few steps are in hand.
    assert max(held) <= 4 * LAYERS * HIDDEN * FLOAT_BYTES


def test_preempted_requests_go_on(engines: Any, reference: Any) -> None:
    count, steps = 6, 40
    engine = engines.start(
        pipeline_parallel_size=2,
        disable_log_stats=False,
        num_gpu_blocks_override=7,
        block_size=32,
        max_model_len=96,
    )
    try:
        found = engine.call(longrun.preempted, count, steps, timeout_s=LONG_TIMEOUT_S)
        preempted = engine.call(longrun.preemptions)
        left = at_rest(engine.call(status))
    finally:
        assert engine.stop() == []
    expected = reference.call(longrun.preempted, count, steps, timeout_s=LONG_TIMEOUT_S)
    assert preempted > 0
    assert left == {}
    assert found == expected
