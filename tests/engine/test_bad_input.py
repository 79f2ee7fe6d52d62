"""Mistakes get an error that says what is wrong, before or at the trace, and the engine lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ppcore.vllm.traces.perform import at_rest, status
from tests.engine import probes
from tests.engine.limits import CALL_TIMEOUT_S, LAYERS

#: settings -> words that the error has to contain.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "more stages than layers": (
        {"pipeline_parallel_size": LAYERS + 1},
        (str(LAYERS + 1), str(LAYERS), "layers"),
    ),
    "taps": (
        {"pipeline_parallel_size": 2, "taps": ["model.layers.*.output"]},
        ("taps", "pipeline"),
    ),
    "cuda graphs": ({"pipeline_parallel_size": 2, "enforce_eager": False}, ("enforce_eager",)),
}

# One process for all, since importing vLLM takes longer than refusing. An engine that does start is an error
# of the test's subject, and is ended with the process.
_SCRIPT = """
import json, sys
from ppcore.vllm import VLLM
checkpoint, cases = json.loads(sys.argv[1])
for name, settings in cases.items():
    try:
        VLLM(checkpoint, dispatch=True, max_model_len=256, **settings)
        said = "no error"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("CASE " + json.dumps([name, said]), flush=True)
"""


def _build(checkpoint: str, cases: dict[str, dict[str, Any]], **env: str) -> dict[str, str]:
    """What building a model with each of these settings says."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps([checkpoint, cases])],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **env},
    )
    marked = (line for line in done.stdout.splitlines() if line.startswith("CASE "))
    said = dict(json.loads(line[len("CASE ") :]) for line in marked)
    return {name: said.get(name, f"ended before: {done.stderr[-2000:]}") for name in cases}


@pytest.fixture(scope="module")
def refusals(checkpoint: str) -> dict[str, str]:
    return _build(checkpoint, {name: settings for name, (settings, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_the_model_is_built(name: str, refusals: dict[str, str]) -> None:
    said = refusals[name]
    missing = [word for word in REFUSED[name][1] if word not in said.lower()]
    assert said != "no error" and not missing, f"{said!r} does not say {missing}"
    assert "Engine core initialization failed" not in said, "the reason is in the engine's log only"


def test_the_second_model_runner_is_refused(checkpoint: str) -> None:
    said = _build(checkpoint, {"v2": {"pipeline_parallel_size": 2}}, VLLM_USE_V2_MODEL_RUNNER="1")
    assert "VLLM_USE_V2_MODEL_RUNNER" in said["v2"]


def test_a_prompt_split_by_chunked_prefill_is_refused_and_the_engine_lives(engines: Any) -> None:
    engine = engines.start(
        pipeline_parallel_size=2,
        enable_chunked_prefill=True,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    try:
        long = engine.call(probes.read_prompt, probes.LONG, timeout_s=CALL_TIMEOUT_S)
        short = engine.call(probes.read_prompt, probes.SHORT, timeout_s=CALL_TIMEOUT_S)
        ranks = engine.call(status, timeout_s=CALL_TIMEOUT_S)
    finally:
        left = engine.stop()
    assert "split across steps by chunked prefill" in str(long["error"])
    assert short["error"] is None and short["rows"][0] == short["rows"][1] < 64
    assert at_rest(ranks) == {}
    assert left == []


@pytest.mark.parametrize(
    "probe, words",
    [
        (probes.barrier, ("barrier",)),
        (probes.missing_module, ("no_such_module",)),
        (probes.layer_beyond, ("99", "index")),
    ],
    ids=["barrier", "missing module", "layer beyond the last"],
)
def test_refused_at_the_trace_and_the_engine_lives(
    probe: Any, words: tuple[str, ...], reference: Any, staged: Any
) -> None:
    said = staged.call(probe, timeout_s=CALL_TIMEOUT_S)
    assert said != "no error"
    on_one = reference.call(probe, timeout_s=CALL_TIMEOUT_S)
    assert said.splitlines()[0] == on_one.splitlines()[0]
    assert any(word in said for word in words), said
    goes_on = [
        engine.call(probes.generate, [probes.SHORT], 4, timeout_s=CALL_TIMEOUT_S)
        for engine in (reference, staged)
    ]
    assert goes_on[0] == goes_on[1]
