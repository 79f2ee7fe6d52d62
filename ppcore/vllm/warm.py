"""Processes that start warm: forked from a server that has imported what an engine needs.

Importing torch, vLLM, nnsight and transformers takes about ten seconds of processor time, and an
engine is three generations of processes (client, engine core, workers), each started afresh on the
CPU. A run that starts dozens of engines spends nine tenths of its time there. Here one server
process imports once; the client of every engine is forked from it, and in that client vLLM starts
its processes by fork too, as it does by default where there is a GPU. Nothing but the start differs.
It is for tests: a fork copies what the parent has, and only a parent that has done nothing but
import is known to be fit for that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import types
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

__all__ = ["WarmProcess"]

#: What the server imports: the client's side and the workers'.
PRELOAD = ["ppcore.vllm.child", "ppcore.vllm", "ppcore.vllm.cpu"]


class WarmProcess:
    """A child that runs `ppcore.vllm.child.main`; it is used as a `subprocess.Popen` is.

    Args:
        read_fd, write_fd: the child's ends of the two pipes.
        log: file to which the child's output is appended.
        environment: the child's whole environment.
    """

    def __init__(self, read_fd: int, write_fd: int, log: Path, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ends = (
            Connection(os.dup(read_fd), writable=False),
            Connection(os.dup(write_fd), readable=False),
        )
        self._process = context.Process(target=_serve, args=(*ends, str(log), environment))
        # Some packages read the environment when they are imported, which the server does once.
        with mock.patch.dict(os.environ, environment):
            self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; `subprocess.TimeoutExpired` when it does not in time."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("an engine's client", timeout)
        return self._process.exitcode


def _serve(read: Connection, write: Connection, log: str, environment: dict[str, str]) -> None:
    """The forked child: become what a fresh interpreter would be, then serve."""
    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("always", UserWarning)  # as PYTHONWARNINGS says to a fresh interpreter
    _fork_vllm_processes()
    from .child import main

    sys.exit(main(read.fileno(), write.fileno()))


def _fork_vllm_processes() -> None:
    """Let vLLM fork where it would spawn, and give each rank the threads that vLLM means it to have."""
    from vllm.utils import system_utils

    fork = multiprocessing.get_context("fork")
    system_utils.multiprocessing = types.SimpleNamespace(get_context=lambda _: fork)
    os.register_at_fork(after_in_child=_take_threads)


def _take_threads() -> None:
    """What OpenMP does with its settings when a fresh interpreter loads it."""
    import torch

    places = os.environ.get("OMP_PLACES", "").strip("{}")
    if places:
        cores = {int(core) for core in places.split(",")}
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
