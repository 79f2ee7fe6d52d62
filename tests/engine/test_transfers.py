"""What crosses between stages, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ppcore.vllm.compare import compare
from tests.engine import probes

HIDDEN = 64
FLOAT_BYTES = 4
#: Room for whatever a message carries besides its data.
OVERHEAD_BYTES = 512

Measure = Callable[..., Any]


def test_saving_moves_nothing(measure: Measure) -> None:
    assert measure(probes.save_everything).pulls == 0


def test_saved_values_are_those_of_one_stage(both: Measure) -> None:
    one, two = both(probes.save_everything)
    assert compare(one.result, two.result).differences == []


def test_shape_and_dtype_move_nothing(both: Measure) -> None:
    one, two = both(probes.ask_shape)
    assert two.pulls == 0
    assert one.result == two.result


def test_writing_constants_moves_nothing(both: Measure) -> None:
    one, two = both(probes.write_constants)
    assert two.pulls == 0
    assert one.result == two.result


def test_writing_a_location_from_its_own_value_moves_nothing(both: Measure) -> None:
    one, two = both(probes.write_own)
    assert two.pulls == 0
    assert one.result == two.result


@pytest.mark.parametrize("layer", [probes.EARLY, probes.LATE], ids=["early", "late"])
def test_forced_twice_crosses_once(both: Measure, layer: int) -> None:
    one, two = both(probes.force_twice, layer)
    assert two.pulls == 1
    assert two.pulled_bytes <= HIDDEN * FLOAT_BYTES + OVERHEAD_BYTES
    assert compare(one.result, two.result).differences == []


@pytest.mark.parametrize("layer", [probes.EARLY, probes.LATE], ids=["early", "late"])
def test_an_indexed_force_brings_its_row_only(both: Measure, layer: int) -> None:
    one, two = both(probes.force_row, layer)
    whole_bytes = two.result["rows"] * HIDDEN * FLOAT_BYTES
    assert whole_bytes > 20 * OVERHEAD_BYTES, "the prompt is too short to tell a row from the whole"
    assert 0 < two.pulled_bytes <= HIDDEN * FLOAT_BYTES + OVERHEAD_BYTES
    assert compare(one.result, two.result).differences == []


@pytest.mark.parametrize("layer", [probes.EARLY, probes.LATE], ids=["early", "late"])
def test_a_whole_force_brings_the_whole_once(measure: Measure, layer: int) -> None:
    done = measure(probes.force_whole, layer)
    whole_bytes = done.result["rows"] * HIDDEN * FLOAT_BYTES
    assert done.pulls == 1
    assert whole_bytes <= done.pulled_bytes <= whole_bytes + OVERHEAD_BYTES


@pytest.mark.parametrize(
    "probe",
    [probes.force_after_edit, probes.reread_after_replacement, probes.in_place_after_force],
    ids=lambda probe: probe.__name__,
)
def test_edits_aliases_and_rereads_see_what_they_see_on_one_stage(
    both: Measure, probe: Callable[..., Any]
) -> None:
    one, two = both(probe)
    assert compare(one.result, two.result).differences == []
