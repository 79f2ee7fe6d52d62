"""What a rank does around a step, without an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from nnsight.tracing.tracer import _local, _saves

from ppcore.runtime.saved import watch_saves

pytest.importorskip("vllm")

STEP = SimpleNamespace(total_num_scheduled_tokens=3)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What vLLM's group of stages says of this rank."""
    from ppcore.vllm import worker

    stage = SimpleNamespace(is_first_rank=False)
    monkeypatch.setattr(worker, "get_pp_group", lambda: stage)
    return stage


def _worker(did: list[str]) -> Any:
    """Workers over one of vLLM's, which say what they do."""
    from ppcore.vllm.worker import TracingWorker

    class VLLMWorker:
        vllm_config = SimpleNamespace(kv_transfer_config=None)

        def execute_model(self, scheduler_output: Any) -> str:
            did.append("receive")
            return "output"

        def sample_tokens(self, grammar_output: Any) -> None:
            did.append("sample")

    class Worker(TracingWorker, VLLMWorker):
        def __init__(self, runner: Any) -> None:
            self.model_runner = runner
            sends = SimpleNamespace(wait=lambda: did.append("sent"))
            self._pp_send_work = [sends]

    return Worker


def test_a_later_stage_begins_a_step_before_it_waits_for_hidden_states(
    stage: SimpleNamespace,
) -> None:
    did: list[str] = []
    Worker = _worker(did)
    runner = SimpleNamespace(begin=lambda step: did.append("begin"), untraced=lambda step: False)
    worker = Worker(runner)
    assert worker.execute_model(STEP) == "output"
    assert did == ["sent", "begin", "receive"]
    worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=0))
    Worker(object()).execute_model(STEP)
    stage.is_first_rank = True
    worker.execute_model(STEP)
    assert did[3:] == ["receive"] * 3, "nothing to wait for"
    stage.is_first_rank = False
    worker.vllm_config.kv_transfer_config = object()
    worker.execute_model(STEP)
    assert did[6:] == ["receive"], "what brings the cache begins the step"
    worker.vllm_config.kv_transfer_config = None
    runner.untraced = lambda step: True
    worker.execute_model(STEP)
    assert did[7:] == ["receive"], "nobody's block wants anything of it"


@pytest.mark.parametrize("lingers", [True, False])
def test_a_rank_stays_behind_its_forward_once_what_it_handed_on_has_arrived(lingers: bool) -> None:
    did: list[str] = []
    runner = SimpleNamespace(lingers=lambda: lingers, linger=lambda: did.append("linger"))
    _worker(did)(runner).sample_tokens(None)
    assert did == (["sent", "linger"] if lingers else []) + ["sample"]
    did.clear()
    _worker(did)(object()).sample_tokens(None)
    assert did == ["sample"], "on one stage"


@pytest.mark.parametrize(
    ("last", "ray", "running", "parked", "lingers"),
    [
        (False, False, 2, True, True),
        (True, False, 2, True, False),
        (False, True, 2, True, False),
        (False, False, 3, True, False),
        (False, False, 2, False, False),
    ],
    ids=["alone", "last stage", "ray", "another request", "nobody waits"],
)
def test_a_rank_stays_behind_its_forward_only_where_nobody_else_can_want_it(
    monkeypatch: pytest.MonkeyPatch,
    last: bool,
    ray: bool,
    running: int,
    parked: bool,
    lingers: bool,
) -> None:
    from ppcore.vllm import runner

    monkeypatch.setattr(runner, "get_pp_group", lambda: SimpleNamespace(is_last_rank=last))
    rank = runner.PipelineRunner()
    rank.parallel_config = SimpleNamespace(use_ray=ray)
    rank.input_batch = SimpleNamespace(num_reqs=2, req_ids=["a", "b"])
    rank.nnsight_requests = SimpleNamespace(waiting=lambda names: ["worker"] * parked)
    rank.requests = dict.fromkeys(range(running))
    assert rank.lingers() is lingers


@pytest.fixture
def thread() -> Iterator[None]:
    """A thread that has saved nothing and is in no trace."""
    before = dict(_local.__dict__)
    _local.__dict__.clear()
    watch_saves()
    yield
    _local.__dict__.clear()
    _local.__dict__.update(before)


def _runner(did: list[Any]) -> Any:
    """A later stage's runner over an nnsight runner that only says what it does."""
    from nnsight.intervention.interleaver import Interleaver

    from ppcore.vllm.runner import PipelineRunner

    class NNsightRunner:
        def __init__(self) -> None:
            self.nnsight_model = SimpleNamespace(interleaver=Interleaver())
            self.nnsight_requests = SimpleNamespace(requests={})
            self.on_forward_thread = lambda function, *args: function(*args)
            self.synchronize_input_prep = contextlib.nullcontext

        def _update_states(self, step: Any) -> None:
            did.append((step, _local.depth > 0, list(_saves())))
            worker = SimpleNamespace(pending=None, caches=[])
            self.nnsight_model.interleaver.mediators = [worker]
            self.nnsight_model.interleaver.sourced["a.drilled.call"] = None

    class Runner(PipelineRunner, NNsightRunner):
        pass

    return Runner()


@pytest.mark.usefixtures("thread")
def test_the_forward_finds_the_workers_of_a_step_that_has_begun() -> None:
    did: list[Any] = []
    runner = _runner(did)
    interleaver = runner.nnsight_model.interleaver
    _saves().add(id(runner))
    runner.begin("step")
    assert did == [("step", True, [])], "with no request left nothing counts as saved"
    assert not interleaver.interleaving
    (worker,) = interleaver.mediators

    interleaver.mediators = []  # what nnsight does on the way into a forward
    with interleaver:
        assert not interleaver.busy and not interleaver.sourced
        runner._update_states("step")
        assert interleaver.mediators == [worker] and interleaver.busy
        assert interleaver.sourced == {"a.drilled.call": None}
    assert len(did) == 1, "the step's requests are taken in once"

    runner._update_states("another, that was not begun")
    assert len(did) == 2


@pytest.mark.usefixtures("thread")
def test_what_a_request_under_way_has_saved_stays_saved_when_a_step_begins() -> None:
    did: list[Any] = []
    runner = _runner(did)
    runner.nnsight_requests.requests["r"] = object()
    _saves().add(id(runner))
    runner.begin("step")
    assert did == [("step", True, [id(runner)])]


def test_a_step_without_a_block_is_vllms_alone_and_one_that_has_begun_is_not() -> None:
    from ppcore.vllm.runner import PipelineRunner

    did: list[str] = []
    vllms = {
        "execute_model": lambda step: runner._update_states(step),
        "_update_states": lambda step: did.append(f"{step} of vLLM"),
        "sample_tokens": lambda grammar: runner._sample(),
        "_sample": lambda: did.append("sampled by vLLM"),
    }

    class Runner(PipelineRunner):
        _vllms: Any = staticmethod(vllms.__getitem__)

        def _execute(self, step: str) -> None:
            did.append(f"{step} with nnsight")

        def _begin(self, step: str) -> None:
            did.append(f"{step} begins")
            self._begun: Any = [], {}

        def _sample_tokens(self, grammar: Any) -> None:
            did.append("sampled with nnsight")

    runner: Any = Runner()
    runner.on_forward_thread = lambda function, *args: function(*args)
    runner.untraced = lambda step: True
    runner.execute_model("plain")
    runner.sample_tokens(None)
    assert did == ["plain of vLLM", "sampled by vLLM"]
    did.clear()
    runner.begin("traced")
    assert not runner._untraced, "though the last step was vLLM's alone"
    runner.execute_model("traced")  # its last traced request may have gone while it began
    runner.sample_tokens(None)
    assert did == ["traced begins", "traced with nnsight", "sampled with nnsight"]
