"""A thread that only asks for shapes takes no part in what columns exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppcore.vllm.collectives import shapes_only

NAMES = "all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast"


def group(rank: int) -> Any:
    """Three columns, whose exchanges say that they have been."""
    met = {name: lambda *args, name=name, **kwargs: f"{name} of all" for name in NAMES}
    return SimpleNamespace(world_size=3, rank_in_group=rank, **met)


def test_who_is_aside_gets_the_shape_and_meets_nobody() -> None:
    first, last = group(0), group(2)
    for one in (first, last):
        shapes_only(one, lambda: True)
    x = torch.zeros(4, 6)
    assert first.all_reduce(x).shape == (4, 6) and first.broadcast(x, src=1).shape == (4, 6)
    assert first.all_gather(x).shape == (4, 18) and first.all_gather(x, 0).shape == (12, 6)
    assert first.gather(x, dst=0).shape == (4, 18) and last.gather(x, dst=0) is None
    assert last.reduce_scatter(x).shape == (4, 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_exchanges_with_all(name: str) -> None:
    one = group(1)
    shapes_only(one, lambda: False)
    assert getattr(one, name)(torch.zeros(4, 6)) == f"{name} of all"
