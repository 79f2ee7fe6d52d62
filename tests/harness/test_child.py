"""`EngineProcess`: a model in a child process, without an engine in it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppcore.vllm import child
from ppcore.vllm.child import EngineError, EngineProcess
from tests.harness import fake_engine

pytestmark = pytest.mark.harness

MODEL = "tests.harness.fake_engine:Model"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    with EngineProcess("somewhere", model_class=MODEL, log=tmp_path / "log", depth=3) as engine:
        yield engine


def test_calls_are_answered_in_the_child(engine: EngineProcess) -> None:
    assert engine.call(fake_engine.add, 1, b=2) == 3
    assert engine.call(fake_engine.settings) == {"checkpoint": "somewhere", "depth": 3}


def test_an_error_brings_its_traceback_and_the_child_lives(engine: EngineProcess) -> None:
    with pytest.raises(EngineError, match="KeyError: 'no such thing'"):
        engine.call(fake_engine.fail)
    with pytest.raises(EngineError, match="cannot be sent"):
        engine.call(fake_engine.unpicklable)
    assert not engine.broken
    assert engine.call(fake_engine.add, 1) == 1


def test_a_child_that_dies_is_noticed_with_its_last_words(engine: EngineProcess) -> None:
    with pytest.raises(EngineError, match="status 3") as raised:
        engine.call(fake_engine.die, timeout_s=30.0)
    assert "last words" in str(raised.value) and str(engine.log) in str(raised.value)
    assert engine.broken
    with pytest.raises(EngineError, match="failed earlier"):
        engine.call(fake_engine.add, 1)


def test_a_late_answer_is_an_error_and_is_not_taken_for_the_next(engine: EngineProcess) -> None:
    engine.wait_ready()
    begun = time.monotonic()
    with pytest.raises(EngineError, match="no answer"):
        engine.call(fake_engine.sleep, 2.0, timeout_s=0.3)
    assert time.monotonic() - begun < 1.5
    with pytest.raises(EngineError, match="failed earlier"):
        engine.call(fake_engine.add, 1)
    assert engine.stop(timeout_s=20.0) == []


def test_settings_that_are_refused(tmp_path: Path) -> None:
    engine = EngineProcess("x", model_class=MODEL, log=tmp_path / "log", refuse=True)
    engine.start()
    with pytest.raises(EngineError, match="ValueError: these settings cannot work"):
        engine.wait_ready(timeout_s=60.0)
    assert engine.stop() == []


def test_waiting_ticks(tmp_path: Path) -> None:
    seen: list[float] = []
    with EngineProcess("x", model_class=MODEL, log=tmp_path / "log") as engine:
        engine.wait_ready(tick=seen.append)
    assert seen == sorted(seen)


def test_stop_leaves_no_process(engine: EngineProcess) -> None:
    engine.wait_ready()
    assert len(engine.processes()) == 2
    assert engine.stop() == []
    assert engine.processes() == []
    assert engine.stop() == [], "stopping twice is stopping once"


def test_a_process_that_outlives_its_engine_is_killed_and_told(tmp_path: Path) -> None:
    engine = EngineProcess("x", model_class=MODEL, log=tmp_path / "log", leave=True)
    engine.wait_ready()
    left = engine.stop(grace_s=0.5)
    assert len(left) == 1
    # Killed, and at most waiting to be reaped by whoever inherited it.
    stat = Path("/proc", str(left[0]), "stat")
    assert not stat.exists() or ") Z " in stat.read_text()


def test_a_child_whose_parent_is_killed_ends_with_all_that_it_started(tmp_path: Path) -> None:
    script = (
        "from ppcore.vllm.child import EngineProcess\n"
        "from tests.harness import fake_engine\n"
        f"engine = EngineProcess('x', model_class={MODEL!r}, log={str(tmp_path / 'log')!r})\n"
        "engine.start()\n"
        "engine.wait_ready()\n"
        "print(engine._process.pid, flush=True)\n"
        "engine.call(fake_engine.sleep, 600.0)\n"
    )
    environment = {
        **os.environ,
        "PPCORE_ORPHAN_GRACE_S": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        session = int(parent.stdout.readline())
        assert len(list(child._session_members(session))) == 2, "itself, and its engine's core"
        parent.kill()
    child._wait_until_gone(session, 30.0)
    assert list(child._session_members(session)) == []


def test_warnings_of_cut_loops_are_read_once_each(engine: EngineProcess) -> None:
    for location in ("b.output.i3", "a.output.i2", "b.output.i3"):
        engine.call(fake_engine.cut_short, location)
    assert engine.warnings() == ["a.output.i2", "b.output.i3"]
    assert engine.warnings() == []


def test_starting_twice_is_refused(engine: EngineProcess) -> None:
    with pytest.raises(EngineError, match="already started"):
        engine.start()
