"""What the ranks of a real engine record is a run of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppcore.runtime.recording import VARIABLE
from ppcore.vllm.traces.perform import measured
from ppsim.conform import check_files
from tests.engine import probes
from tests.engine.limits import CALL_TIMEOUT_S


def test_an_engines_records_are_accepted(engines: Any, tmp_path: Path) -> None:
    # An engine of its own: records are whole once it has stopped, and are of all that it did.
    engine = engines.start(pipeline_parallel_size=2, env={VARIABLE: str(tmp_path)})
    try:
        engine.call(measured, probes.force_after_edit, timeout_s=CALL_TIMEOUT_S)
        engine.call(measured, probes.interleaved, [7, 2, 4], timeout_s=CALL_TIMEOUT_S)
        engine.call(measured, probes.one_raises, 3, 1, timeout_s=CALL_TIMEOUT_S)
    finally:
        engine.stop()
    paths = sorted(tmp_path.glob("*.log"))
    assert [path.name for path in paths] == ["stage0-column0.log", "stage1-column0.log"]
    verdict = check_files(paths)
    assert verdict.findings == ()
    assert verdict.messages > 10
