"""Traces that read: layers, inner modules, arguments, operations, parameters, caches, results."""

from __future__ import annotations

from typing import Any

import nnsight
import torch

from ppcore.vllm.traces import Context, trace


@trace("hidden state, residual and logits, from the first layer to the last")
def reads_each_stage(model: Any, ctx: Context) -> dict[str, Any]:
    quarters = ctx.quarters
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        streams = nnsight.save([])
        for i in quarters:
            out = model.model.layers[i].output
            streams.append((out[0] + out[1]).clone())
        normed = model.model.norm.output[0].clone().save()
        logits = model.logits.clone().save()
        token = model.samples.clone().save()
    return {
        "streams": list(streams),
        "normed": normed,
        "logits": logits,
        "text": [f"next token {ctx.word(token.flatten()[0])!r}"],
    }


@trace(
    "clones, rows and norms are saved, nothing is looked at: no value crosses", moves_nothing=True
)
def saves_only(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3) as tracer:
        norms = nnsight.save([])
        for _ in tracer.iter[:3]:
            first = model.model.layers[early].output
            norms.append(first[0].float().norm())
            last_row = first[1][-1].clone().save()
            both = nnsight.save(tuple(o.clone() for o in model.model.layers[late].output))
            logits = model.logits.clone().save()
    return {"norms": list(norms), "last_row": last_row, "both": list(both), "logits": logits}


@trace("projections, attention and norms inside a layer of either half")
def reads_inside_layers(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        kept = nnsight.save({})
        for i in (early, late):
            layer = model.model.layers[i]
            kept[f"{i}.qkv"] = layer.self_attn.qkv_proj.output[0].clone()
            kept[f"{i}.attn"] = layer.self_attn.attn.output.clone()
            kept[f"{i}.o"] = layer.self_attn.o_proj.output[0].clone()
            kept[f"{i}.norm"] = layer.post_attention_layernorm.output[0].clone()
            kept[f"{i}.gate_up"] = layer.mlp.gate_up_proj.output[0].clone()
            kept[f"{i}.down"] = layer.mlp.down_proj.output[0].clone()
    return dict(kept)


@trace("what modules of either half are called with: .input and .inputs")
def reads_inputs(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        kept = nnsight.save([])
        for i in (early, late):
            args, kwargs = model.model.layers[i].inputs
            kept.append([a.clone() for a in args])
            kept.append(sorted(kwargs))
            kept.append(model.model.layers[i].mlp.input.clone())
        head_in = model.model.norm.input.clone().save()
    return {"kept": list(kept), "head_in": head_in}


@trace("operations inside forward(), through .source, on either half")
def source_operations(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    # Touched outside first: instrumentation installed by a first touch inside a loop starts a visit late.
    for i in (early, late):
        _ = model.model.layers[i].self_attn.source
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=2):
        q, k, v = model.model.layers[early].self_attn.source.qkv_split_0.output
        early_q = q.clone().save()
        rotated = (
            model.model.layers[early].self_attn.source.self_rotary_emb_0.output[1].clone().save()
        )
        late_out = model.model.layers[late].self_attn.source.self_attn_0.output
        model.model.layers[late].self_attn.source.self_attn_0.output = late_out * 0.5
        logits = model.logits.clone().save()
    return {"early_q": early_q, "rotated": rotated, "logits": logits}


@trace("a parameter of the other half is used in a block, and a module of it is called")
def calls_and_parameters(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        h = model.model.layers[early].mlp.output.clone()
        through = model.model.layers[late].mlp(h).clone().save()
        scaled = (h * model.model.norm.weight).clone().save()
        early_weight = model.model.layers[early].input_layernorm.weight.clone().save()
        logits = model.logits.clone().save()
    return {"through": through, "scaled": scaled, "early_weight": early_weight, "logits": logits}


@trace("tracer.cache() of chosen modules of both halves, with inputs, over three steps")
def cache_modules(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        cache = tracer.cache(
            modules=[model.model.layers[early].mlp, model.model.layers[late].mlp, model.model.norm],
            include_inputs=True,
        )
    return {
        "keys": sorted(cache.keys()),
        **{key: _entry(cache[key]) for key in sorted(cache.keys())},
    }


@trace("tracer.cache() of the whole tree, after an edit")
def cache_everything(model: Any, ctx: Context) -> dict[str, Any]:
    early = ctx.early
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1) as tracer:
        cache = tracer.cache()
        model.model.layers[early].mlp.output[:] = 0
    paths = [f"model.model.layers.{i}.mlp" for i in ctx.quarters]
    return {"keys": sorted(cache.keys()), **{path: cache[path].output for path in paths}}


def _entry(entry: Any) -> dict[str, Any]:
    return {"visits": len(entry), "output": entry.output, "inputs": entry.inputs}


@trace("tracer.result after reads on both halves")
def result(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=8) as tracer:
        first = model.model.layers[early].mlp.output[-1].clone().save()
        second = model.model.layers[late].mlp.output[-1].clone().save()
        finished = tracer.result.save()
    answer = finished.outputs[0]
    return {
        "first": first,
        "second": second,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "text": [f"{ctx.prompt}{answer.text}"],
    }


@trace("one value made of both halves: early + late, kept and looked at")
def derived_from_both(model: Any, ctx: Context) -> dict[str, Any]:
    early, late = ctx.early, ctx.late
    with model.trace(ctx.prompt, temperature=0.0, max_tokens=1):
        a = model.model.layers[early].mlp.output.clone()
        b = model.model.layers[late].mlp.output.clone()
        total = (a + b).save()
        cosine = torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).save()
        stacked = torch.stack([a[-1], b[-1]]).save()
        gap = float((b - a).norm())
        kept = nnsight.save([gap])
        model.model.layers[-1].mlp.output[-1] += (a + b)[-1]
        logits = model.logits.clone().save()
    return {"total": total, "cosine": cosine, "stacked": stacked, "gap": kept[0], "logits": logits}
