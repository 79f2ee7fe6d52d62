"""The engine as a whole: what it says of itself, and that nothing stays behind."""

from __future__ import annotations

from typing import Any

from ppcore.vllm.traces.perform import at_rest, measured, status
from tests.engine import probes
from tests.engine.limits import CALL_TIMEOUT_S

KEYS = {
    "stage",
    "column",
    "pid",
    "requests",
    "workers",
    "buffer_entries",
    "buffer_bytes",
    "pending_pulls",
    "pulls_total",
    "pulled_bytes_total",
    "messages_total",
    "host_copies_total",
}


def test_status_names_every_rank(staged: Any) -> None:
    ranks = staged.call(status, timeout_s=CALL_TIMEOUT_S)
    assert [set(rank) for rank in ranks] == [KEYS, KEYS]
    assert sorted((rank["stage"], rank["column"]) for rank in ranks) == [(0, 0), (1, 0)]


def test_status_works_on_one_stage(reference: Any) -> None:
    ranks = reference.call(status, timeout_s=CALL_TIMEOUT_S)
    assert [(rank["stage"], rank["column"]) for rank in ranks] == [(0, 0)]
    assert at_rest(ranks) == {}


def test_many_traces_leave_no_buffer(staged: Any) -> None:
    for _ in range(10):
        staged.call(measured, probes.force_after_edit, timeout_s=CALL_TIMEOUT_S)
        staged.call(measured, probes.one_raises, 3, 1, timeout_s=CALL_TIMEOUT_S)
    ranks = staged.call(status, timeout_s=CALL_TIMEOUT_S)
    assert at_rest(ranks) == {}
    assert {rank["buffer_bytes"] for rank in ranks} == {0}


def test_a_stopped_engine_leaves_no_process(engines: Any, staged: Any) -> None:
    members = staged.processes()
    assert len(members) >= 3, "the client, the engine core and the workers"
    engines.stop(2)
    assert engines.left == []
