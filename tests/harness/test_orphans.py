"""A rank's process does not outlive the engine that started it."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from typing import Any

import pytest

from ppcore.vllm import orphans

pytestmark = pytest.mark.harness

_SPAWN = multiprocessing.get_context("spawn")


def _rank(pids: Any) -> None:
    """Deaf to what asks it to end, as a loop in C++ is."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orphans.end_with_parent(grace_s=0.1)
    pids.send(os.getpid())
    while True:
        time.sleep(1)


def _engine(pids: Any) -> None:
    rank = _SPAWN.Process(target=_rank, args=(pids,))
    rank.start()
    rank.join()


def test_a_rank_ends_after_its_engine_was_killed_whatever_it_is_at() -> None:
    mine, theirs = _SPAWN.Pipe(duplex=False)
    engine = _SPAWN.Process(target=_engine, args=(theirs,))
    engine.start()
    rank = os.pidfd_open(mine.recv())
    gone = select.poll()
    gone.register(rank, select.POLLIN)
    try:
        assert not gone.poll(500), "while the engine lives, so does the rank"
        engine.kill()
        assert gone.poll(10_000), "the rank has outlived its engine"
    finally:
        if not gone.poll(0):
            signal.pidfd_send_signal(rank, signal.SIGKILL)
        os.close(rank)
        engine.kill()
        engine.join()


def test_a_process_that_nobody_started_so_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    monkeypatch.setattr(orphans.threading, "Thread", None)  # what would watch
    orphans.end_with_parent()
