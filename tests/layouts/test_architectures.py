"""Every architecture answers every kind of trace at PP=2 as at PP=1."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.layouts.anatomy import ANATOMIES, LAYERS
from tests.layouts.engines import Engine, Table
from tests.layouts.probes import BATCHED, PROBES

TITLE = "PP=2 against PP=1"


def started(architecture: str) -> tuple[Engine, Engine]:
    from ppcore.vllm.checkpoints import random_model

    checkpoint = str(random_model(architecture, layers=LAYERS, vocab=320))
    settings = ANATOMIES[architecture].settings
    one = Engine(checkpoint, **settings)
    two = Engine(checkpoint, pipeline_parallel_size=2, **settings)
    return one.wait(), two.wait()


@pytest.fixture(scope="module", params=ANATOMIES)
def engines(request: pytest.FixtureRequest, table: Table) -> Iterator[tuple[str, Engine, Engine]]:
    one, two = started(request.param)
    yield request.param, one, two
    with ThreadPoolExecutor(2) as pool:
        left = [pid for found in pool.map(Engine.stop, (one, two)) for pid in found]
    table.enter(TITLE, request.param, "seconds", f"{one.age_s():.0f}")
    # Of an architecture that the kernels refuse, one layout may fail at its start and another hang.
    assert left == [] or one.error or two.error, f"outlived their engine: {left}"


@pytest.mark.parametrize("kind", PROBES)
def test_two_stages_answer_as_one(
    kind: str, engines: tuple[str, Engine, Engine], table: Table
) -> None:
    architecture, one, two = engines
    anatomy = ANATOMIES[architecture]
    outcome, detail = compared(kind, architecture, one, two)
    table.enter(TITLE, architecture, kind, outcome)
    if anatomy.refused:
        assert outcome.startswith("refused"), f"{architecture} is listed as refused, and is not"
        for name, engine in (("PP=1", one), ("PP=2", two)):
            assert anatomy.refused.get(name, "") in engine.error, engine.error
            assert bool(engine.error) == (name in anatomy.refused), name
    else:
        assert outcome == "ok", detail


def compared(kind: str, architecture: str, one: Engine, two: Engine) -> tuple[str, str]:
    """The outcome of one kind of trace, and what to show when it is not as it should be."""
    from ppcore.vllm.child import EngineError
    from ppcore.vllm.compare import compare

    anatomy = ANATOMIES[architecture]
    for name, engine in (("PP=2", two), ("PP=1", one)):
        if engine.error:
            return f"refused: {name} {engine.error[:160]}", engine.error
    answers: list[Any] = []
    for engine in (one, two):
        try:
            answers.append(engine.call(PROBES[kind], anatomy))
        except EngineError as error:
            answers.append(str(error))
    alone, staged = answers
    if isinstance(alone, str) or isinstance(staged, str):
        detail = f"PP=1: {alone if isinstance(alone, str) else 'fine'}\nPP=2: {staged}"
        return ("fails" if isinstance(alone, str) else "differs"), detail
    if staged.left:
        return "leaves", str(staged.left)
    found = compare(alone.result, staged.result, exact=kind not in BATCHED)
    return ("ok" if found.same else "differs"), "\n".join(found.differences)
