"""What a module does between the columns of its stage, left out where only shapes are asked for.

The ranks of a stage exchange data inside of modules, in the order of their forwards. A thread beside the
forward that runs a module to see what its result looks like (see `ppcore.runtime.calls`) must not take
part in that: its exchange could meet another one of the neighbour's, and both would get wrong values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def shapes_only(group: Any, aside: Callable[[], bool]) -> None:
    """Let threads that are ``aside`` run modules alone: what they exchange is of the right shape, no more.

    Args:
        group: vLLM's ``GroupCoordinator`` of a stage's columns.
        aside: whether the calling thread is.
    """
    size, rank = group.world_size, group.rank_in_group

    def all_reduce(input_: torch.Tensor) -> torch.Tensor:
        return input_

    def all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([input_] * size, dim)

    def gather(input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        return all_gather(input_, dim) if rank == dst else None

    def reduce_scatter(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return input_.chunk(size, dim)[rank]

    def broadcast(input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        return input_

    for alone in (all_reduce, all_gather, gather, reduce_scatter, broadcast):
        setattr(group, alone.__name__, _either(alone, getattr(group, alone.__name__), aside))


def _either(alone: Callable, together: Callable, aside: Callable[[], bool]) -> Callable:
    def exchange(*args: Any, **kwargs: Any) -> Any:
        return (alone if aside() else together)(*args, **kwargs)

    return exchange
