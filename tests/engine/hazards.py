"""Blocks that are wrong, and requests that end in unusual ways. Run in the engine's client process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import nnsight
import torch

from ppcore.vllm.traces import describe_error
from tests.engine.probes import EARLY, LATE, SHORT


def next_token(model: Any) -> int:
    """What an ordinary trace gives."""
    with model.trace(SHORT, temperature=0.0, max_tokens=1):
        token = model.samples.clone().save()
    return int(token)


def endless(model: Any) -> dict[str, Any]:
    error = None
    try:
        with model.trace(SHORT, temperature=0.0, max_tokens=2):
            size = model.model.layers[EARLY].mlp.output.shape[0]
            while True:
                size += 1
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "next": next_token(model)}


def branches_by_rank(model: Any) -> dict[str, Any]:
    """A block that reads one location where the last stage is, and another where it is not."""
    error = ""
    try:
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            from vllm.distributed.parallel_state import get_pp_group

            if get_pp_group().is_last_rank:
                h = model.model.layers[EARLY].mlp.output
            else:
                h = model.model.layers[EARLY].mlp.input
            model.model.layers[LATE].mlp.output[-1] += h[-1]
            model.logits.save()
    except RuntimeError as raised:
        error = str(raised)
    return {"error": error, "next": next_token(model)}


def replaces_wrongly(model: Any, layer: int, what: str) -> dict[str, Any]:
    """A replacement of another shape, or another dtype."""
    error = None
    try:
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            h = model.model.layers[layer].mlp.output
            wrong = {"shape": h[:, :5], "rows": h[:1, :5], "dtype": h.to(torch.float64)}
            model.model.layers[layer].mlp.output = wrong[what]
            model.logits.save()
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "next": next_token(model)}


def skips_the_decoder(model: Any) -> dict[str, Any]:
    error = None
    try:
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            model.model.skip(torch.zeros(1))
            model.logits.save()
    except RuntimeError as raised:
        error = describe_error(raised)
    return {"error": error, "next": next_token(model)}


def saves_what_cannot_be_pickled(model: Any) -> dict[str, Any]:
    error = ""
    try:
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            h = model.model.layers[LATE].mlp.output.clone()
            kept = nnsight.save([h, threading.Lock()])
        del kept
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error.splitlines()[0] if error else "", "next": next_token(model)}


def kill_a_rank(model: Any, stage: int, flag: str) -> dict[str, Any]:
    """Kill a rank in the middle of a trace: what its client is told, and after how many seconds."""
    (pid,) = [rank["pid"] for rank in model.pp_status() if rank["stage"] == stage]
    killed: list[float] = []

    def kill() -> None:
        while not Path(flag).exists():
            time.sleep(0.01)
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    error = ""
    try:
        with model.trace(SHORT, temperature=0.0, max_tokens=400, ignore_eos=True) as tracer:
            for step in tracer.iter[:]:
                h = model.model.layers[EARLY].mlp.output[-1].clone()
                model.model.layers[LATE].mlp.output[-1] += h
                if step == 5:
                    open(flag, "w").close()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    killer.join()
    return {"error": error, "seconds": time.monotonic() - killed[0], "pid": pid}


def several_sequences(model: Any) -> dict[str, Any]:
    """``n=2``: a block for each sequence, whose saves come back for each."""
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 3, "ignore_eos": True}
    with model.trace(SHORT, n=2, **settings) as tracer:
        tokens = nnsight.save([])
        for _ in tracer.iter[:3]:
            h = model.model.layers[LATE].mlp.output[-1]
            tokens.append([float(h.norm()), model.samples.item()])
        finished = tracer.result.save()
    return {
        "saved": [list(one) for one in tokens],
        "token_ids": [list(answer.token_ids) for answer in finished.outputs],
    }


def one_token(model: Any) -> dict[str, Any]:
    with model.trace(SHORT, temperature=0.0, max_tokens=1) as tracer:
        seen = nnsight.save([])
        for step in tracer.iter[:1]:
            seen.append([step, float(model.model.layers[LATE].mlp.output[-1].norm())])
        finished = tracer.result.save()
    answer = finished.outputs[0]
    return {
        "seen": list(seen), "token_ids": list(answer.token_ids), "why": answer.finish_reason
    }  # fmt: skip


def stopped_by_a_word(model: Any) -> dict[str, Any]:
    """A request that ends by a stop string, traced in every step, and what its client gets."""
    settings = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    with model.trace(SHORT, **settings) as tracer:
        finished = tracer.result.save()
    word = _first_word(model, list(finished.outputs[0].token_ids))
    with model.trace(SHORT, stop=[word], **settings) as tracer:
        seen = nnsight.save([])
        for step in tracer.iter[:]:
            h = model.model.layers[LATE].mlp.output[-1].clone()
            seen.append([step, float(h.norm()), model.samples.item()])
    with model.trace(SHORT, stop=[word], **settings) as tracer:
        finished = tracer.result.save()
    answer = finished.outputs[0]
    return {
        "seen": list(seen), "token_ids": list(answer.token_ids), "why": answer.finish_reason
    }  # fmt: skip


def _first_word(model: Any, tokens: list[int]) -> str:
    """The first text of a token that nothing before it has, from the second token on."""
    for n in range(1, len(tokens)):
        word = str(model.tokenizer.decode([tokens[n]]))
        if word.isascii() and word.isprintable() and word not in model.tokenizer.decode(tokens[:n]):
            return word
    raise AssertionError(f"no word to stop at among {tokens}")


def draws_the_end(model: Any, ignore_eos: bool) -> dict[str, Any]:
    """The second token is replaced by the end of the sequence."""
    end = int(model.tokenizer.eos_token_id)
    with model.trace(SHORT, temperature=0.0, max_tokens=5, ignore_eos=ignore_eos) as tracer:
        early = nnsight.save([])
        for _ in tracer.iter[1]:
            early.append(float(model.model.layers[EARLY].mlp.output[-1].norm()))
            model.samples = torch.full_like(model.samples, end)
        finished = tracer.result.save()
    return {"early": list(early), "token_ids": list(finished.outputs[0].token_ids)}


def many_at_once(model: Any, count: int) -> dict[str, Any]:
    with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        rows = nnsight.save([None] * count)
        for n in range(count):
            with tracer.invoke(f"{SHORT} {n}"):
                mine = []
                for _ in tracer.iter[:3]:
                    h = model.model.layers[EARLY].mlp.output[-1].clone()
                    model.model.layers[LATE].mlp.output[-1] += h * (n + 1)
                    mine.append(model.samples.item())
                rows[n] = mine
    return {"rows": list(rows)}
