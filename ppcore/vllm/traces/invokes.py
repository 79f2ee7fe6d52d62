"""Traces of several requests at once, and edits that ride on requests which are no traces."""

from __future__ import annotations

from typing import Any

import nnsight

from ppcore.vllm.traces import Context, trace


@trace("four invokes fill one shared list and one shared dict", batched=True)
def shared_containers(model: Any, ctx: Context) -> dict[str, Any]:
    early, late, questions = ctx.early, ctx.late, ctx.questions
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        rows = nnsight.save([None] * len(questions))
        table = nnsight.save({})
        for n, question in enumerate(questions):
            with tracer.invoke(question):
                first = model.model.layers[early].mlp.output[-1].clone()
                rows[n] = model.model.layers[late].mlp.output[-1].clone()
                table[question] = first
    return {"rows": list(rows), "table": dict(table)}


@trace("one name saved by every invoke comes back as a list, in order", batched=True)
def same_name(model: Any, ctx: Context) -> dict[str, Any]:
    early, late, questions = ctx.early, ctx.late, ctx.questions
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for question in questions:
            with tracer.invoke(question):
                first = model.model.layers[early].mlp.output[-1].clone().save()
                second = model.model.layers[late].mlp.output.clone().save()
                token = model.samples.item()
                word = nnsight.save(token)
    return {
        "first": list(first),
        "second": list(second),
        "tokens": list(word),
        "text": [
            f"{question}{ctx.word(token)}" for question, token in zip(questions, word, strict=True)
        ],
    }


@trace("two requests of different lengths, in flight at once", batched=True)
def different_lengths(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        with tracer.invoke(ctx.prompt, max_tokens=7):
            long = nnsight.save([])
            for _ in tracer.iter[:7]:
                h = model.model.layers[early].mlp.output
                model.model.layers[late].mlp.output = h * 2
                long.append(model.samples.item())
        with tracer.invoke(ctx.other, max_tokens=3):
            short = nnsight.save([])
            for _ in tracer.all():
                short.append(float(model.model.layers[late].mlp.output[-1].norm()))
                short.append(model.samples.item())
    return {"long": list(long), "short": list(short)}


@trace("sixteen invokes at once, each with its own edit and loop", batched=True)
def sixteen_invokes(model: Any, ctx: Context) -> dict[str, Any]:
    early, late, questions = ctx.early, ctx.late, ctx.questions
    with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        rows = nnsight.save([None] * 16)
        for n in range(16):
            with tracer.invoke(questions[n % 4]):
                mine = []
                for _ in tracer.iter[:3]:
                    h = model.model.layers[early].mlp.output[-1].clone()
                    model.model.layers[late].mlp.output[-1] += h * (n / 8)
                    mine.append(model.logits.clone())
                rows[n] = mine
    return {"rows": [list(mine) for mine in rows]}


@trace("an edit in one of two invokes leaves the other alone", batched=True)
def edit_one_of_two(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        with tracer.invoke(ctx.prompt):
            clean = nnsight.save([])
            for _ in tracer.iter[:3]:
                clean.append(model.samples.item())
        with tracer.invoke(ctx.prompt):
            edited = nnsight.save([])
            for _ in tracer.iter[:3]:
                model.model.layers[early].output[0][:] = 0
                model.model.layers[late].output[0][:] = 0
                edited.append(model.samples.item())
    return {"clean": list(clean), "edited": list(edited)}


@trace("an edit installed with model.edit(): its saves come back on plain outputs", batched=True)
def installed_edit(model: Any, ctx: Context) -> dict[str, Any]:
    early, late, questions = ctx.early, ctx.late, ctx.questions[:2]
    with model.edit() as (tracer, edit):
        read = nnsight.save([])
        for _ in tracer.all():
            h = model.model.layers[early].mlp.output
            model.model.layers[late].mlp.output = h + 0
            read.append(model.model.layers[late].mlp.output[-1].clone())
    try:
        outputs = model.generate(list(questions), temperature=0.0, max_tokens=3, ignore_eos=True)
    finally:
        edit.clear()
    after = model.generate(list(questions), temperature=0.0, max_tokens=3, ignore_eos=True)
    return {
        "saves": [{name: list(value) for name, value in out.saves.items()} for out in outputs],
        "token_ids": [list(out.outputs[0].token_ids) for out in outputs],
        "after": [list(out.outputs[0].token_ids) for out in after],
        "bare": [getattr(out, "saves", None) for out in after],
    }


@trace("an installed edit and a trace on one request, both with saves")
def edit_under_trace(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.edit() as (_, edit):
        model.model.layers[early].mlp.output[:] = 0
        stamp = model.model.layers[late].mlp.output[-1].clone().save()  # noqa: F841
    try:
        with model.trace(ctx.prompt, temperature=0.0, max_tokens=2) as tracer:
            seen = model.model.layers[early].mlp.output.clone().save()
            logits = model.logits.clone().save()
            finished = tracer.result.save()
    finally:
        edit.clear()
    return {
        "seen": seen,
        "logits": logits,
        "saves": {k: v for k, v in finished.saves.items() if k == "stamp"},
    }
