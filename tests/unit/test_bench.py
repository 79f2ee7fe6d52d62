"""What the benchmarks conclude from their times, and what the page says of them."""

from __future__ import annotations

import json

import pytest

from bench import MODEL, PROMPT, accesses, core, deaths, page, plot, steps, timeline, traces, turns
from bench import __main__ as main
from bench.workloads import WORKLOADS
from ppsim import workloads
from ppsim.costs import Model


@pytest.fixture(autouse=True)
def nobody_to_wait_for(monkeypatch):
    monkeypatch.setattr(turns, "TURN_S", 0.0)


class Engine:
    """Answers with given milliseconds, or with what crossed."""

    def __init__(self, traced: float, untraced: float):
        self.pair = (traced / 1e3, untraced / 1e3)

    def call(self, function, name):
        return self.pair if function.__name__ == "once" else (12, 264)


def measured(name: str, one: Engine, two: Engine) -> traces.Measured:
    return traces._measure({1: one, 2: two}, name, repetitions=3)


def test_overhead_is_what_the_trace_adds():
    found = measured("save all", Engine(15, 10), Engine(26, 20))
    assert found.overhead == pytest.approx({1: 5, 2: 6})
    assert found.ratio == pytest.approx(1.2)


def test_a_value_costs_what_two_stages_add_over_one():
    assert measured("late used 12", Engine(15, 10), Engine(26.2, 20)).per_value == pytest.approx(
        0.1
    )


def test_a_step_is_judged_above_the_allowed_ratio():
    found = measured("logits 32", Engine(20, 10), Engine(75, 32))
    assert found.per_step == pytest.approx(1.0)


def test_every_bound_names_a_workload():
    assert {name for name, *_ in traces.BOUNDS} <= set(WORKLOADS)


def test_the_picture_shows_every_series(tmp_path):
    names = [name for name in WORKLOADS if name.startswith(tuple(plot.AXES.values()))]
    found = {name: measured(name, Engine(15, 10), Engine(26, 20)) for name in names}
    path = tmp_path / "overheads.svg"
    plot.draw(traces.summary(found, None)["cells"], path)
    assert path.read_text().startswith("<?xml")


def test_an_access_is_measured_on_each_stage(monkeypatch, tmp_path):
    monkeypatch.setattr(core, "STAGES", (2, 4))
    monkeypatch.setattr(core.compiled, "folder", lambda: tmp_path / "none")
    found = core.run()
    assert found["compiled"] == [] and core.table(found)
    assert [(c["stages"], c["stage"]) for c in found["cells"]] == [
        (2, 0), (2, 1), (4, 0), (4, 2), (4, 3),
    ]  # fmt: skip
    assert min(c["us"] for c in found["cells"]) > 0


def test_the_simulator_knows_the_same_traces():
    assert list(WORKLOADS) == list(workloads.WORKLOADS)
    for name, workload in WORKLOADS.items():
        requests = workloads.WORKLOADS[name](Model())
        assert len(requests) == workload.requests
        assert {request.tokens for request in requests} == {workload.tokens}
    model = Model()
    assert (model.layers, model.hidden, model.prompt) == (
        MODEL["layers"], MODEL["hidden"], len(PROMPT),
    )  # fmt: skip


def test_single_accesses_are_measured(monkeypatch):
    monkeypatch.setattr(accesses, "REPETITIONS", 1)
    monkeypatch.setattr(accesses, "_WARM_UP", 0)
    found = accesses.run()["cells"]
    assert [cell["kind"] for cell in found] == list(accesses.KINDS)


def test_what_is_measured_so_far_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(traces, "EngineProcess", Started)
    monkeypatch.setattr("ppcore.vllm.checkpoints.random_llama", lambda **settings: "nowhere")
    result = traces.run(repetitions=2, names=["save all", "early used"], so_far=told.append)
    assert [len(part["cells"]) for part in told] == [2, 4]
    assert told[-1] == result
    assert set(result["call_ms"]) == {"1", "2"}


def test_growth_is_that_of_one_stage_and_more():
    seen = [0.0, *(0.010 * n for n in range(1, 101)), *(1.0 + 0.012 * n for n in range(1, 101))]
    assert steps.ends(seen) == pytest.approx((10, 12))
    took = {1: [(10.0, 11.0)] * 3, 2: [(20.0, 33.0), (20.0, 24.2), (10.0, 12.1)]}
    found = steps.summary(took, {1: 2**20, 2: 2**20}, {1: 2**20, 2: 2**21})
    assert [cell["growth"] for cell in found["cells"]] == pytest.approx([1.1, 1.21])
    assert (found["growth"], found["memory"]) == pytest.approx((1.1, 2.0))
    assert steps.table(found).count("OVER") == 2


def test_a_death_is_judged_by_the_longest(monkeypatch):
    took = iter([0.01, 0.02, 0.3, 0.01, 0.01, 0.01])
    monkeypatch.setattr(deaths, "_once", lambda kind: next(took))
    found = deaths.run(repetitions=3)
    assert [cell["median_ms"] for cell in found["cells"]] == [20.0, 10.0]
    direct, gloo = deaths.table(found).splitlines()[1:]
    assert "OVER" in direct and "OVER" not in gloo


class Started(Engine):
    """An engine that needs no time to start."""

    def __init__(self, checkpoint, **settings):
        super().__init__(15, 10)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        pass

    def wait_ready(self):
        pass

    def call(self, function, *args):
        return super().call(function, *args) if args else 0.001


# --- the page ---------------------------------------------------------------------------------------


def test_the_page_says_what_was_measured():
    text = main.PAGE.read_text(encoding="utf-8")
    result = json.loads((main.PAGE.parent / "bench.json").read_text())
    assert page.filled(text, result) == text, "python -m bench --page docs/bench.json"


def test_a_bound_that_is_not_met_is_said_to_be():
    part = {"cells": [{"stages": 2, "stage": 0, "us": 4.0}], "worst": 4.0, "at_most": 3.0}
    assert "| 4 | 3 | **not met** |" in page.markdown({"core": part})
    assert "| 4 | 4 | met |" in page.markdown({"core": part | {"at_most": 4.0}})
    text = page.markdown({"core": part | {"compiled": [{"stages": 2, "stage": 0, "us": 2.5}]}})
    assert (
        "compiled, as in the simulator | 2.5 | 3 | met |" in text and "| compiled | 2.50 |" in text
    )


def test_every_part_has_its_table():
    names = ["early used", "logits 32"]
    found = {name: measured(name, Engine(15, 10), Engine(26, 20)) for name in names}
    ways = [
        {"way": w, "bytes": 1024, "median_us": 30.0, "p90_us": 1234.5} for w in ("unix", "direct")
    ]
    ratio = {"way": "direct", "against": "unix", "bytes": 1024, "ratio": 4.2, "at_most": 4.0}
    said = {"date": "2026-01-02", "cores": 2, "load": 0.5}
    text = page.markdown(
        {
            "untraced": {
                "ratio": 1.01,
                "quartiles": [1, 1.02],
                "stages": 2,
                "tokens": 64,
                "pairs": 9,
            }
            | said,
            "pulls": {"cells": ways, "ratios": [ratio]} | said,
            "traces": traces.summary(found, None) | said,
        }
    )
    assert "| a pull of 1 KiB, direct to bare unix | 4.2 | 4 | **not met** |" in text
    assert "| 1 KiB | 30 (1234) | 30 (1234) |" in text
    assert "| `early used` | 5 (5 to 5) | 6 (6 to 6) | 1.20 | 12 | 264 |" in text
    assert "| `logits 32`: ms a step above 1.1 x | 0.0156 |  |  |" in text
    assert text.count("2026-01-02, a machine of 2 cores, no GPU, load average before 0.5") == 3


def test_a_page_without_the_part_is_refused():
    with pytest.raises(ValueError, match="has no part between"):
        page.filled("nothing", {})


def test_a_timeline_costs_the_ratio_of_the_medians():
    engines = {"without": Engine(20, 10), "with": Engine(21, 10)}
    found = timeline.measure(engines, "save all", repetitions=4)
    assert found["ratio"] == pytest.approx(1.05)
    assert found["quartiles"] == pytest.approx([1.05, 1.05])
    assert "1.050" in timeline.table({"cells": [found]})
    made = page.markdown({"timeline": {"cells": [found]}})
    assert "| `save all` | 20 | 21 | 1.050 (1.050 to 1.050) |" in made
    assert set(timeline.NAMES) <= set(WORKLOADS)
