"""How requests end, many of them, and long ones: nothing of them stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ppcore.vllm.compare import compare
from ppcore.vllm.traces.perform import at_rest, status
from tests.engine import hazards

Measure = Callable[..., Any]

#: For what is many requests, or a long one. A wait inside the engine that ends by its deadline still fails.
LONG_TIMEOUT_S = 280.0


def test_every_sequence_of_a_request_has_its_own_saves(both: Measure) -> None:
    one, two = both(hazards.several_sequences)
    assert len(two.result["saved"]) == len(two.result["token_ids"]) == 2
    assert compare(one.result, two.result, exact=False).differences == []


def test_a_request_of_one_token(both: Measure) -> None:
    one, two = both(hazards.one_token)
    assert [step for step, _ in two.result["seen"]] == [0]
    assert (two.result["why"], len(two.result["token_ids"])) == ("length", 1)
    assert two.result == one.result


def test_a_stop_string(both: Measure) -> None:
    one, two = both(hazards.stopped_by_a_word)
    assert two.result["why"] == one.result["why"] == "stop"
    assert two.result["token_ids"] == one.result["token_ids"]
    # The client sees the string when the engine has begun further steps: how many is timing.
    tokens = len(two.result["token_ids"])
    assert 2 <= tokens < 12
    assert one.result["seen"][:tokens] == two.result["seen"][:tokens]


@pytest.mark.parametrize("ignore_eos, tokens", [(False, 2), (True, 5)])
def test_the_end_of_the_sequence(both: Measure, ignore_eos: bool, tokens: int) -> None:
    one, two = both(hazards.draws_the_end, ignore_eos)
    assert len(two.result["token_ids"]) == tokens
    assert two.result == one.result


def test_many_traces_at_once(reference: Any, staged: Any) -> None:
    one, two = (
        engine.call(hazards.many_at_once, 64, timeout_s=LONG_TIMEOUT_S)
        for engine in (reference, staged)
    )
    assert len(two["rows"]) == 64
    assert compare(one, two, exact=False).differences == []
    assert at_rest(staged.call(status)) == {}
