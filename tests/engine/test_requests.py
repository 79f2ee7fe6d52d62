"""Several requests at once, requests that fail or end early, and requests that are no traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ppcore.vllm.compare import compare
from tests.engine import probes
from tests.engine.limits import CALL_TIMEOUT_S

Measure = Callable[..., Any]

# Requests of one trace are batched as they arrive, so floats of two runs may differ in the last bits.


@pytest.mark.parametrize(
    "lengths",
    [[7, 2], [2, 7], [1, 5, 3], [4] * 16],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_requests_in_flight_keep_to_themselves(both: Measure, lengths: list[int]) -> None:
    one, two = both(probes.interleaved, lengths)
    assert compare(one.result, two.result, exact=False).differences == []


def test_a_request_among_others_gives_what_it_gives_alone(measure: Measure) -> None:
    together = measure(probes.interleaved, [3, 6, 2]).result["rows"]
    alone = measure(probes.interleaved, [3]).result["rows"]
    assert compare(alone[0], together[0], exact=False).differences == []


@pytest.mark.parametrize("count, bad", [(2, 0), (2, 1), (8, 3)])
def test_a_block_that_raises_ends_its_own_request(both: Measure, count: int, bad: int) -> None:
    one, two = both(probes.one_raises, count, bad)
    assert two.result["error"] == f"KeyError: 'invoke {bad} gives up'"
    assert [n for n, row in enumerate(two.result["rows"]) if row is None] == [bad]
    assert compare(one.result, two.result, exact=False).differences == []


def test_a_request_that_ends_in_the_client(both: Measure) -> None:
    one, two = both(probes.stopped_early)
    # The client sees the stop token after the engine has begun the next step: how many more is timing.
    shortest = min(len(one.result["steps"]), len(two.result["steps"]))
    assert 2 <= shortest < 12
    assert one.result["steps"][:2] == two.result["steps"][:2]


def test_untraced_requests_give_the_same_tokens(reference: Any, staged: Any) -> None:
    prompts = [probes.SHORT, probes.LONG, "a", "one two three"]
    one = reference.call(probes.generate, prompts, 12, timeout_s=CALL_TIMEOUT_S)
    two = staged.call(probes.generate, prompts, 12, timeout_s=CALL_TIMEOUT_S)
    assert one == two


def test_untraced_requests_move_nothing(measure: Measure) -> None:
    done = measure(probes.generate, [probes.SHORT, probes.LONG], 6)
    assert (done.pulls, done.pulled_bytes) == (0, 0)
