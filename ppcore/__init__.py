"""Pipeline parallelism that nnsight traces cannot observe: the protocol's pure core.

This package imports the standard library only. ``ppcore.runtime`` runs it under nnsight and torch,
``ppcore.vllm`` inside a vLLM engine, ``ppsim`` under a deterministic simulator.
"""

from __future__ import annotations

from .core import Available, Core, Decision, Verdict
from .errors import PPError
from .messages import Key, Message, Worker, parse, spell
from .schedule import Place, Schedule

__version__ = "0.1.0"

__all__ = [
    "Available",
    "Core",
    "Decision",
    "Key",
    "Message",
    "PPError",
    "Place",
    "Schedule",
    "Verdict",
    "Worker",
    "__version__",
    "parse",
    "spell",
]
