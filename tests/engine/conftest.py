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

from tests.engine.limits import CALL_TIMEOUT_S, LAYERS

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nnsight") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine/" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)
    # It takes the engine from those that would come after it.
    items.sort(key=lambda item: item.name == "test_a_stopped_engine_leaves_no_process")


class Engines:
    """The engines that run, by number of stages."""

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint
        self._running: dict[int, Any] = {}
        #: Processes that outlived their engine.
        self.left: list[int] = []

    def get(self, stages: int) -> Any:
        from ppcore.vllm.child import EngineError, EngineProcess
        from ppcore.vllm.traces.perform import status

        engine = self._running.get(stages)
        if engine is not None:
            try:
                engine.call(status, timeout_s=CALL_TIMEOUT_S)
                return engine
            except EngineError:
                self.stop(stages)
        engine = EngineProcess(
            self._checkpoint,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=16,
            pipeline_parallel_size=stages,
        )
        try:
            engine.start()
            engine.wait_ready(timeout_s=180.0)
        except BaseException:
            engine.stop()
            raise
        self._running[stages] = engine
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
    """After every test, every rank of every engine is at rest."""
    from ppcore.vllm.child import EngineError
    from ppcore.vllm.traces.perform import at_rest, status

    yield
    for stages, engine in engines.running().items():
        try:
            ranks = engine.call(status, timeout_s=CALL_TIMEOUT_S)
        except EngineError as error:
            pytest.fail(f"the engine of {stages} stages is gone: {error}")
        assert at_rest(ranks) == {}, f"left on the engine of {stages} stages"
