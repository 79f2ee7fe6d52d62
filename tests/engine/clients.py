"""How prompts come in. Run in the engine's client process."""

from __future__ import annotations

from typing import Any

import nnsight

from tests.engine.probes import EARLY, LATE, SHORT


def prompt_forms(model: Any) -> dict[str, Any]:
    """The same prompt as text, as token ids, as a tokenizer's output, and as vLLM's two dicts."""
    ids = model.tokenizer.encode(SHORT)
    forms = {
        "text": SHORT,
        "ids": ids,
        "tokenizer": model.tokenizer(SHORT, return_tensors="pt"),
        "tokens prompt": {"prompt_token_ids": ids},
        "text prompt": {"prompt": SHORT},
    }
    found: dict[str, Any] = {}
    for name, prompt in forms.items():
        with model.trace(prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            kept = nnsight.save([])
            for _ in tracer.iter[:]:
                model.model.layers[LATE].mlp.output = model.model.layers[EARLY].mlp.output * 2
                kept.append(model.logits.clone())
        found[name] = list(kept)
    return found
