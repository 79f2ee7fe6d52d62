"""What untraced requests cost on our engine, against vLLM's own worker at the same layout.

Both engines are warm; they take turns, pair by pair, and each pair gives one ratio. The figure is the
median of the ratios, with their quartiles. Runs are short and many: on a machine whose ranks have all of
its cores, what else runs falls on single pairs. Both must give the same tokens.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from . import MODEL, PROMPT
from .turns import turns


def _serve(pipe: Connection, kind: str, checkpoint: str, stages: int) -> None:
    settings: dict[str, Any] = {
        "pipeline_parallel_size": stages,
        "max_model_len": 512,
        "dtype": "float32",
        "disable_log_stats": True,
    }
    if kind == "ours":
        from ppcore.vllm import VLLM

        model = VLLM(checkpoint, dispatch=True, **settings)
        llm = model.vllm_entrypoint
    else:
        import os

        from ppcore.vllm.platform import engine_environment

        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        from vllm import LLM

        with engine_environment(stages, sized=False):
            llm = LLM(
                checkpoint,
                worker_cls="bench.plain.PlainCPUWorker",
                enforce_eager=True,
                enable_prefix_caching=False,
                enable_chunked_prefill=False,
                **settings,
            )
    from vllm import SamplingParams

    pipe.send("ready")
    while True:
        tokens = pipe.recv()
        if tokens is None:
            # A child of multiprocessing ends without its exit handlers: its engine would outlive it.
            llm.llm_engine.engine_core.shutdown()
            return
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        pipe.send((seconds, list(outputs[0].outputs[0].token_ids)))


def run(*, stages: int = 2, tokens: int = 16, pairs: int = 45) -> dict[str, Any]:
    """Measure; the result is plain data.

    Returns:
        ``ratio`` (ours / vLLM's, median), ``quartiles`` of it, ``seconds`` (medians), ``same_tokens``.
    """
    from ppcore.vllm.checkpoints import random_llama

    checkpoint = str(random_llama(**MODEL))
    context = multiprocessing.get_context("spawn")
    engines: dict[str, tuple[Any, Connection]] = {}
    try:
        for kind in ("ours", "vllm"):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, kind, checkpoint, stages))
            process.start()
            engines[kind] = (process, mine)
            if not mine.poll(240) or mine.recv() != "ready":
                raise RuntimeError(f"the engine {kind!r} did not start")

        seconds: dict[str, list[float]] = {kind: [] for kind in engines}
        answers: dict[str, list[list[int]]] = {kind: [] for kind in engines}
        for kind, counts in turns(engines, pairs, warm_up=1):
            pipe = engines[kind][1]
            pipe.send(tokens)
            took, answer = pipe.recv()
            if counts:
                seconds[kind].append(took)
                answers[kind].append(answer)
    finally:
        for process, pipe in engines.values():
            pipe.send(None)
            process.join(60)
            if process.is_alive():
                process.kill()
    ratios = [ours / vllm for ours, vllm in zip(seconds["ours"], seconds["vllm"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "stages": stages,
        "tokens": tokens,
        "pairs": pairs,
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "seconds": {kind: round(statistics.median(took), 4) for kind, took in seconds.items()},
        "same_tokens": answers["ours"] == answers["vllm"],
    }
