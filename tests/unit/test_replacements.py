"""What may stand in the place of a module's value."""

from __future__ import annotations

import pytest

pytest.importorskip("nnsight")
import torch

from ppcore.errors import BlockError
from ppcore.runtime.mediator import _check_dtype

WHOLE, HALF = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)


@pytest.mark.parametrize("location", ["m.layers.0.output", "m.layers.0.input"])
def test_a_replacement_of_another_dtype_is_refused_wherever_it_stands(location: str) -> None:
    with pytest.raises(BlockError, match=r"is torch.float32, and its replacement torch.bfloat16"):
        _check_dtype(location, HALF, WHOLE)
    with pytest.raises(BlockError, match=r"\.to\(torch.float32\)"):
        _check_dtype(location, (WHOLE, (WHOLE, HALF)), (WHOLE, [WHOLE, WHOLE]))


def test_what_the_forward_can_take_is_taken() -> None:
    _check_dtype("m.output", (WHOLE, None), (WHOLE, HALF))
    _check_dtype("m.output", torch.zeros(2, dtype=torch.int64), WHOLE)
    _check_dtype("logits", HALF, WHOLE)
