"""A visit that a rank's forward left while the worker that it serves was not through with it.

On one rank the forward waits in a visit for as long as the worker runs. Here a worker parks for a value
that a later stage computes in the same turn (a *collective* call, see `calls`), and the forward goes on.
What the worker then does to the visit's value comes too late, and has to be an error.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import Missed
from ..schedule import Place
from . import lazy


class Left:
    """What a worker holds of a visit that the forward left, if it holds any."""

    def __init__(self) -> None:
        #: The visit at which the forward serves the worker now: the place, the location and the value.
        self.serves: tuple[Place, str, Any] | None = None
        # The one that it has left.
        self._left: tuple[Place, str, Any] | None = None
        # The value as it was when the worker went on.
        self._before: list[torch.Tensor] = []

    def parks(self) -> None:
        """The worker parks for a value: where it is served now the forward goes on without it."""
        self._left = self.serves or self._left

    def resumes(self, clock: Place) -> None:
        """The worker goes on. Where its clock is past the visit it may do what it likes."""
        if self._left is not None and self._left[0] != clock:
            self._left = None
        if self._left is not None:
            self._before = [tensor.clone() for tensor in _tensors(self._left[2])]

    @property
    def watched(self) -> bool:
        """Whether an edit is looked for while the worker goes on."""
        return self._left is not None

    def edited(self) -> bool:
        """Whether the worker has edited the visit's value since it went on."""
        before, self._before = self._before, []
        return self._left is not None and not all(
            map(_same_bits, before, _tensors(self._left[2]) if before else ())
        )

    def error(self, stage: int) -> Missed:
        """What to tell a worker that has, on ``stage``; it is told once."""
        assert self._left is not None
        (_, location, _), self._left = self._left, None
        return Missed(
            f"an in-place edit of {location!r} came too late: the block waited for a module of another "
            f"stage, which computes after stage {stage} in the same turn. With tensor parallelism inside "
            "of the stages, edit before such a call, or in the next step"
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    lazy.map_tensors(value, lambda path, tensor: found.append(tensor))
    return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*raw)
