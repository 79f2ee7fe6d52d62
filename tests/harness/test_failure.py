"""Waits that cannot be served: deadlines, and ranks that die. Driven below nnsight, on the link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ppcore.core import Available
from ppcore.messages import Worker
from ppcore.runtime import lazy
from ppcore.runtime.lazy import Base
from tests.harness.cluster import Cluster, StageError
from tests.harness.stage import Stage

WORKER = Worker("lonely")
LOCATION = "model.model.layers.0.mlp.output"


def begin(stage: Stage) -> None:
    """A round opens with a request whose block has started."""
    assert stage.link is not None
    stage.link.open_round([WORKER.request])
    stage.link.core.start(WORKER)


def read(stage: Stage) -> lazy.LazyTensor:
    """A lazy of the first stage's value, on a later one."""
    assert stage.link is not None
    core = stage.link.core
    decision = core.access(WORKER, LOCATION, core.wanted(WORKER, LOCATION))
    when = Available(decision.place.turn, decision.owner)
    base = Base(stage.link, decision.key, LOCATION, decision.owner, when)
    return lazy.leaf(base, (), (2,), torch.float64, torch.device("cpu"))


def force_in_vain(stage: Stage, deadline_s: float) -> None:
    assert stage.link is not None
    stage.link.deadline_s = deadline_s
    lazy.force(read(stage))


def gives_up(stage: Stage) -> None:
    """The block ends here without having read anything."""
    assert stage.link is not None
    stage.link.finish(WORKER)


def wind_up(stage: Stage) -> list[str]:
    assert stage.link is not None
    stage.link.end(WORKER.request)
    stage.link.say_done(WORKER.request)
    stage.link.wait_drained()
    return stage.link.core.requests


def alive(stage: Stage) -> int:
    return stage.stage


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(2, tmp_path)
    try:
        found.wait_ready()
        found.each(begin)
        yield found
    finally:
        found.stop()


def fails(cluster: Cluster, stage: int, timeout_s: float) -> str:
    with pytest.raises(StageError) as caught:
        cluster.answer(stage, timeout_s)
    return str(caught.value).splitlines()[0]


def test_deadlines_refusals_and_death_end_a_wait_with_who_waited_for_what(pair: Cluster) -> None:
    # One story on one pair of processes, which take longer to start than all of this.
    pair.send(1, force_in_vain, 0.3)
    text = fails(pair, 1, 20)
    assert text.startswith("DeadlineExceeded: waited 0 s for a pull (oldest pull: 0 s); ")
    assert f"stage 1 (round 0) waits for {LOCATION!r} (lonely#0" in text
    assert "from stage 0" in text

    pair.send(1, force_in_vain, 60.0)
    pair.on(0, gives_up)
    assert fails(pair, 1, 20).startswith(f"Unreachable: stage 0 cannot produce {LOCATION!r}")

    assert pair.on(1, alive) == 1


def test_a_killed_rank_ends_the_wait_on_it_within_seconds_and_is_named(pair: Cluster) -> None:
    pair.send(1, force_in_vain, 60.0)
    pair.on(0, alive)
    started = time.monotonic()
    pair.kill(0)
    text = fails(pair, 1, 20)
    assert time.monotonic() - started < 10
    assert text.startswith("PeerDied: stage 0 is gone (")
    assert LOCATION in text
    # Whoever asks later is told at once, and the end of the request waits for nobody.
    pair.send(1, force_in_vain, 60.0)
    assert fails(pair, 1, 5).startswith("PeerDied: stage 0 is gone")
    assert pair.on(1, wind_up) == []
