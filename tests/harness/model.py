"""A small model in the shape of vLLM's: fused norms that write in place, layers that return tuples.

Every rank holds a slice of it and placeholders for the rest; see `ppsim.real.tree`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ppcore.runtime import stubs
from ppsim.real.tree import Missing, keep

HIDDEN, VOCABULARY, LAYERS = 16, 50, 4


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.rand(HIDDEN))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return self._normed(x)
        residual.add_(x)  # like the fused kernel: both buffers are overwritten
        x.copy_(self._normed(residual))
        return x, residual

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Rope(nn.Module):
    """One object, shared by all layers of a stage."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(positions.to(x.dtype))[:, None] / 10


class Attention(nn.Module):
    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(HIDDEN, HIDDEN)
        self.rope = rope

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.rope(positions, self.qkv(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.input_norm = Norm()
        self.attention = Attention(rope)
        self.norm = Norm()
        self.mlp = Mlp()

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = x.clone()
            x = self.input_norm(x)
        else:
            x, residual = self.input_norm(x, residual)
        x = self.attention(positions, x)
        x, residual = self.norm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rope = Rope()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(rope) for _ in range(LAYERS)])
        self.norm = Norm()
        self.first = self.last = True

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, passed: tuple | None) -> Any:
        x, residual = (self.embed(ids), None) if self.first else passed
        for layer in self.layers:
            if not isinstance(layer, Missing) and not stubs.is_stub(layer):
                x, residual = layer(positions, x, residual)
        if not self.last:
            return x, residual
        return self.norm(x, residual)[0]


class Causal(nn.Module):
    """The whole model; `keep` drops what is not of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, passed: tuple | None) -> Any:
        return self.model(ids, positions, passed)

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1, keepdim=True).to(torch.int32)

    def passed(self, tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(tokens, HIDDEN, dtype=torch.float64) for _ in range(2))

    def keep(self, stage: int, stages: int) -> None:
        keep(self, stage, stages, lambda layer: layer * stages // LAYERS)


def build() -> Causal:
    """The whole model with the weights that every rank and the reference agree on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Causal().double().requires_grad_(False)
