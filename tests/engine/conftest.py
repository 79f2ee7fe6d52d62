"""Engines for the tests: one of one stage, the reference, and one of two, each in its own process.

An engine starts when the first test asks for it and is shared by all; one that died or stopped answering is
replaced before the next test, so that a failure stays one failure. At the end each is stopped through its
handle and its processes are checked to be gone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.limits import BLOCK_TIMEOUT_S, CALL_TIMEOUT_S, LAYERS

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nnsight") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every engine test for both platforms; asked for CUDA (`-m gpu`), skip where there is none."""
    ours = [item for item in items if "tests/engine/" in item.path.as_posix()]
    asked = "gpu" in str(config.getoption("-m")).replace("not gpu", "")
    missing = asked and cuda_devices() < 2
    for item in ours:
        item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.gpu)
        if missing:
            reason = f"two stages need two CUDA devices, and there are {cuda_devices()}"
            item.add_marker(pytest.mark.skip(reason=reason))
    # They take the engine from those that would come after them.
    last = (
        "test_a_stopped_engine_leaves_no_process",
        "test_a_killed_rank_is_named_and_nothing_is_left",
    )
    items.sort(key=lambda item: last.index(item.name) if item.name in last else -1)


def cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


class Engines:
    """The engines that run, by number of stages."""

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint
        self._running: dict[int, Any] = {}
        #: Stages of the engines that the current test asked for.
        self.used: set[int] = set()
        #: Processes that outlived their engine.
        self.left: list[int] = []

    def get(self, stages: int) -> Any:
        """The engine of so many stages, started if there is none that works."""
        self.used.add(stages)
        if stages in self._running and self._running[stages].broken:
            self.stop(stages)
        if stages not in self._running:
            self._running[stages] = self.start(pipeline_parallel_size=stages)
        return self._running[stages]

    def start(self, **settings: Any) -> Any:
        """A new engine, of the caller's own."""
        from ppcore.vllm.child import EngineProcess

        settings = {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "block_timeout_s": BLOCK_TIMEOUT_S,
            **settings,
        }
        if cuda_devices():
            settings["gpu_memory_utilization"] = 0.25
        engine = EngineProcess(self._checkpoint, warm=not cuda_devices(), **settings)
        try:
            engine.start()
            engine.wait_ready(timeout_s=180.0)
        except BaseException:
            engine.stop()
            raise
        return engine

    def running(self) -> dict[int, Any]:
        return dict(self._running)

    def stop(self, stages: int) -> None:
        self.left += self._running.pop(stages).stop()


@pytest.fixture(scope="session")
def checkpoint() -> str:
    from ppcore.vllm.checkpoints import random_llama

    return str(random_llama(layers=LAYERS))


@pytest.fixture(scope="session")
def engines(checkpoint: str) -> Iterator[Engines]:
    kept = Engines(checkpoint)
    yield kept
    for stages in kept.running():
        kept.stop(stages)
    assert kept.left == [], f"processes outlived their engine: {kept.left}"


@pytest.fixture
def reference(engines: Engines) -> Any:
    """The engine of one stage."""
    return engines.get(1)


@pytest.fixture
def staged(engines: Engines) -> Any:
    """The engine of two stages."""
    return engines.get(2)


@pytest.fixture
def measure(staged: Any) -> Callable[..., Any]:
    """Run a function of `probes` on the engine of two stages: result, pulls, bytes, what was left."""
    from ppcore.vllm.traces.perform import measured

    def run(probe: Callable[..., Any], *args: Any) -> Any:
        return staged.call(measured, probe, *args, timeout_s=CALL_TIMEOUT_S)

    return run


@pytest.fixture
def both(reference: Any, staged: Any) -> Callable[..., tuple[Any, Any]]:
    """Run a function of `probes` on both engines."""
    from ppcore.vllm.traces.perform import measured

    def run(probe: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        return (
            reference.call(measured, probe, *args, timeout_s=CALL_TIMEOUT_S),
            staged.call(measured, probe, *args, timeout_s=CALL_TIMEOUT_S),
        )

    return run


@pytest.fixture(autouse=True)
def nothing_left(engines: Engines) -> Iterator[None]:
    """After every test, every rank of the engines that it used is at rest."""
    from ppcore.vllm.child import EngineError
    from ppcore.vllm.traces.perform import at_rest, status

    engines.used.clear()
    yield
    for stages in engines.used & engines.running().keys():
        try:
            ranks = engines.running()[stages].call(status, timeout_s=CALL_TIMEOUT_S)
        except EngineError as error:
            pytest.fail(f"the engine of {stages} stages is gone: {error}")
        assert at_rest(ranks) == {}, f"left on the engine of {stages} stages"
