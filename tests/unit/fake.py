"""Another stage without processes: what a lazy pulls is evaluated here, encoded, and decoded."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ppcore.core import ALWAYS
from ppcore.messages import Key, Worker
from ppcore.runtime import codec, expression, lazy
from ppcore.runtime.lazy import Base, LazyTensor

CPU = torch.device("cpu")


class Owner:
    """The stage that has the values, and the fetcher of their lazies.

    Attributes:
        fetches: exchanges so far.
        pulled: expressions that crossed, each once a name.
        pulled_bytes: bytes of tensors that crossed.
        released: keys of bases that no lazy needs any more.
    """

    def __init__(self) -> None:
        self.values: dict[Key, Any] = {}
        self.fetches = 0
        self.pulled: list[str] = []
        self.pulled_bytes = 0
        self.released: list[Key] = []
        self._answers: dict[tuple[Key, str], Any] = {}
        self._numbers = itertools.count()

    def read(self, value: Any, fixed: str = "") -> Any:
        """The lazies for a read of ``value``, which is kept as it is now."""
        key = Key(Worker("r"), next(self._numbers))
        kept = lazy.map_tensors(value, lambda path, tensor: tensor.detach().clone())
        self.values[key] = (kept,)
        base = Base(self, key, f"model.layers.{key.access}.output", 0, ALWAYS, fixed)
        return lazy.map_tensors(
            (kept,), lambda path, tensor: lazy.leaf(base, path, tensor.shape, tensor.dtype, CPU)
        )[0]

    def fetch(self, wanted: list[tuple[Base, str]]) -> list[Any]:
        self.fetches += 1
        for base, text in wanted:
            if (base.key, text) not in self._answers:
                value = expression.evaluate(text, self.values[base.key])
                self._answers[base.key, text] = codec.decode(codec.encode(value))
                self.pulled.append(text)
                self.pulled_bytes += codec.size_bytes(value)
        return [self._answers[base.key, text] for base, text in wanted]

    def request(self, wanted: list[tuple[Base, str]]) -> list[int]:
        return []

    def forgotten(self, base: Base) -> None:
        self.released.append(base.key)


def again(tensor: LazyTensor) -> LazyTensor:
    """What a second read of the same visit gets: another object over the same memory."""
    return LazyTensor.of(tensor.node)
