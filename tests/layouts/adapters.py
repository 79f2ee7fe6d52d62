"""Requests that carry a LoRA adapter: one of random weights, and traces that use it.

vLLM puts a layer of its own around each linear one, so that a module's output is the adapted value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nnsight
import torch

from tests.layouts.anatomy import EARLY, LATE, LAYERS
from tests.layouts.probes import PROMPT, copied, stream

#: Rank and scale of the adapter: its part of a projection is about as large as the projection itself.
RANK, SCALE = 8, 1.0
HIDDEN = 64
#: Engine arguments for it.
SETTINGS = {"enable_lora": True, "max_lora_rank": RANK}


def random_adapter(folder: Path) -> Path:
    """An adapter, in PEFT's format, of the attention of every layer of a llama of `HIDDEN`."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    targets = ("q_proj", "v_proj", "o_proj")
    for layer in range(LAYERS):
        for name in targets:
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down, up = (RANK, HIDDEN), (HIDDEN, RANK)
            for part, shape in (("lora_A", down), ("lora_B", up)):
                drawn = torch.randn(shape, generator=generator) * SCALE / shape[1] ** 0.5
                weights[f"{stem}.{part}.weight"] = drawn
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps({"bias": "none", **config}))
    return folder


def traces(model: Any, folder: str) -> dict[str, Any]:
    """Without the adapter, then with it: reads, writes, the lens, a loop that carries a late value; tokens."""
    from vllm.lora.request import LoRARequest

    found: dict[str, Any] = {}
    # vLLM on a CPU goes on with an adapter for a request without one that comes later: without, first.
    for name, adapter in (("plain", None), ("adapted", LoRARequest("random", 1, folder))):
        settings = {"temperature": 0.0, "ignore_eos": True, "lora_request": adapter}
        with model.trace(PROMPT, max_tokens=3, **settings) as tracer:
            kept = nnsight.save([])
            carried = None
            for _ in tracer.iter[:]:
                kept.append(copied(model.model.layers[EARLY].self_attn.qkv_proj.output))
                if carried is not None:
                    model.model.layers[EARLY].mlp.output[..., -1, :] += carried
                early = model.model.layers[EARLY].mlp.output.clone()
                kept.append(copied(model.model.layers[LATE].self_attn.o_proj.output))
                late = model.model.layers[LATE].mlp.output
                model.model.layers[LATE].mlp.output = late + early * 0.5
                row = stream(model.model.layers[LATE].output)[-1:].clone()
                carried = row[0] * 0.1 if float(row.norm()) > 1e-3 else None
                lens = model.logits_processor(model.lm_head, model.model.norm(row))
                kept.append((lens, model.logits.clone(), model.samples.item()))
        found[name] = list(kept)
        (output,) = model.generate(
            [PROMPT], temperature=0.0, max_tokens=6, ignore_eos=True, lora_request=adapter
        )
        found[f"{name} tokens"] = list(output.outputs[0].token_ids)
    return found
