"""The thread on which a rank's forwards, and so its blocks, run.

A worker is a greenlet, and only the thread that started it can resume it. vLLM's own executors run forwards
and RPCs on one thread. Ray's compiled graph does not: forwards come on a thread of the graph's, RPCs on
the actor's. There both are handed to a thread of the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch


class ForwardThread(Protocol):
    """Runs a function where the rank's blocks run, and returns what it returned."""

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any: ...


def here(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The forward thread of a rank whose executor has only one: the calling one."""
    return function(*args, **kwargs)


class OwnThread:
    """A forward thread beside those that the executor calls on.

    Args:
        device: what the thread computes on; on CUDA it becomes the thread's current device.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, "ppcore-forward", self._begin, (device,))

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return self._pool.submit(function, *args, **kwargs).result()

    @staticmethod
    def _begin(device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)


def forward_thread(parallel_config: Any, device: torch.device) -> ForwardThread:
    """The forward thread of a rank, by vLLM's ``ParallelConfig``."""
    return OwnThread(device) if parallel_config.use_ray else here
