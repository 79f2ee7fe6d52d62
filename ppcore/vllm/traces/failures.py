"""Traces that end in an error, which has to be the same error, at the same line, with the same saves left.

Each one runs a plain trace afterwards: the engine has to go on.
"""

from __future__ import annotations

from typing import Any

import nnsight

from ppcore.vllm.traces import Context, describe_error, trace


def _goes_on(model: Any, ctx: Context) -> int:
    """The next token of an ordinary trace: what shows that the engine lives."""
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        token = model.samples.clone().save()
    return int(token)


@trace("a late layer is read before an early one: OutOfOrderError")
def out_of_order_read(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    error = None
    kept = []
    try:
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=2):
            kept = nnsight.save([])
            kept.append(model.model.layers[late].mlp.output[-1].clone())
            kept.append(model.model.layers[early].mlp.output[-1].clone())
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "kept": list(kept), "next": _goes_on(model, ctx)}


@trace("an early layer is written after a late read: OutOfOrderError")
def out_of_order_write(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    error = None
    try:
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=2):
            h = model.model.layers[late].output
            model.model.layers[early].output = h
            model.logits.save()
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "next": _goes_on(model, ctx)}


@trace("two reads out of order within the late half only")
def out_of_order_late(model: Any, ctx: Context) -> dict[str, Any]:
    late, last = ctx.late, ctx.n_layers - 1
    error = None
    try:
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=2):
            kept = model.model.layers[last].mlp.output.clone().save()
            model.model.layers[late].mlp.output = kept
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "next": _goes_on(model, ctx)}


@trace("a layer is read after the loop that went past it")
def read_after_loop(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    error = None
    steps = []
    try:
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            steps = nnsight.save([])
            for step in tracer.iter[:2]:
                model.model.layers[early].mlp.output[:] *= 0.5
                steps.append(step)
            steps.append("after the loop")
            steps.append(float(model.model.layers[late].mlp.output.norm()))
            steps.append(float(model.model.layers[early].mlp.output.norm()))
            steps.append("never")
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "steps": list(steps), "next": _goes_on(model, ctx)}


@trace("one of two invokes raises: its error, and the sibling's saves", batched=True)
def error_in_one_invoke(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    error = None
    fine = None
    try:
        with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            with tracer.invoke(ctx.prompt):
                fine = nnsight.save([])
                for _ in tracer.iter[:3]:
                    fine.append(float(model.model.layers[early].mlp.output[-1].norm()))
                    fine.append(model.samples.item())
            with tracer.invoke(ctx.other):
                size = float(model.model.layers[late].mlp.output[-1].norm())
                raise ValueError(f"this block gives up, {size > 0}")
    except RuntimeError as raised:
        error = describe_error(raised)
    return {
        "error": error,
        "fine": None if fine is None else list(fine),
        "next": _goes_on(model, ctx),
    }


@trace("a block raises in the second step of its loop, after an early read")
def error_in_loop(model: Any, ctx: Context) -> dict[str, Any]:
    early = ctx.early
    error = None
    kept = []
    try:
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
            kept = nnsight.save([])
            for step in tracer.iter[:5]:
                kept.append(model.model.layers[early].mlp.output[-1].clone())
                if step == 1:
                    kept[7]
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "kept": list(kept), "next": _goes_on(model, ctx)}


@trace("a tensor operation on a late value that cannot work")
def error_in_operation(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    error = None
    try:
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
            a = model.model.layers[early].mlp.output
            b = model.model.layers[late].mlp.output
            wrong = (a @ b).save()
            del wrong
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "next": _goes_on(model, ctx)}


@trace("a block raises before its first read")
def error_at_once(model: Any, ctx: Context) -> dict[str, Any]:
    error = None
    try:
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=2):
            _ = 1 / 0
            model.logits.save()
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "next": _goes_on(model, ctx)}
