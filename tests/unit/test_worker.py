"""What a rank's worker does around a step, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")


def test_a_stage_reads_the_blocks_of_new_requests_before_it_waits_for_the_one_before_it() -> None:
    from ppcore.vllm.worker import TracingWorker

    did: list[Any] = []

    class VLLMWorker:
        def execute_model(self, scheduler_output: Any) -> str:
            did.append("receive")
            return "output"

    class Worker(TracingWorker, VLLMWorker):
        def __init__(self, runner: Any) -> None:
            self.model_runner = runner

    worker = Worker(SimpleNamespace(expect=lambda new: did.append(new)))
    assert worker.execute_model(SimpleNamespace(scheduled_new_reqs=["a"])) == "output"
    assert did == [["a"], "receive"]
    worker.execute_model(SimpleNamespace(scheduled_new_reqs=[]))
    Worker(object()).execute_model(SimpleNamespace(scheduled_new_reqs=["a"]))
    assert did[2:] == ["receive", "receive"], "one stage has nothing to expect"


def test_with_no_request_left_no_value_counts_as_saved_when_the_next_is_read() -> None:
    from nnsight.tracing.tracer import _saves

    from ppcore.vllm.runner import PipelineRunner

    runner: Any = PipelineRunner()
    runner.on_forward_thread = lambda function, *args: function(*args)
    runner.nnsight_persistent_objects = {}
    requests: dict[str, int] = {}
    runner.nnsight_requests = SimpleNamespace(
        requests=requests, add=lambda new, objects: requests.update(dict.fromkeys(new, 1))
    )
    kept = _saves().copy()
    try:
        _saves().add(id(runner))
        runner.expect(["a"])
        assert id(runner) not in _saves() and requests == {"a": 1}
        _saves().add(id(runner))
        runner.expect(["b"])
        assert id(runner) in _saves(), "another request is on its way"
    finally:
        _saves().clear()
        _saves().update(kept)
