"""A request with a LoRA adapter is answered at PP=2 as at PP=1."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.layouts import adapters
from tests.layouts.anatomy import LAYERS
from tests.layouts.engines import Engine, Table


def test_two_stages_answer_as_one(tmp_path: Path, table: Table) -> None:
    from ppcore.vllm.checkpoints import random_llama
    from ppcore.vllm.compare import compare

    checkpoint = str(random_llama(layers=LAYERS, vocab=320, hidden=adapters.HIDDEN))
    folder = str(adapters.random_adapter(tmp_path / "adapter"))
    engines = [
        Engine(checkpoint, pipeline_parallel_size=stages, **adapters.SETTINGS) for stages in (1, 2)
    ]
    try:
        for engine in engines:
            assert not engine.wait().error, engine.error
        one, two = (engine.call(adapters.traces, folder) for engine in engines)
    finally:
        with ThreadPoolExecutor(2) as pool:
            left = list(pool.map(Engine.stop, engines))
    assert left == [[], []]
    found = compare(one.result, two.result)
    row = "llama with a LoRA adapter"
    table.enter("PP=2 against PP=1, adapters", row, "traces", "ok" if found.same else "differs")
    table.enter("PP=2 against PP=1, adapters", row, "seconds", f"{engines[0].age_s():.0f}")
    assert found.same, "\n".join(found.differences)
    assert two.left == {}
    assert two.result["plain tokens"] != two.result["adapted tokens"], "the adapter does nothing"
