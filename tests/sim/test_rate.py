"""``rate``: the same world under another loop, and simulators that are not here."""

from __future__ import annotations

import argparse
import asyncio
import sys

import pytest

from ppsim import world
from ppsim.commands import against, rate
from ppsim.strategies import RandomWalk


def test_a_world_runs_on_another_loop_with_all_its_checks() -> None:
    case = rate.rate_case(2, 2)
    hosted = against.Hosted(case)
    asyncio.run(hosted.main())
    alone = world.run(case, RandomWalk(0))
    assert alone.failure is None
    # The same steps, but for a thread that looks once more before it waits.
    assert abs(hosted.events - alone.events) < alone.events / 4
    assert hosted.engine.outcomes.keys() == alone.engine.outcomes.keys()
    for name, outcome in hosted.engine.outcomes.items():
        assert outcome == alone.engine.outcomes[name]


def test_a_simulator_that_is_not_installed_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "detangle", None)
    options = argparse.Namespace(stages=2, rounds=1, seconds=0.0, against="detangle")
    code, answer = rate.run(options)
    assert code == 0 and answer["against"] == {} and answer["events_per_s"] > 0
    assert "detangle" in answer["skipped"]
    assert "skipped: detangle cannot be imported" in capsys.readouterr().out
