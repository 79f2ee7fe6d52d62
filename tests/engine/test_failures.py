"""Blocks that are wrong, and a rank that dies: an error that says what is wrong, and what can go on goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine import hazards
from tests.engine.limits import BLOCK_TIMEOUT_S, CALL_TIMEOUT_S
from tests.engine.probes import EARLY, LATE

Measure = Callable[..., Any]


def test_an_endless_loop_is_ended_at_its_line(measure: Measure, reference: Any) -> None:
    result = measure(hazards.endless).result
    error = result["error"]
    assert error["message"] == (
        f"BlockTimeout: the block ran for more than {BLOCK_TIMEOUT_S:g} s without touching the model"
    )
    assert error["line"] in ("while True:", "size += 1")
    assert result["next"] == reference.call(hazards.next_token, timeout_s=CALL_TIMEOUT_S)


def test_a_block_that_depends_on_the_rank_names_both_locations(measure: Measure) -> None:
    result = measure(hazards.branches_by_rank).result
    assert "Diverged: access" in result["error"]
    for location in (f"layers.{EARLY}.mlp.output", f"layers.{EARLY}.mlp.input"):
        assert location in result["error"]


@pytest.mark.parametrize("layer", [EARLY, LATE], ids=["early", "late"])
@pytest.mark.parametrize("what", ["shape", "rows"])
def test_a_replacement_that_does_not_fit_ends_as_on_one_stage(
    both: Measure, layer: int, what: str
) -> None:
    one, two = both(hazards.replaces_wrongly, layer, what)
    assert two.result["error"] is not None
    assert two.result == one.result


@pytest.mark.parametrize("layer", [EARLY, LATE], ids=["early", "late"])
def test_a_replacement_of_another_dtype_is_refused(measure: Measure, layer: int) -> None:
    # One stage dies of it: the model's next operation raises, outside any block.
    error = measure(hazards.replaces_wrongly, layer, "dtype").result["error"]
    assert error["message"] == (
        f"BlockError: 'model.model.layers.{layer}.mlp.output' is torch.float32, and its replacement "
        "torch.float64: convert it with .to(torch.float32)"
    )


def test_skipping_what_spans_stages_is_refused(measure: Measure) -> None:
    error = measure(hazards.skips_the_decoder).result["error"]
    assert "spans pipeline stages and cannot be skipped as a whole" in error["message"]


def test_a_save_that_cannot_be_pickled_ends_its_own_trace(measure: Measure, reference: Any) -> None:
    # One stage dies of it: what nnsight ships there it pickles where nothing catches what that raises.
    result = measure(hazards.saves_what_cannot_be_pickled).result
    assert "TypeError: cannot pickle '_thread.lock' object" in result["error"]
    assert result["next"] == reference.call(hazards.next_token, timeout_s=CALL_TIMEOUT_S)


def test_a_killed_rank_is_named_and_nothing_is_left(engines: Any, tmp_path: Path) -> None:
    staged = engines.get(2)
    members = staged.processes()
    found = staged.call(hazards.kill_a_rank, 1, str(tmp_path / "running"), timeout_s=CALL_TIMEOUT_S)
    assert found["pid"] in members
    assert found["error"].startswith("PeerDied: the rank of stage 1, column 0 is gone")
    assert found["seconds"] < 10
    engines.stop(2)
    assert engines.left == []
