"""Traces over generation steps: every form of `tracer.iter`, loops that are cut short, `tracer.stop()`."""

from __future__ import annotations

from typing import Any

import nnsight

from ppcore.vllm.traces import Context, trace


@trace("the logits of every step, tracer.iter[:], both halves touched")
def iter_open(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for step in tracer.iter[:]:
            h = model.model.layers[early].output[0].clone()
            model.model.layers[late].mlp.output = h * 2
            kept.append((step, model.logits.argmax(-1)))
    return {"kept": [list(pair) for pair in kept]}


@trace("tracer.all() with the token of every step")
def iter_all(model: Any, ctx: Context) -> dict[str, Any]:
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        tokens = nnsight.save([])
        logits = nnsight.save([])
        for _ in tracer.all():
            logits.append(model.logits.clone())
            tokens.append(model.samples.item())
    return {
        "tokens": list(tokens),
        "logits": list(logits),
        "text": [f"{ctx.prompt}{ctx.tokenizer.decode(list(tokens))}"],
    }


@trace("tracer.iter[1:3], and the line after it")
def iter_slice(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for step in tracer.iter[1:3]:
            kept.append((step, model.model.layers[early].mlp.output.clone()))
            kept.append((step, model.model.layers[late].mlp.output.clone()))
        kept.append(("after", -1))
    return {"kept": [list(pair) for pair in kept]}


@trace("tracer.iter[2]: one step, an edit early, the effect late")
def iter_one(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for step in tracer.iter[2]:
            model.model.layers[early].mlp.output[:] = 0
            kept.append(model.model.layers[late].output[1].clone())
            kept.append(step)
        finished = tracer.result.save()
    return {"kept": list(kept), "token_ids": list(finished.outputs[0].token_ids)}


@trace("tracer.iter[[0, 2]]: chosen steps")
def iter_list(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for step in tracer.iter[[0, 2]]:
            kept.append((step, model.model.layers[late].mlp.output[-1].clone()))
        for step in tracer.iter[[3]]:
            kept.append((step, model.model.layers[early].mlp.output[-1].clone()))
    return {"kept": [list(pair) for pair in kept]}


@trace("a loop inside a loop, early outside and late inside")
def iter_nested(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for outer in tracer.iter[[0, 2]]:
            kept.append((outer, -1, model.model.layers[early].mlp.output[-1].clone()))
            for inner in tracer.iter[outer + 1 : outer + 2]:
                kept.append((outer, inner, model.model.layers[late].mlp.output[-1].clone()))
    return {"kept": [list(item) for item in kept]}


@trace("a bounded loop that asks for more steps than are made: cut short, with a warning")
def loop_too_long(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for step in tracer.iter[:8]:
            before = model.model.layers[early].mlp.output[-1].clone()
            kept.append((step, float((model.model.layers[late].mlp.output[-1] - before).norm())))
    return {"kept": [list(pair) for pair in kept]}


@trace("lines after a loop that is cut short do not run, on any rank")
def lines_after_cut_loop(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        steps = nnsight.save([])
        for step in tracer.iter[:]:
            model.model.layers[early].mlp.output[:] *= 0.5
            steps.append(step)
        steps.append("after the loop")
        model.model.layers[late].mlp.output[:] = 0
    return {"steps": list(steps)}


@trace("a loop whose body touches only the early half")
def loop_early_only(model: Any, ctx: Context) -> dict[str, Any]:
    early = ctx.early
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        kept = nnsight.save([])
        for step in tracer.iter[:]:
            kept.append((step, model.model.layers[early].mlp.output[-1].clone()))
    return {"kept": [list(pair) for pair in kept]}


@trace("a loop whose body touches only the late half, writing")
def loop_late_only(model: Any, ctx: Context) -> dict[str, Any]:
    late = ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        steps = nnsight.save([])
        for step in tracer.iter[:7]:
            model.model.layers[late].mlp.output[:] = 0
            steps.append(step)
        steps.append("after the loop")
    return {"steps": list(steps)}


@trace("lines after a loop that the run completes do run")
def lines_after_whole_loop(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        steps = nnsight.save([])
        for step in tracer.iter[:2]:
            model.model.layers[early].mlp.output[:] *= 0.5
            steps.append(step)
            size = model.model.layers[late].mlp.output.norm()
        steps.append("after the loop")
        steps.append(float(size))
        finished = tracer.result.save()
    return {"steps": list(steps), "token_ids": list(finished.outputs[0].token_ids)}


@trace("tracer.stop() in the second step, on a condition of a late value")
def stop(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=8) as tracer:
        kept = nnsight.save([])
        for step in tracer.iter[:8]:
            kept.append(model.model.layers[early].mlp.output[-1].clone())
            size = float(model.model.layers[late].mlp.output[-1].norm())
            kept.append(size)
            if step == 1 and size > 0:
                tracer.stop()
        kept.append("after the loop")
    return {"kept": list(kept)}


@trace("a tally kept in plain Python across steps, from both halves")
def python_state(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        tally = nnsight.save({"sum": 0.0, "largest": -1, "seen": []})
        largest = 0.0
        for step in tracer.iter[:4]:
            a = float(model.model.layers[early].mlp.output[-1].norm())
            b = float(model.model.layers[late].mlp.output[-1].norm())
            tally["sum"] += a + b
            tally["seen"].append(a < b)
            if a + b > largest:
                largest = a + b
                tally["largest"] = step
    return dict(tally)
