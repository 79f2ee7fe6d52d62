"""Predictions: what the clock says follows from what the core decides, and from nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ppcore import series
from ppsim import calibrate, cli, workloads
from ppsim.cases import Case, Request
from ppsim.commands.predict import Prediction, predict
from ppsim.costs import Costs, Model
from ppsim.programs import If, Read
from ppsim.timed import TimedWorld

#: Those that are soon run.
NAMES = ["save all", "early used", "late used 4", "logits 1", "logits 8", "invokes 1", "invokes 4"]

MODEL = Model(step_s=0.024)
COSTS = Costs(latency_s=50e-6, bandwidth=1e9)


def found(name: str, stages: int = 2, costs: Costs = COSTS, model: Model = MODEL) -> Prediction:
    return predict(name, stages, model, costs)


def test_a_prediction_is_a_function_of_its_inputs() -> None:
    assert found("late used 12") == found("late used 12")
    assert found("logits 8", 4) == found("logits 8", 4)


def test_late_values_come_behind_the_forward_while_later_stages_compute() -> None:
    few, many = found("late used 4"), found("late used 12")
    assert many.pulls - few.pulls == 8
    assert many.latencies == few.latencies == 0
    # Not where a layer takes no longer than a round trip: each of the first is asked for when the one
    # before has come.
    hasty = replace(MODEL, step_s=0.001, token_s=0.0)
    many = found("late used 12", model=hasty)
    assert 2 < many.latencies <= 12
    slower = replace(COSTS, latency_s=COSTS.latency_s + 1e-5)
    later = found("late used 12", model=hasty, costs=slower).overhead_ms - many.overhead_ms
    assert later == pytest.approx(many.latencies * 0.01, abs=0.002)


def test_early_values_come_while_the_forward_computes() -> None:
    early = found("early used")
    assert early.pulls == 12
    assert early.latencies == 0
    # Not where a layer takes no longer than a round trip.
    hasty = replace(MODEL, step_s=0.001, token_s=0.0)
    assert 2 < found("early used", model=hasty).latencies <= 12


@pytest.mark.parametrize("name", ["early used", "late used 12", "logits 32"])
def test_a_row_is_asked_for_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = replace(MODEL, step_s=0.001, token_s=0.0)
    ahead = found(name, model=hasty)
    monkeypatch.setattr(series, "FARTHEST", 0)
    singly = found(name, model=hasty)
    assert (ahead.pulls, ahead.bytes) == (singly.pulls, singly.bytes)
    # Half of the messages that ask are spared at least, and what they take on the way.
    spared = ahead.pulls / 2 * COSTS.message_s
    assert ahead.overhead_ms < singly.overhead_ms - 1e3 * spared


def test_logits_come_behind_the_forward_before_the_next_step_can() -> None:
    # What a step can still wait for is the one answer that is under way while the last stage samples.
    assert found("logits 8").latencies <= 8
    assert found("logits 8", 4).latencies == 0


def test_what_is_only_saved_does_not_cross() -> None:
    for name in ("save all", "invokes 16"):
        assert found(name, 4).pulls == found(name, 4).bytes == 0


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_value_crosses_once_to_every_other_stage(stages: int) -> None:
    used = found("early used", stages)
    assert used.pulls == 12 * (stages - 1)
    assert used.bytes == 12 * (stages - 1) * 22


def test_on_one_stage_there_is_no_network() -> None:
    alone = found("late used 12", 1)
    assert alone.overhead_ms == alone.one_stage_ms
    assert (alone.pulls, alone.waited_ms, alone.latencies) == (0, 0, 0)
    parts = COSTS.trace_s + COSTS.request_s + 12 * COSTS.visit_s
    assert alone.overhead_ms == pytest.approx(1e3 * parts, abs=1e-3)


def whole_value(costs: Costs) -> float:
    block = (Read("a", "L12.out"), If("a", ()), Read("a", "L13.out"), If("a", ()))
    case = Case(2, 1, 12, requests=(Request("A", 1, (("", block),), ignore_eos=True),))
    return TimedWorld(case, MODEL, costs).seconds()


def test_bytes_take_their_time_on_the_wire() -> None:
    # What one stage hands to the other, hidden states and residual. The values themselves come to the
    # first stage while the second computes.
    size = MODEL.hidden_bytes(MODEL.prompt)
    slower = whole_value(replace(COSTS, bandwidth=COSTS.bandwidth / 2)) - whole_value(COSTS)
    assert slower == pytest.approx(size / COSTS.bandwidth)


def test_a_listener_takes_its_time_from_the_forward() -> None:
    # While later stages ask for what the first has read already, the first computes.
    idle = replace(COSTS, message_s=0.0)
    busy = replace(COSTS, message_s=1e-4)
    assert found("early used", 4, busy).overhead_ms > found("early used", 4, idle).overhead_ms + 1


def test_layers_are_divided_evenly_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="24 layers cannot be divided evenly into 5 stages"):
        found("save all", 5)


# --- costs from measurements ----------------------------------------------------------------------


def measured(costs: Costs, model: Model) -> dict:
    """What the benchmark would find on one stage, and of exchanges, if these were the costs."""
    cells = []
    for name in NAMES:
        traced, plain = (
            1e3 * TimedWorld(workloads.case(name, model, 1, traced=traced), model, costs).seconds()
            for traced in (True, False)
        )
        times = {"overhead_ms": traced - plain, "untraced_ms": plain}
        cells.append({"name": name, "stages": 1, **times})
    bare, pull = 2 * costs.latency_s, 2 * costs.latency_s + 4 * costs.message_s
    size = 64 * 1024**2
    times = {
        ("unix", 16): bare,
        ("direct", 16): pull,
        ("unix", size): 1.0,
        ("direct", size): pull + size / costs.bandwidth,
    }
    pulls = [{"way": w, "bytes": b, "median_us": 1e6 * t} for (w, b), t in times.items()]
    accesses = [
        {"kind": "read", "us": 50 + 1e6 * costs.keep_s, "plain_us": 50},
        {"kind": "lazy read, summed", "us": 1e6 * costs.lazy_s, "plain_us": 50},
    ]
    calls = {"1": 2.0, "2": 2.0 + 2e3 * costs.command_s}
    return {
        "traces": {"cells": cells, "call_ms": calls},
        "pulls": {"cells": pulls},
        "accesses": {"cells": accesses},
    }


def test_costs_are_found_again_in_what_they_make() -> None:
    made = Costs(7e-6, 3e9, 4e-5, 8e-5, 2e-5, 1e10, 3e-4, 3e-3, 1e-3, 2e-4, 3e-4)
    model, costs = calibrate.costs(measured(made, Model(step_s=0.02, token_s=3e-4)))
    assert model.step_s == pytest.approx(0.02, rel=0.02)
    assert model.token_s == pytest.approx(3e-4, rel=0.02)
    for name in (
        "latency_s",
        "bandwidth",
        "message_s",
        "lazy_s",
        "keep_s",
        "command_s",
        "trace_s",
        "request_s",
        "visit_s",
        "leaf_s",
    ):
        assert getattr(costs, name) == pytest.approx(getattr(made, name), rel=0.02), name


def test_what_is_predicted_is_not_looked_at() -> None:
    result = measured(COSTS, MODEL)
    for cell in [*result["traces"]["cells"]]:
        result["traces"]["cells"].append(cell | {"stages": 2, "overhead_ms": 1e9})
    assert calibrate.costs(result) == calibrate.costs(measured(COSTS, MODEL))


def test_no_fitted_number_is_below_zero() -> None:
    best = (1 / 3 + 1 / 2 + 1) / (1 / 9 + 1 / 4 + 1)  # the least squares of (value - best) / value
    assert calibrate.fit([[1, 0], [1, 1], [1, 2]], [3.0, 2.0, 1.0]) == [pytest.approx(best), 0.0]


# --- the command ----------------------------------------------------------------------------------


def test_the_command_ends_with_its_json(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    file = tmp_path / "bench.json"
    result = measured(COSTS, MODEL)
    result["traces"]["cells"].append(
        {"name": "early used", "stages": 2, "overhead_ms": 4.0, "untraced_ms": 26.0}
    )
    file.write_text(json.dumps(result))
    words = ["predict", "--latency", "50us", "--bandwidth", "100Gbit/s", "--stages", "2", "4"]
    assert cli.main([*words, "--only", "early used", "--measured", str(file), "--json"]) == 0
    table, _, last = capsys.readouterr().out.strip().rpartition("\n")
    answer = json.loads(last)
    costs = answer["costs"]
    assert (costs["latency_s"], costs["bandwidth"]) == pytest.approx((50e-6, 12.5e9))
    two, four = answer["predictions"]
    assert (two["stages"], two["measured_ms"]) == (2, 4.0)
    assert (four["stages"], four["measured_ms"]) == (4, None)
    assert f"{two['overhead_ms'] / 4:.2f}" in table


@pytest.mark.parametrize("words", [["--latency", "50"], ["--bandwidth", "12us"]])
def test_a_quantity_has_a_unit(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["predict", *words])
    assert "a number and one of" in capsys.readouterr().err
    assert cli.main(["predict", "--stages", "5", "--only", "save all"]) == 2
