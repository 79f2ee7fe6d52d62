"""Many traces, long ones, and more than fit at once. Run in the engine's client process."""

from __future__ import annotations

from typing import Any

import nnsight

from tests.engine.probes import EARLY, LATE, SHORT


def many_in_a_row(model: Any, count: int) -> list[dict[str, int]]:
    """So many traces one after the other; the resident bytes of each rank after each, by pid."""
    import psutil

    pids = [rank["pid"] for rank in model.pp_status()]
    found = []
    for _ in range(count):
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            kept = nnsight.save([])
            h = model.model.layers[EARLY].mlp.output[-1].clone()
            model.model.layers[LATE].mlp.output[-1] += h
            kept.append(float(model.model.layers[LATE].mlp.output[-1].norm()))
        assert len(kept) == 1
        found.append({str(pid): psutil.Process(pid).memory_info().rss for pid in pids})
    return found


def reads_and_keeps_nothing(model: Any, steps: int) -> dict[str, Any]:
    """Read every layer in every step and look at one number made of them.

    Returns:
        The bytes of published values that the first stage held at the end of each step.
    """
    layers = len(model.model.layers)
    with model.trace("a", temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        held = nnsight.save([])
        link = link_of_this_rank()
        for _ in tracer.iter[:steps]:
            total = 0.0
            for i in range(layers):
                total = model.model.layers[i].mlp.output[-1, 0] + total
            float(total)
            held.append(int(link.status()["buffer_bytes"]))
    return {"held": list(held)}


def link_of_this_rank() -> Any:
    """The protocol's end on the rank whose process this is."""
    import gc

    from ppcore.runtime.link import Link

    (link,) = [found for found in gc.get_objects() if isinstance(found, Link)]
    return link


def preempted(model: Any, count: int, steps: int) -> dict[str, Any]:
    """More than fits into the KV cache at once: some wait, are computed anew, and go on.

    Every row is edited: what is computed anew is then edited anew, as it was the first time.
    """
    with model.trace(temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        rows = nnsight.save([None] * count)
        for n in range(count):
            with tracer.invoke(f"{SHORT} {n}"):
                mine = []
                for _ in tracer.iter[:steps]:
                    h = model.model.layers[EARLY].mlp.output.clone()
                    model.model.layers[LATE].mlp.output[:] += h
                    mine.append(model.samples.item())
                rows[n] = mine
    return {"rows": list(rows)}


def preemptions(model: Any) -> int:
    """How often the engine's scheduler has preempted a request."""
    metrics = model.vllm_entrypoint.get_metrics()
    return int(sum(m.value for m in metrics if m.name == "vllm:num_preemptions"))
