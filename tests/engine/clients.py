"""How prompts come in and answers go out. Run in the engine's client process."""

from __future__ import annotations

import asyncio
from typing import Any

import nnsight

from ppcore.vllm.compare import plain
from ppcore.vllm.traces.perform import at_rest
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


def streams(model: Any) -> dict[str, Any]:
    """On an engine with ``mode="async"``: streams, one of which the client leaves, and what is left."""

    def begin(tokens: int) -> Any:
        with model.trace(SHORT, temperature=0.0, max_tokens=tokens, ignore_eos=True) as tracer:
            kept = nnsight.save([])
            for _ in tracer.iter[:]:
                model.model.layers[LATE].mlp.output = model.model.layers[EARLY].mlp.output * 2
                kept.append(model.logits.clone())
        return tracer.backend

    async def finish(backend: Any) -> dict[str, Any]:
        seen = []
        async for output in backend:
            seen.append(len(output.outputs[0].token_ids))
        return {"seen": seen, "saves": plain(output.saves)}

    async def leave(backend: Any) -> int:
        """Take two outputs of a request that would run on for long, and disconnect."""
        stream = aiter(backend)
        for _ in range(2):
            output = await anext(stream)
        await stream.aclose()
        return len(output.outputs[0].token_ids)

    async def run() -> dict[str, Any]:
        alone = await finish(begin(4))
        left, first, second = await asyncio.gather(
            leave(begin(400)), finish(begin(4)), finish(begin(6))
        )
        again = await finish(begin(4))
        held = at_rest(await model.pp_status())
        return {
            "alone": alone,
            "left": left,
            "first": first,
            "second": second,
            "again": again,
            "held": held,
        }

    return asyncio.run(run())
