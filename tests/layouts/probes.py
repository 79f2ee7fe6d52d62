"""Traces that any architecture can run, by its `Anatomy`. They run in the engine's client process.

Each returns plain results that two layouts have to agree on; nothing in them is about stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnsight
import torch

from tests.layouts.anatomy import EARLY, LATE, LAYERS, Anatomy

PROMPT = "The Eiffel Tower is located in the city of"
PROMPTS = [PROMPT, "a", "one two three", "a prompt that is longer than the others by some words"]


def copied(value: Any) -> Any:
    """The value with its tensors cloned."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        return [copied(item) for item in value]
    return None


def tensor(value: Any) -> Any:
    """The tensor of a tensor, or of a tuple that begins with one."""
    return value if isinstance(value, torch.Tensor) else value[0]


def stream(output: Any) -> Any:
    """The residual stream after a layer: its output, or output and residual together."""
    if isinstance(output, torch.Tensor):
        return output
    if len(output) > 1 and isinstance(output[1], torch.Tensor):
        return output[0] + output[1]
    return output[0]


def reads(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """Inputs and outputs of a layer of each half and of the modules inside it; embedding, norm, logits."""
    layers = [(i, anatomy.layer(i)) for i in (EARLY, LATE)]
    inner, embed, norm, shared = anatomy.inner, anatomy.embed, anatomy.norm, anatomy.shared
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        kept = nnsight.save({})
        kept["embed"] = copied(model.get(embed).output)
        if shared:
            kept["shared"] = copied(model.get(shared).output)
        for i, layer in layers:
            kept[f"{i}.inputs"] = copied(model.get(layer).inputs[0])
            for name in inner:
                kept[f"{i}.{name}"] = copied(model.get(f"{layer}.{name}").output)
            kept[f"{i}.output"] = copied(model.get(layer).output)
        kept["norm"] = copied(model.get(norm).output)
        kept["logits"] = model.logits.clone()
        kept["samples"] = model.samples.clone()
    return dict(kept)


def inputs(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """What the modules inside a layer of each half are called with."""
    parts = [
        f"{anatomy.layer(i)}.{name}"
        for i in (EARLY, LATE)
        for name in anatomy.inner
        if not any(other.startswith(f"{name}.") for other in anatomy.inner)
    ]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        kept = nnsight.save({})
        for part in parts:
            kept[part] = copied(model.get(part).input)
    return dict(kept)


def writes(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """In place on the early half, its value into the late one, by output and by input, for two steps."""
    early, late = (f"{anatomy.layer(i)}.{anatomy.mlp}" for i in (EARLY, LATE))
    pair = anatomy.pair
    with model.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for _ in tracer.iter[:2]:
            model.get(early).input = model.get(early).input * 0.5
            here = tensor(model.get(early).output)
            here[..., -1, :] *= 3
            edited = here.clone()  # the model may go on to add to it in place, as falcon does
            there = tensor(model.get(late).output)
            mixed = there + edited * 2
            model.get(late).output = (mixed, None) if pair else mixed
            kept.append(tensor(model.get(late).output).clone())
            kept.append(model.logits.clone())
    return {"kept": list(kept)}


def skips(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """The feed-forward part of a layer of each half is skipped."""
    parts = [f"{anatomy.layer(i)}.{anatomy.mlp}" for i in (EARLY, LATE)]
    pair = anatomy.pair
    # As wide as the stream: what the layer before it left.
    norms = [anatomy.layer(i - 1) for i in (EARLY, LATE)]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        for part, before in zip(parts, norms, strict=True):
            zero = torch.zeros_like(tensor(model.get(before).output))
            model.get(part).skip((zero, None) if pair else zero)
        logits = model.logits.clone().save()
    return {"logits": logits}


def lens(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """The logits that each layer's stream gives through the final norm and the head."""
    layers = [anatomy.layer(i) for i in range(LAYERS)]
    norm, head = anatomy.norm, anatomy.head
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        said = nnsight.save([])
        for layer in layers:
            rows = stream(model.get(layer).output)
            last = rows[..., -1, :].reshape(1, -1).clone()
            said.append(model.logits_processor(model.get(head), tensor(model.get(norm)(last))))
        weight = model.get(norm).weight.clone().save()
        own = model.logits.clone().save()
    return {"said": list(said), "weight": weight, "own": own}


def loop(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """Every step: a late value looked at, carried into the next step's early half; tokens."""
    early, late = (f"{anatomy.layer(i)}.{anatomy.mlp}" for i in (EARLY, LATE))
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        carried = None
        for step in tracer.iter[:]:
            if carried is not None:
                tensor(model.get(early).output)[..., -1, :] += carried
            row = tensor(model.get(late).output)[..., -1, :].clone()
            carried = row * 0.5 if float(row.norm()) > 1e-3 else None
            kept.append((step, row, model.logits.clone(), model.samples.item()))
    return {"kept": [list(found) for found in kept]}


def cache(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """`tracer.cache()` of the whole tree."""
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        found = tracer.cache()
    # The root's name alone does not lead to its entry once the cache has left the engine.
    paths = [path for path in found.keys() if "." in path]  # noqa: SIM118 (a view, not a dict)
    return {path: copied(found[path].output) for path in paths}


def invokes(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """Two prompts of different lengths in one trace; one of them is edited."""
    late = f"{anatomy.layer(LATE)}.{anatomy.mlp}"
    early = anatomy.layer(EARLY)
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPTS[0]):
            first = stream(model.get(early).output)[..., -1, :].clone().save()
            tensor(model.get(late).output)[:] = 0
            edited = model.logits.clone().save()
        with tracer.invoke(PROMPTS[3]):
            second = tensor(model.get(late).output).clone().save()
            plain = model.logits.clone().save()
    return {"first": first, "edited": edited, "second": second, "plain": plain}


def tokens(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """Plain requests, and the result of a traced one."""
    alone = []
    for prompt in PROMPTS[:2]:
        (output,) = model.generate([prompt], temperature=0.0, max_tokens=6, ignore_eos=True)
        alone.append(list(output.outputs[0].token_ids))
    early = anatomy.layer(EARLY)
    with model.trace(PROMPTS[2], temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        _ = copied(model.get(early).output)
        finished = tracer.result.save()
    return {"alone": alone, "traced": list(finished.outputs[0].token_ids)}


#: Trace kind -> probe.
PROBES: dict[str, Callable[[Any, Anatomy], dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (tokens, reads, inputs, writes, skips, lens, loop, cache, invokes)
}
#: Compared with a tolerance: two requests are batched as they arrive.
BATCHED = {"invokes"}
