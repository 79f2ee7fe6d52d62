"""Traces that write: replacement, in-place edits, across the halves in both directions, samples, skips."""

from __future__ import annotations

from typing import Any

import nnsight
import torch

from ppcore.vllm.traces import Context, trace


@trace("an early value, doubled, replaces a late one")
def write_early_to_late(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        h = model.model.layers[early].mlp.output.clone()
        model.model.layers[late].mlp.output = h * 2
        seen = model.model.layers[late].mlp.output.clone().save()
        logits = model.logits.clone().save()
    return {"seen": seen, "logits": logits}


@trace("the late value of step t is added to an early one at step t + 1")
def write_late_to_early(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        logits = nnsight.save([])
        carried = None
        for _ in tracer.iter[:4]:
            if carried is not None:
                model.model.layers[early].mlp.output[-1] += carried
            carried = model.model.layers[late].mlp.output[-1].clone()
            logits.append(model.logits.clone())
    return {"logits": list(logits)}


@trace("whole outputs are replaced on both halves and read back")
def replacement(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        seen = nnsight.save([])
        for i in (early, late):
            out = model.model.layers[i].output
            model.model.layers[i].output = (out[0] * 0.5, out[1].clone())
            seen.append(model.model.layers[i].output[0].clone())
        logits = model.logits.clone().save()
    return {"seen": list(seen), "logits": logits}


@trace("rows and slices are edited in place on both halves and read back")
def in_place(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        seen = nnsight.save([])
        for i in (early, late):
            out = model.model.layers[i].output
            out[0][-1] *= 3
            out[1][:, ::2] += 0.25
            out[0][0] = 0
            again = model.model.layers[i].output
            seen.append(again[0].clone())
            seen.append(again[1].clone())
        logits = model.logits.clone().save()
    return {"seen": list(seen), "logits": logits}


@trace("views, clones and re-reads of one visit before and after an edit, some of them forced")
def aliases(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        seen = nnsight.save({})
        for i in (early, late):
            out = model.model.layers[i].mlp.output
            before = out.clone()
            row = out[-1]
            norm_before = float(out.norm())
            out[:] = out * 2
            row += 1
            seen[f"{i}.before"] = before
            seen[f"{i}.row"] = row.clone()
            seen[f"{i}.again"] = model.model.layers[i].mlp.output.clone()
            seen[f"{i}.norms"] = [
                norm_before,
                float(out.norm()),
                float(before.norm()),
                float(row.norm()),
            ]
    return dict(seen)


@trace("a direction captured from two prompts steers one of them, on both halves", batched=True)
def steering(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(ctx.prompt):
            here = nnsight.save(
                torch.stack([model.model.layers[i].output[1][-1] for i in (early, late)])
            )
        with tracer.invoke(ctx.other):
            there = nnsight.save(
                torch.stack([model.model.layers[i].output[1][-1] for i in (early, late)])
            )
    direction = there - here
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        for _ in tracer.iter[:5]:
            for n, i in enumerate((early, late)):
                model.model.layers[i].output[0][-1] += 2 * direction[n]
        finished = tracer.result.save()
    answer = finished.outputs[0]
    return {
        "direction": direction,
        "token_ids": list(answer.token_ids),
        "text": [f"steered: {ctx.prompt}{answer.text}"],
    }


@trace("one MLP of each half is zeroed: what it does to the answer's logit")
def ablation(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        clean = model.logits.clone().save()
    token = int(clean.argmax(-1))
    drops, without = {}, []
    for i in (early, late):
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
            model.model.layers[i].mlp.output[:] = 0
            ablated = model.logits.clone().save()
        drops[i] = float(clean[0, token] - ablated[0, token])
        without.append(ablated)
    return {
        "token": token,
        "drops": drops,
        "without": without,
        "text": [
            f"without mlp {i}: logit of {ctx.word(token)!r} {-drop:+.3f}"
            for i, drop in drops.items()
        ],
    }


@trace("what a module is called with is replaced: .input early, .inputs late")
def write_inputs(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        model.model.layers[early].mlp.input = model.model.layers[early].mlp.input * 0.5
        args, kwargs = model.model.layers[late].inputs
        positions, hidden, residual = args
        model.model.layers[late].inputs = ((positions, hidden * 0.5, residual), kwargs)
        seen = model.model.layers[late].output[0].clone().save()
        logits = model.logits.clone().save()
    return {"seen": seen, "logits": logits}


@trace("a module of each half is skipped")
def skip(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        for i in (early, late):
            model.model.layers[i].mlp.skip(torch.zeros_like(model.model.layers[i].mlp.input))
        logits = model.logits.clone().save()
    return {"logits": logits}


@trace("drawn tokens are replaced, and the engine goes on from them")
def edit_samples(model: Any, ctx: Context) -> dict[str, Any]:
    forced = ctx.tokenizer.encode(" the", add_special_tokens=False)[0]
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        drawn = nnsight.save([])
        for step in tracer.iter[:4]:
            if step == 1:
                model.samples = torch.full_like(model.samples, forced)
            drawn.append(model.samples.item())
    said = ctx.tokenizer.decode(list(drawn))
    return {
        "drawn": list(drawn),
        "text": [f"second token forced to {ctx.word(forced)!r}: {said!r}"],
    }


@trace("logits are edited in place from an early value before the sampler sees them")
def edit_logits(model: Any, ctx: Context) -> dict[str, Any]:
    early = ctx.early
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        drawn = nnsight.save([])
        for _ in tracer.iter[:3]:
            size = model.model.layers[early].mlp.output[-1].abs().max()
            model.logits[:, 7] = 1e4 * size
            drawn.append(model.samples.item())
    return {"drawn": list(drawn)}


@trace("plain `if` on a late value decides what happens to an early one a step later")
def branch(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        taken = nnsight.save([])
        logits = nnsight.save([])
        steer = False
        for step in tracer.iter[:4]:
            if steer:
                model.model.layers[early].mlp.output[:] = 0
            here = model.model.layers[late].output[0][-1]
            if float(here.norm()) > 1e-3 and step % 2 == 0:
                taken.append(f"step {step}: on")
                steer = True
            else:
                taken.append(f"step {step}: off")
                steer = False
            logits.append(model.logits.clone())
    return {"taken": list(taken), "logits": list(logits)}


@trace("the same seeded noise is added on both halves")
def noise(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        torch.manual_seed(7)
        kept = nnsight.save([])
        for i in (early, late):
            out = model.model.layers[i].mlp.output
            extra = torch.randn(out.shape, dtype=torch.float32).to(out.dtype) * 0.1
            model.model.layers[i].mlp.output = out + extra
            kept.append(extra)
        logits = model.logits.clone().save()
    return {"kept": list(kept), "logits": logits}
