"""Compare the results of one trace on two engines, and bring results into a form that can be compared.

Numbers, strings and structure have to be equal, and tensors equal to the bit, where the two engines ran the
same batches: that is what a trace of one request gets. The requests of a larger trace are batched as they
arrive, and a pipeline, which keeps several batches in flight, groups them differently from run to run. A
tolerance applies there, and what is inside it is still reported by `largest_difference`.

Measured with sixteen requests of SmolLM2-135M in bfloat16 on the CPU: with one request a batch, two stages gave
the bits of one stage in all 288 values compared. On one stage alone, batches of 1 instead of 16 moved logits by
up to 2.2 % of the largest, and where an edit left two tokens nearly tied, drew another one. So no tolerance
for half precision both allows for batches and finds small faults: compare in float32 where that is affordable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Comparison", "compare", "plain"]

#: dtype -> how far two results of requests that shared a batch may be apart, as a part of the largest value of
#: their tensor.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 1e-2,
}


def plain(value: Any) -> Any:
    """`value` with tensors on the CPU, tuples as lists, and anything that is no data as its `repr`."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)


@dataclass
class Comparison:
    """Where two results part, and how far apart their tensors are where they do not."""

    differences: list[str] = field(default_factory=list)
    #: Of all floating values compared, those within tolerance included. 0.0 says: equal to the bit.
    largest_difference: float = 0.0

    @property
    def same(self) -> bool:
        return not self.differences


def compare(one: Any, other: Any, *, exact: bool = True) -> Comparison:
    """Compare two plain results.

    Args:
        exact: floating values have to be equal; otherwise within `TOLERANCE` of their dtype (a Python float
            counts as float32's).
    """
    found = Comparison()
    _walk(one, other, "", exact, found)
    return found


def _walk(one: Any, other: Any, where: str, exact: bool, found: Comparison) -> None:
    at = where or "result"
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        _tensors(one, other, at, exact, found)
    elif type(one) is not type(other):
        found.differences.append(f"{at}: {_short(one)} against {_short(other)}")
    elif isinstance(one, dict):
        if list(one) != list(other):
            found.differences.append(
                f"{at}: keys {_short(list(one))} against {_short(list(other))}"
            )
        for key in one:
            if key in other:
                _walk(one[key], other[key], f"{where}.{key}" if where else str(key), exact, found)
    elif isinstance(one, list):
        if len(one) != len(other):
            found.differences.append(f"{at}: {len(one)} items against {len(other)}")
        for n, (a, b) in enumerate(zip(one, other, strict=False)):
            _walk(a, b, f"{where}[{n}]", exact, found)
    elif isinstance(one, float):
        _floats(one, other, at, exact, found)
    elif one != other:
        found.differences.append(f"{at}: {_short(one)} against {_short(other)}")


def _floats(one: float, other: float, at: str, exact: bool, found: Comparison) -> None:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return
    gap = abs(one - other)
    found.largest_difference = max(found.largest_difference, gap)
    if exact or not math.isclose(one, other, rel_tol=TOLERANCE[torch.float32]):
        found.differences.append(f"{at}: {one!r} against {other!r}")


def _tensors(
    one: torch.Tensor, other: torch.Tensor, at: str, exact: bool, found: Comparison
) -> None:
    if one.shape != other.shape or one.dtype != other.dtype:
        found.differences.append(
            f"{at}: {one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
        )
        return
    if torch.equal(one, other):
        return
    if not one.dtype.is_floating_point:
        found.differences.append(
            f"{at}: {int((one != other).sum())} of {one.numel()} values differ"
        )
        return
    a, b = one.double(), other.double()
    apart = ~((a == b) | (a.isnan() & b.isnan()))
    if not bool(apart.any()):
        return
    # Infinite where a NaN or an infinity meets anything else: no tolerance covers that.
    gap = float((a - b)[apart].abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
    found.largest_difference = max(found.largest_difference, gap)
    largest = float(torch.maximum(a.abs(), b.abs()).nan_to_num(posinf=0.0).max())
    if exact or gap > TOLERANCE.get(one.dtype, 0.0) * largest:
        found.differences.append(
            f"{at}: {int(apart.sum())} of {one.numel()} values differ, by up to {gap:.3g} "
            f"(largest value {largest:.3g})"
        )


def _short(value: Any, limit: int = 120) -> str:
    text = f"tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
