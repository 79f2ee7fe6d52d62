"""The experiments of interpretability: activation patching and the logit lens."""

from __future__ import annotations

from typing import Any

import nnsight

from ppcore.vllm.traces import Context, trace


@trace("one prompt's residual stream is patched into another, and the answer changes")
def patching(model: Any, ctx: Context) -> dict[str, Any]:
    asked, donor = ctx.pair
    a, b = (ctx.tokenizer.encode(text) for text in ctx.pair)
    differing = [n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    # The word that differs, while it is one token; the last position carries what was made of it.
    word = differing[0] if len(a) == len(b) and len(differing) == 1 else -1
    sites = [
        (ctx.early, word),
        (ctx.layer(0.5), word),
        (ctx.late, word),
        (ctx.early, -1),
        (ctx.late, -1),
        (ctx.n_layers - 1, -1),
    ]
    layers = sorted({layer for layer, _ in sites})
    with model.trace(donor, temperature=0.0, max_tokens=1):
        given = nnsight.save({})
        for i in layers:
            given[i] = [o.clone() for o in model.model.layers[i].output]
        theirs = model.samples.clone().save()
    with model.trace(asked, temperature=0.0, max_tokens=1):
        own = model.samples.clone().save()
    patched = []
    for i, at in sites:
        hidden, residual = (rows[at] for rows in given[i])
        with model.trace(asked, temperature=0.0, max_tokens=1):
            served = model.model.layers[i].output
            served[0][at] = hidden
            served[1][at] = residual
            token = model.samples.clone().save()
        patched.append(int(token))
    return {
        "given": given,
        "own": int(own),
        "theirs": int(theirs),
        "patched": patched,
        "changed": [token != int(own) for token in patched],
        "text": [
            f"{asked!r} -> {ctx.word(own)!r}; {donor!r} -> {ctx.word(theirs)!r}",
            *(
                f"patched at layer {i}, token {at}: {ctx.word(token)!r}"
                for (i, at), token in zip(sites, patched, strict=True)
            ),
        ],
    }


@trace("the token that each layer would say, through the final norm and the head")
def logit_lens(model: Any, ctx: Context) -> dict[str, Any]:
    n_layers = ctx.n_layers
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        said = nnsight.save([])
        for i in range(n_layers):
            out = model.model.layers[i].output
            h = (out[0] + out[1])[-1:].clone()
            said.append(model.logits_processor(model.lm_head, model.model.norm(h)).argmax(-1))
    tokens = [int(t) for t in said]
    words = [f"{i}:{ctx.word(token)!r}" for i, token in enumerate(tokens)]
    return {
        "tokens": tokens,
        "text": [" ".join(words[n : n + 10]) for n in range(0, len(words), 10)],
    }


@trace("an early value is edited where the lens finds another token in it than the model will say")
def steering_by_lens(model: Any, ctx: Context) -> dict[str, Any]:
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        unsteered = model.samples.clone().save()
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        steered, logits = nnsight.save([]), nnsight.save([])
        for step in tracer.iter[:4]:
            out = model.model.layers[ctx.early].output
            h = model.model.norm((out[0] + out[1])[-1:])
            if model.logits_processor(model.lm_head, h).argmax() != int(unsteered):
                out[0][-1] *= 2
                steered.append(step)
            logits.append(model.logits.clone())
    return {"steered": list(steered), "logits": list(logits)}


@trace("what each half's MLP makes of the other half's value is written back")
def exchanged_mlps(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        logits = nnsight.save([])
        for _ in tracer.iter[:3]:
            for mine, other in ((early, late), (late, early)):
                out = model.model.layers[mine].mlp.output
                model.model.layers[mine].mlp.output = model.model.layers[other].mlp(out) * 0.5 + out
            logits.append(model.logits.clone())
    return {"logits": list(logits)}


@trace("every layer's MLP, one patched invoke per layer, in one trace", batched=True)
def patch_sweep(model: Any, ctx: Context) -> dict[str, Any]:
    layers = sorted({ctx.layer(k / 6) for k in range(7)})
    with model.trace(ctx.other, temperature=0.0, max_tokens=1):
        donor = nnsight.save({})
        for i in layers:
            donor[i] = model.model.layers[i].mlp.output[-1].clone()
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        effects = nnsight.save([None] * len(layers))
        for n, i in enumerate(layers):
            with tracer.invoke(ctx.prompt):
                model.model.layers[i].mlp.output[-1] = donor[i]
                effects[n] = model.logits.clone()
    return {"effects": list(effects)}


@trace("attention heads of either half are silenced before the output projection")
def head_ablation(model: Any, ctx: Context) -> dict[str, Any]:
    layers = (ctx.early, ctx.late)
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        kept = nnsight.save([])
        for i in layers:
            heads = model.model.layers[i].self_attn.o_proj.input
            kept.append(heads.clone())
            heads[:, : heads.shape[-1] // 4] = 0
        logits = model.logits.clone().save()
    return {"heads": list(kept), "logits": logits}
