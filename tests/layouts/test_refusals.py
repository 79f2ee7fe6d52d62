"""What cannot be split is refused before anything is started, with what to do."""

from __future__ import annotations

import os

import pytest

from tests.layouts.anatomy import LAYERS
from tests.layouts.engines import Engine, Table


def refusal(architecture: str, stages: int, partition: str = "") -> str:
    """What the client says to an engine that is asked for."""
    from ppcore.vllm.checkpoints import random_model

    engine = Engine(
        str(random_model(architecture, layers=LAYERS, vocab=320)),
        env={"VLLM_PP_LAYER_PARTITION": partition} if partition else None,
        pipeline_parallel_size=stages,
    ).wait()
    started = len(engine.process.processes()) > 1
    engine.stop()
    assert not started, "processes of an engine that is refused"
    return engine.error


@pytest.mark.parametrize(
    "architecture, stages, partition, words",
    [
        ("mamba2", 2, "", "vLLM cannot split Mamba2ForCausalLM; use tensor_parallel_size instead"),
        ("llama", 5, "", f"more than the model's {LAYERS} layers; use at most {LAYERS}"),
        ("llama", 3, "2,2", "Give 3 numbers of layers that add up to 4"),
        ("llama", 2, "2,1", "Give 2 numbers of layers that add up to 4"),
    ],
    ids=["architecture", "stages", "partition of another count", "partition of another sum"],
)
def test_refused_with_what_to_do(
    architecture: str, stages: int, partition: str, words: str, table: Table
) -> None:
    error = refusal(architecture, stages, partition)
    row = f"{architecture} PP={stages}" + (f" ({partition})" if partition else "")
    table.enter("refused at once", row, "error", "SetupError" if "SetupError" in error else "other")
    assert "SetupError" in error and words in error


def test_ranks_that_outnumber_cores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ppcore.vllm import platform

    monkeypatch.setattr(platform, "is_cpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert platform.crowded(3) and not platform.crowded(2)
    assert platform.thread_binding(4) == "0|1|0|1"


def test_a_cache_that_the_caller_sized_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from ppcore.vllm import platform

    monkeypatch.setattr(platform, "is_cpu", lambda: True)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    with platform.engine_environment(2, sized=True):
        assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    with platform.engine_environment(2, sized=False):
        assert int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) >= 1
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
