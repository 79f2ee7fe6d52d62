"""Benchmarks. All of them run this model on this prompt, where they run a model."""

from __future__ import annotations

from typing import Any

#: A random Llama of which a step costs tens of milliseconds on two cores.
MODEL: dict[str, Any] = {"layers": 24, "hidden": 512, "heads": 8}
#: Token ids.
PROMPT = list(range(40, 72))
