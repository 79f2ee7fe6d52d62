"""A model whose arithmetic is exact: whole numbers below a prime, kept in floats.

What the core simulator's terms are to it, these numbers are here: a value that was read before an edit
and not after it, or of another turn, differs, and no tolerance hides it. The shape is that of vLLM's
models: layers that take and return hidden states and a residual, an embedding on the first stage, a
norm and a head on the last, a module that every stage has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ppcore.runtime import stubs

from .tree import Missing, keep

HIDDEN, PRIME = 4, 997


def _numbers(*start: int) -> nn.Parameter:
    values = torch.tensor([start[0] + start[1] * i for i in range(HIDDEN)], dtype=torch.float64)
    return nn.Parameter(values, requires_grad=False)


class Embed(nn.Module):
    """Tokens' rows; called by a block on hidden states, it treats these alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _numbers(3, 5)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if positions is None:
            return (ids * self.weight + 1) % PRIME
        return (ids[:, None] * self.weight + positions[:, None] * 11.0 + 1) % PRIME


class Affine(nn.Module):
    """``x * weight + bias``, one factor for each column."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = _numbers(2 * number + 3, 7)
        self.bias = _numbers(number + 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight + self.bias) % PRIME


class Layer(nn.Module):
    """A layer.

    Args:
        number: of the layer, which its arithmetic depends on.
        shared: a module that the first layer of every stage has, one object for all of them.

    ``ghost`` is a module that no forward visits.
    """

    def __init__(self, number: int, shared: nn.Module | None) -> None:
        super().__init__()
        self.shared = shared
        self.weight = _numbers(number + 2, 3)
        self.mlp = Affine(number)
        self.ghost = Affine(number)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.shared is not None:
            x = self.shared(x)
        return self.mlp(x + residual + self.weight), (residual + x) % PRIME


class Decoder(nn.Module):
    def __init__(self, stages: int, layers: int, shared: bool) -> None:
        super().__init__()
        self.per_stage = layers
        self.embed = Embed()
        common = Affine(211) if shared else None
        self.layers = nn.ModuleList(
            Layer(number, None if number % layers else common) for number in range(stages * layers)
        )
        self.norm = Affine(101)
        self.first = self.last = True

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, passed: Any) -> Any:
        if self.first:
            x = self.embed(ids, positions)
            residual = torch.zeros_like(x)
        else:
            x, residual = passed
        for layer in self.layers:
            if isinstance(layer, Missing) or stubs.is_stub(layer):
                continue
            # No two locations share memory: what one layer returns and the next one takes would be one
            # tensor on one rank and two where a stage ends in between.
            x, residual = layer(x.clone(), residual.clone())
        return self.norm(x + residual) if self.last else (x, residual)


class Exact(nn.Module):
    """The whole model; `keep` drops what is not of a stage.

    Args:
        stages: how many stages it will be split into.
        layers: of each stage.
        shared: whether there is a module that every stage visits, once.
    """

    def __init__(self, stages: int, layers: int, shared: bool = False) -> None:
        super().__init__()
        self.model = Decoder(stages, layers, shared)
        self.lm_head = Affine(307)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, passed: Any) -> Any:
        return self.model(ids, positions, passed)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits.sum(-1, keepdim=True) % PRIME).to(torch.int32)

    def passed(self, tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(tokens, HIDDEN, dtype=torch.float64) for _ in range(2))

    def keep(self, stage: int, stages: int) -> None:
        keep(self, stage, stages, lambda layer: layer // self.model.per_stage)
