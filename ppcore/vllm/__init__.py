"""nnsight's vLLM model, on an engine that may be split into pipeline stages.

    from ppcore.vllm import VLLM

is a drop-in for ``nnsight.modeling.vllm.VLLM``: the same arguments, the same traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import VLLM

__all__ = ["VLLM"]


def __getattr__(name: str) -> Any:
    if name == "VLLM":
        from .model import VLLM

        return VLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
