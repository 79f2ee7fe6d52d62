"""The traces that are measured, and the same requests without a trace.

A workload is one call: prompts in, tokens out, and in between what its block does. Layers of the lower half
are *early*, on the first of two stages, and those of the upper half *late*. A value is *used* when Python
looks at it, so that every rank that does not hold it has to ask for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import nnsight

from ppcore.vllm.traces.perform import measured

from . import MODEL, PROMPT

SETTINGS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Workload:
    """One thing to measure.

    Attributes:
        traced: runs the trace on a model.
        requests: how many requests there are, each of `PROMPT`.
        tokens: that each request generates.
    """

    about: str
    traced: Callable[[Any], Any]
    requests: int = 1
    tokens: int = 1

    def untraced(self, model: Any) -> None:
        """The same requests, which no block reads."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=self.tokens, **SETTINGS)
        prompts = [{"prompt_token_ids": PROMPT}] * self.requests
        model.vllm_entrypoint.generate(prompts, params, use_tqdm=False)


def _save_all(model: Any) -> Any:
    with model.trace(PROMPT, max_tokens=1, **SETTINGS):
        kept = nnsight.save([])
        for layer in model.model.layers:
            kept.append(layer.output[0].clone())
    return kept


def _use_layers(model: Any, layers: range) -> Any:
    with model.trace(PROMPT, max_tokens=1, **SETTINGS):
        kept = nnsight.save([])
        for i in layers:
            kept.append(float(model.model.layers[i].output[0].sum()))
    return kept


def _use_logits(model: Any, steps: int) -> Any:
    with model.trace(PROMPT, max_tokens=steps, **SETTINGS) as tracer:
        kept = nnsight.save([])
        for _ in tracer.iter[:steps]:
            kept.append(float(model.logits.max()))
    return kept


def _invokes(model: Any, requests: int) -> Any:
    with model.trace(max_tokens=1, **SETTINGS) as tracer:
        kept = nnsight.save([])
        for _ in range(requests):
            with tracer.invoke(PROMPT):
                early = model.model.layers[6].output[0]
                late = model.model.layers[18].output[0]
                kept.append((early.clone(), late.clone()))
    return kept


def _late(reads: int) -> Workload:
    return Workload(
        f"{reads} late layers, each looked at",
        partial(_use_layers, layers=range(MODEL["layers"] - reads, MODEL["layers"])),
    )


def _logits(steps: int) -> Workload:
    about = f"the logits of each of {steps} steps, looked at"
    return Workload(about, partial(_use_logits, steps=steps), tokens=steps)


def _both_halves(requests: int) -> Workload:
    about = f"{requests} invokes save a layer of either half"
    return Workload(about, partial(_invokes, requests=requests), requests=requests)


WORKLOADS: dict[str, Workload] = {
    "save all": Workload("the output of each of 24 layers is saved", _save_all),
    "early used": Workload(
        "12 early layers, each looked at", partial(_use_layers, layers=range(12))
    ),
    **{f"late used {reads}": _late(reads) for reads in (1, 4, 8, 12)},
    **{f"logits {steps}": _logits(steps) for steps in (1, 8, 32, 128)},
    **{f"invokes {requests}": _both_halves(requests) for requests in (1, 4, 16, 64)},
}


# --- in an engine's process -----------------------------------------------------------------------


def once(model: Any, name: str) -> tuple[float, float]:
    """Seconds of a workload, traced and untraced, one right after the other."""
    workload = WORKLOADS[name]
    begun = time.perf_counter()
    workload.untraced(model)
    between = time.perf_counter()
    workload.traced(model)
    return time.perf_counter() - between, between - begun


def call(model: Any) -> float:
    """Seconds of a call of all ranks which does nothing."""
    begun = time.perf_counter()
    model.pp_status()
    return time.perf_counter() - begun


def crossing(model: Any, name: str) -> tuple[int, int]:
    """Values and bytes that cross between stages in one run of a workload."""
    found = measured(model, WORKLOADS[name].traced)
    return found.pulls, found.pulled_bytes
