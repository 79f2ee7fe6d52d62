"""What a plain module needs to be traced like a model of the engine, whole or in stages.

A *model* here is a module whose ``forward(ids, positions, passed)`` takes one step's tokens, flattened
over the requests, and what the stage before handed on; on the last stage it returns hidden states,
before it the tuple to hand on. It has ``keep(stage, stages)``, which drops what is not of a stage,
``passed(tokens)``, the shape of what is handed on, ``compute_logits(hidden)`` and ``sample(logits)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from nnsight.intervention.batching import Batcher
from nnsight.intervention.eproperty import eproperty
from torch import nn

from ppcore.runtime import stubs
from ppcore.runtime.envoy import PPEnvoy

#: The path of the model in every tree.
ROOT = "model"


class Model(Protocol):
    """See the module docstring."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, passed: Any) -> Any: ...
    def keep(self, stage: int, stages: int) -> None: ...
    def passed(self, tokens: int) -> tuple[torch.Tensor, ...]: ...
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def sample(self, logits: torch.Tensor) -> torch.Tensor: ...


class Missing(nn.Module):
    """The engine's placeholder for a module of another stage."""

    def forward(self, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args


def keep(model: Any, stage: int, stages: int, stage_of: Callable[[int], int]) -> None:
    """Put placeholders where a causal model has what is not of a stage.

    Args:
        stage_of: the number of a layer -> its stage.
    """
    decoder = model.model
    decoder.first, decoder.last = stage == 0, stage == stages - 1
    for number in range(len(decoder.layers)):
        if stage_of(number) != stage:
            decoder.layers[number] = Missing()
    if not decoder.first:
        decoder.embed = Missing()
    if not decoder.last:
        decoder.norm = Missing()
        model.lm_head = Missing()


class Spans(Batcher):
    """Scopes a worker to its own tokens of a step, whether it is alone in it or not."""

    @property
    def batching(self) -> bool:
        return True


class Tree(PPEnvoy):
    """The envoy tree of a model, with the run-level values that the engine's tree has too."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, path=ROOT, envoys={nn.Module: PPEnvoy}, **kwargs)

    @eproperty(description="this step's logits")
    def logits(self, value: Any) -> Any:
        """One row for each request."""
        return value

    @eproperty(description="this step's token")
    def samples(self, value: Any) -> Any:
        """One row for each request."""
        return value

    def persistent(self) -> dict[str, Any]:
        """What a block's references to the model resolve to on this rank."""
        objects: dict[str, Any] = {"Interleaver": self.interleaver}
        for path, module in stubs.modules(self._module, ROOT):
            objects.setdefault(f"Module:{path}", module)
        return objects
