"""Blocks that show what crosses between stages. Run in the engine's client process, see `conftest.measure`.

The model has eight layers. With two stages layers 0 to 3 are on the first and 4 to 7 on the second; the blocks
do not know. `EARLY` and `LATE` are on different stages.
"""

from __future__ import annotations

from typing import Any

import nnsight
import torch

EARLY, LATE = 2, 6
#: The random model's tokenizer has few merges: some two hundred tokens.
LONG = "a long prompt, so that a row of a value and the whole of it are far apart. " * 4
SHORT = "The Eiffel Tower is located in the city of"


def save_everything(model: Any) -> dict[str, Any]:
    with model.trace(LONG, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for _ in tracer.iter[:2]:
            for i in (EARLY, LATE):
                out = model.model.layers[i].output
                kept.append(out[0].clone())
                kept.append((out[0] + out[1])[-1].float().norm())
                kept.append(out[1].clone().to(torch.float64))
            kept.append(model.logits.clone())
    return {"kept": list(kept)}


def ask_shape(model: Any) -> dict[str, Any]:
    with model.trace(SHORT, temperature=0.0, max_tokens=1):
        kept = nnsight.save([])
        for i in (EARLY, LATE):
            h = model.model.layers[i].mlp.output
            kept.append([list(h.shape), str(h.dtype), h.dim(), len(h), h.numel(), str(h.device)])
    return {"kept": list(kept)}


def write_constants(model: Any) -> dict[str, Any]:
    with model.trace(SHORT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        for _ in tracer.iter[:2]:
            for i in (EARLY, LATE):
                model.model.layers[i].mlp.output[:] = 0
                model.model.layers[i].output[0][-1] += 1
        finished = tracer.result.save()
    return {"token_ids": list(finished.outputs[0].token_ids)}


def write_own(model: Any) -> dict[str, Any]:
    with model.trace(SHORT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        for _ in tracer.iter[:2]:
            for i in (EARLY, LATE):
                h = model.model.layers[i].mlp.output
                model.model.layers[i].mlp.output = h * 2 - h.mean(-1, keepdim=True)
        finished = tracer.result.save()
    return {"token_ids": list(finished.outputs[0].token_ids)}


def force_twice(model: Any, layer: int) -> dict[str, Any]:
    with model.trace(SHORT, temperature=0.0, max_tokens=1):
        h = model.model.layers[layer].mlp.output[-1].clone()
        kept = nnsight.save([])
        kept.append(h.tolist())
        kept.append(h.tolist())
    return {"kept": list(kept)}


def force_row(model: Any, layer: int) -> dict[str, Any]:
    with model.trace(LONG, temperature=0.0, max_tokens=1):
        h = model.model.layers[layer].mlp.output
        kept = nnsight.save([])
        kept.append(h[-1].tolist())
        rows = nnsight.save(len(h))
    return {"kept": list(kept), "rows": rows}


def force_whole(model: Any, layer: int) -> dict[str, Any]:
    with model.trace(LONG, temperature=0.0, max_tokens=1):
        h = model.model.layers[layer].mlp.output
        kept = nnsight.save([])
        kept.append(h.tolist())
    return {"rows": len(kept[0])}


def force_after_edit(model: Any) -> dict[str, Any]:
    with model.trace(SHORT, temperature=0.0, max_tokens=1):
        kept = nnsight.save({})
        for i in (EARLY, LATE):
            h = model.model.layers[i].mlp.output
            old = h.clone()
            alias = h[-1]
            h[-1] += 1
            h[:, 0] = 5
            kept[f"{i}.h"] = h.tolist()
            kept[f"{i}.alias"] = alias.tolist()
            kept[f"{i}.old"] = old.tolist()
            kept[f"{i}.again"] = model.model.layers[i].mlp.output.tolist()
    return dict(kept)


def reread_after_replacement(model: Any) -> dict[str, Any]:
    with model.trace(SHORT, temperature=0.0, max_tokens=1):
        kept = nnsight.save({})
        for i in (EARLY, LATE):
            first = model.model.layers[i].mlp.output
            model.model.layers[i].mlp.output = first * 3
            again = model.model.layers[i].mlp.output
            again += 1
            kept[f"{i}.first"] = float(first.norm())
            kept[f"{i}.again"] = float(again.norm())
            kept[f"{i}.saved"] = model.model.layers[i].mlp.output.clone()
    return dict(kept)


def in_place_after_force(model: Any) -> dict[str, Any]:
    with model.trace(SHORT, temperature=0.0, max_tokens=1):
        kept = nnsight.save([])
        for i in (EARLY, LATE):
            out = model.model.layers[i].output
            kept.append(float(out[0].norm()))
            out[0].mul_(2)
            out[1][-1].zero_()
            kept.append(float(out[0].norm()))
            kept.append(float(out[1].norm()))
        logits = model.logits.clone().save()
    return {"kept": list(kept), "logits": logits}


def interleaved(model: Any, lengths: list[int]) -> dict[str, Any]:
    """One invoke per length, all in flight, each writing late from early and reading back."""
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        rows = nnsight.save([None] * len(lengths))
        for n, length in enumerate(lengths):
            with tracer.invoke(f"{SHORT} {n}", max_tokens=length):
                mine = []
                for _ in tracer.iter[:length]:
                    h = model.model.layers[EARLY].mlp.output
                    model.model.layers[LATE].mlp.output = h * (n + 1)
                    size = float(model.model.layers[LATE].mlp.output[-1].norm())
                    mine.append([size, model.samples.item()])
                rows[n] = mine
    return {"rows": list(rows)}


def generate(model: Any, prompts: list[str], max_tokens: int) -> list[list[int]]:
    """Plain requests, no trace."""
    outputs = model.generate(prompts, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in outputs]


def one_raises(model: Any, count: int, bad: int) -> dict[str, Any]:
    """`count` invokes, of which one raises in its second step, while the others go on."""
    error = None
    rows: list[Any] = []
    try:
        with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            rows = nnsight.save([None] * count)
            for n in range(count):
                with tracer.invoke(f"{SHORT} {n}"):
                    mine = []
                    for step in tracer.iter[:4]:
                        h = model.model.layers[EARLY].mlp.output[-1].clone()
                        model.model.layers[LATE].mlp.output[-1] += h
                        if n == bad and step == 1:
                            raise KeyError(f"invoke {n} gives up")
                        mine.append(model.samples.item())
                    rows[n] = mine
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    return {"error": error, "rows": list(rows)}


def stopped_early(model: Any) -> dict[str, Any]:
    """Requests that end in the client, by a stop token, while blocks still ask for steps."""
    with model.trace(SHORT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        finished = tracer.result.save()
    second = int(finished.outputs[0].token_ids[1])
    with model.trace(SHORT, temperature=0.0, max_tokens=12, stop_token_ids=[second]) as tracer:
        steps = nnsight.save([])
        for step in tracer.iter[:12]:
            size = float(model.model.layers[EARLY].mlp.output[-1].norm())
            model.model.layers[LATE].mlp.output[-1] *= 1.0
            steps.append([step, size])
    return {"steps": list(steps)}


def barrier(model: Any) -> str:
    try:
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            meet = tracer.barrier(2)
            for prompt in (SHORT, LONG):
                with tracer.invoke(prompt):
                    meet()
                    model.logits.save()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def read_prompt(model: Any, prompt: str) -> dict[str, Any]:
    """How many rows of the prompt a block sees on either half, or the error."""
    rows: list[int] = []
    try:
        with model.trace(prompt, temperature=0.0, max_tokens=1):
            rows = nnsight.save([])
            rows.append(len(model.model.layers[EARLY].mlp.output))
            rows.append(len(model.model.layers[LATE].mlp.output))
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0], "rows": []}
    return {"error": None, "rows": list(rows)}


def missing_module(model: Any) -> str:
    try:
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            model.model.layers[EARLY].no_such_module.output.save()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def layer_beyond(model: Any) -> str:
    try:
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            model.model.layers[99].output.save()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
