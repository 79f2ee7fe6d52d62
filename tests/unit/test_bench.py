"""What the benchmark of traces concludes from its times."""

from __future__ import annotations

import pytest

from bench import core, plot, traces
from bench.workloads import WORKLOADS


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


def test_an_access_is_measured_on_each_stage(monkeypatch):
    monkeypatch.setattr(core, "STAGES", (2, 4))
    found = core.run()
    assert [(c["stages"], c["stage"]) for c in found["cells"]] == [
        (2, 0), (2, 1), (4, 0), (4, 2), (4, 3),
    ]  # fmt: skip
    assert min(c["us"] for c in found["cells"]) > 0
