"""Benchmarks. All of them run this model on this prompt, where they run a model."""

from __future__ import annotations

from typing import Any

#: A random Llama of which a step costs tens of milliseconds on two cores.
MODEL: dict[str, Any] = {"layers": 24, "hidden": 512, "heads": 8}
#: Token ids.
PROMPT = list(range(40, 72))
#: For a second after a step the ranks of a vLLM engine look for the next one without a pause, on cores
#: that another engine may need: two engines take turns this far apart.
TURN_S = 1.2
