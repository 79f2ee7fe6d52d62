"""The rank that died first is the one that is named."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ppcore.errors import PeerDied
from ppcore.vllm.deaths import Deaths


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def told(ranks: list[subprocess.Popen[bytes]]) -> list[dict[str, int]]:
    return [{"stage": n, "column": 0, "pid": process.pid} for n, process in enumerate(ranks)]


def test_the_first_to_die_is_named(ranks: list[subprocess.Popen[bytes]]) -> None:
    heard: queue.Queue[PeerDied] = queue.Queue()

    def hear(error: PeerDied) -> bool:
        heard.put(error)
        return True

    deaths = Deaths(told(ranks), hear)
    ranks[1].kill()
    error = heard.get(timeout=10)
    ranks[0].kill()  # as the engine does
    ranks[0].wait(10)
    assert "the rank of stage 1, column 0 is gone" in str(error)
    assert str(deaths.error()) == str(error)
    assert heard.empty()


def test_it_is_told_until_the_client_knows(ranks: list[subprocess.Popen[bytes]]) -> None:
    heard: queue.Queue[PeerDied] = queue.Queue()
    answers = iter([False, False, True])

    def hear(error: PeerDied) -> bool:
        heard.put(error)
        return next(answers)

    Deaths(told(ranks), hear)
    ranks[0].kill()
    assert len({str(heard.get(timeout=10)) for _ in range(3)}) == 1


def test_ranks_of_another_host_are_not_named(ranks: list[subprocess.Popen[bytes]]) -> None:
    ranks[0].kill()
    ranks[0].wait(10)  # nobody of this host has that id now
    deaths = Deaths(told(ranks)[:1], lambda error: True)
    assert str(deaths.error()).startswith("a rank, or the engine's core, is gone")


def test_what_waits_on_an_asynchronous_engine_is_told_who_died(
    ranks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from ppcore.vllm import engine

    core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False), utility_results={})

    async def answer(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == engine.STATUS:
            return told(ranks)
        core.utility_results[0] = waiting = asyncio.get_running_loop().create_future()
        ranks[1].kill()
        return await waiting

    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[int]:
        yield 1
        raise engine.EngineDeadError()

    monkeypatch.setattr(engine.AsyncLLM, "collective_rpc", answer)
    monkeypatch.setattr(engine.AsyncLLM, "generate", generate)
    made = engine.PPAsyncLLM.__new__(engine.PPAsyncLLM)
    monkeypatch.setattr(made, "engine_core", core, raising=False)
    monkeypatch.setattr(engine.PPAsyncLLM, "shutdown", lambda self: None)

    async def use() -> list[int]:
        with pytest.raises(PeerDied, match="the rank of stage 1, column 0 is gone"):
            await made.collective_rpc("a method")
        seen = []
        with pytest.raises(PeerDied, match="the rank of stage 1, column 0 is gone"):
            async for output in made.generate():
                seen.append(output)
        core.resources.engine_dead = True
        return seen

    assert asyncio.run(asyncio.wait_for(use(), 20)) == [1]
