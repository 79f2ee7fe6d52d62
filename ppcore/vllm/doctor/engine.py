"""Which classes an engine would run, asked of vLLM in a process of its own.

Importing vLLM takes seconds, talks on the terminal, and where libraries do not fit together may end
the process. So a child imports it, as an engine would, and this process reads one line of it.
"""

from __future__ import annotations

import json
import subprocess
import sys

from .finding import Finding, note, ok, problem

_MARK = "ppcore-doctor "

CHILD = f"""
import importlib, json
from ppcore.vllm import platform
from ppcore.vllm.engine import PPLLMEngine
module, _, name = platform.worker_class().rpartition(".")
worker = getattr(importlib.import_module(module), name)
import torch
print("{_MARK}" + json.dumps({{
    "platform": "cpu" if platform.is_cpu() else "cuda",
    "devices": torch.cuda.device_count(),
    "engine": PPLLMEngine.__module__ + "." + PPLLMEngine.__qualname__,
    "worker": module + "." + name,
    "runner": worker.pipeline_runner.__module__ + "." + worker.pipeline_runner.__qualname__,
}}))
"""


def engine(ranks: int, *, timeout_s: float = 180.0, child: str = CHILD) -> Finding:
    """What `ppcore.vllm.VLLM` would start on so many ranks.

    Args:
        child: the program that the child runs; it prints the line that this process reads.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", child],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        said = f"unknown: importing the engine's classes did not end within {timeout_s:g} s"
        return note("engine", said, "run it again when the machine is less busy")
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return problem(
            "engine",
            f"importing the engine's classes fails: {errors[-1].strip()}",
            "docs/symptoms.md has the common causes; `python -c 'import ppcore.vllm.model'` shows all",
        )
    found = json.loads(lines[-1].removeprefix(_MARK))
    said = f"{found['platform']}: {found['engine']}, {found['worker']}, {found['runner']}"
    if found["platform"] != "cpu" and found["devices"] < ranks:
        return problem(
            "engine",
            f"{said}; {found['devices']} CUDA devices for {ranks} ranks",
            "each rank needs a device: use fewer ranks, or install the CPU packages",
            **found,
        )
    return ok("engine", said, **found)
