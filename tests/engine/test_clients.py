"""Prompts in every form, and an engine whose answers are streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppcore.vllm.compare import compare
from tests.engine import clients
from tests.engine.limits import CALL_TIMEOUT_S


def test_a_prompt_may_come_in_any_form(both: Callable[..., tuple[Any, Any]]) -> None:
    one, two = both(clients.prompt_forms)
    assert compare(one.result, two.result).differences == []
    text = two.result["text"]
    for form, found in two.result.items():
        assert compare(text, found).differences == [], form


def test_streams_and_a_client_that_leaves(engines: Any, reference: Any) -> None:
    engine = engines.start(pipeline_parallel_size=2, mode="async")
    try:
        found = engine.call(clients.streams, timeout_s=2 * CALL_TIMEOUT_S)
    finally:
        left = engine.stop()
    assert left == []
    assert found["held"] == {}, "an aborted request has to be forgotten on every rank"
    # An output may bring several tokens; the last one brings the rest.
    assert 0 < found["left"] < 400
    for name, tokens in (("alone", 4), ("first", 4), ("second", 6), ("again", 4)):
        seen = found[name]["seen"]
        assert seen == sorted(seen) and seen[-1] == tokens, name
        assert len(found[name]["saves"]["kept"]) == tokens, name
    assert compare(found["alone"]["saves"], found["again"]["saves"]).differences == []
    # Batched with others or not: the same up to rounding, and so is what one stage gives.
    one = reference.call(clients.prompt_forms, timeout_s=CALL_TIMEOUT_S)["text"]
    for name in ("alone", "first", "second"):
        kept = found[name]["saves"]["kept"][:3]
        assert compare(one, kept, exact=False).differences == [], name
