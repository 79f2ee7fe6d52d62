"""The client: nnsight's `VLLM`, whose engine may be split into pipeline stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from nnsight.modeling.vllm import VLLM as NNsightVLLM

from ..errors import SetupError
from ..runtime import stubs
from ..runtime.transport import CHOICES
from . import platform
from .envoys import staged_envoys
from .plan import config
from .timeline import TimelineFile

#: The key of this package's settings in vLLM's ``additional_config``.
CONFIG_KEY = "ppcore"


class VLLM(NNsightVLLM):
    """A vLLM engine whose internals can be traced, on any number of pipeline stages.

    The same arguments as ``nnsight.modeling.vllm.VLLM``, whose first may be a `Path` too; engine
    arguments go to vLLM. With ``pipeline_parallel_size=1`` it behaves as that class does.

    Args:
        pull_timeout_s: how long a rank waits for a value of another stage before the trace ends with
            a report of who waits for what.
        block_timeout_s: how long a block may run without touching the model before the trace ends with
            an error that names the line: an endless loop would hold up every request. Keep it
            below the time after which vLLM gives up on a rank, 300 s; on one stage nothing looks on.
        transport: what values cross between stages on: "direct" (sockets), "gloo", or "auto", which is
            sockets where all ranks can connect and gloo where not.
        timeline: a file to record a timeline in: a Chrome trace of rounds, handoffs, parked workers,
            waits and pulls on every rank. On one stage there is nothing to record.

    Raises:
        SetupError: the settings cannot work with pipeline parallelism, or a path leads to no
            checkpoint; the text says what to change.
    """

    def __init__(
        self,
        *args: Any,
        pull_timeout_s: float = 300.0,
        block_timeout_s: float = 200.0,
        transport: str = "auto",
        timeline: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        if transport not in CHOICES:
            raise SetupError(f"transport={transport!r} is not one of {', '.join(CHOICES)}")
        self._pull_timeout_s = pull_timeout_s
        self._block_timeout_s = block_timeout_s
        self._transport = transport
        self._timeline = TimelineFile(timeline) if timeline is not None else None
        if args and isinstance(args[0], os.PathLike):
            args = (os.fspath(args[0]), *args[1:])  # vLLM takes a name
        if args and isinstance(args[0], str):
            config.local(args[0])
            self._require_v1_model_runner()  # before vLLM's own configuration trips over it
        kwargs.setdefault("envoys", staged_envoys())
        super().__init__(*args, **kwargs)

    def _load_meta(self, repo_id: str, **kwargs: Any) -> torch.nn.Module:
        with platform.meta_build():
            return super()._load_meta(repo_id, **kwargs)

    def _load(self, repo_id: str, **kwargs: Any) -> torch.nn.Module:
        stages = int(kwargs.get("pipeline_parallel_size") or 1)
        columns = int(kwargs.get("tensor_parallel_size") or 1)
        self._WORKER_CLS = platform.worker_class()
        settings: dict[str, Any] = {}
        if platform.crowded(stages * columns):
            settings["crowded"] = True
        if stages > 1:
            self._check(stages)
            meta = self.__dict__.get("_module")
            if meta is None:
                meta = self._load_meta(repo_id, **kwargs)
                # The base class builds a tree only when there is none yet.
                self.__dict__["_module"] = meta
            check_stages(meta, stages)
            settings["aliases"] = stubs.aliases(meta, "model")
            settings["pull_timeout_s"] = self._pull_timeout_s
            settings["block_timeout_s"] = self._block_timeout_s
            settings["transport"] = self._transport
            settings["timeline"] = self._timeline is not None
        if settings:
            kwargs["additional_config"] = {
                **(kwargs.get("additional_config") or {}),
                CONFIG_KEY: settings,
            }
        sized = "kv_cache_memory_bytes" in kwargs or "gpu_memory_utilization" in kwargs
        with platform.engine_environment(stages * columns, sized=sized):
            return super()._load(repo_id, **kwargs)

    def _check(self, stages: int) -> None:
        if self.taps:
            raise SetupError(
                f"taps={list(self.taps)!r} with pipeline_parallel_size={stages}: a replayed CUDA "
                "graph runs no Python between stages; drop taps, or use one stage"
            )

    def _load_sync(self, repo_id: str, **kwargs: Any) -> Any:
        from .engine import PPLLMEngine

        llm = super()._load_sync(repo_id, **kwargs)
        if llm.llm_engine.vllm_config.parallel_config.pipeline_parallel_size > 1:
            llm.llm_engine.__class__ = PPLLMEngine
            llm.llm_engine.timeline = self._timeline
            llm.llm_engine.watch_ranks()
        return llm

    def _load_async(self, repo_id: str, **kwargs: Any) -> Any:
        from .engine import PPAsyncLLM

        engine = super()._load_async(repo_id, **kwargs)
        if engine.vllm_config.parallel_config.pipeline_parallel_size > 1:
            engine.__class__ = PPAsyncLLM
            engine.timeline = self._timeline
        return engine

    def pp_status(self) -> list[dict[str, int]]:
        """What is left of requests on each rank, and its running totals; ordered by rank.

        Waits until ended requests have drained. On an engine with ``mode="async"`` this returns an
        awaitable of the list.

        Each dict has ``stage``, ``column``, ``pid`` (of the rank's process), ``requests``,
        ``workers``, ``buffer_entries``, ``buffer_bytes`` (of published values), ``pending_pulls``,
        ``pulls_total`` (asked for by the rank), ``pulled_bytes_total`` (received), ``messages_total``
        (sent) and ``host_copies_total``.
        """
        from .engine import STATUS

        if not self.dispatched:
            self.dispatch()
        engine: Any = getattr(self.vllm_entrypoint, "llm_engine", self.vllm_entrypoint)
        return engine.collective_rpc(STATUS)


def check_stages(root: torch.nn.Module, stages: int) -> None:
    """Refuse what vLLM cannot split.

    Raises:
        SetupError: the architecture has no pipeline support, fewer layers than stages, or layers
            that vLLM's own setting does not divide among them.
    """
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.models import supports_pp

    if not supports_pp(root):
        raise SetupError(
            f"pipeline_parallel_size={stages}: vLLM cannot split {type(root).__name__}; use "
            "tensor_parallel_size instead"
        )
    layers = max((len(m) for m in root.modules() if isinstance(m, torch.nn.ModuleList)), default=0)
    if 0 < layers < stages:
        raise SetupError(
            f"pipeline_parallel_size={stages} is more than the model's {layers} layers; use at most "
            f"{layers}"
        )
    if layers and platform.PARTITION in os.environ:
        try:
            get_pp_indices(layers, 0, stages)
        except ValueError as error:
            raise SetupError(
                f"pipeline_parallel_size={stages} with {platform.PARTITION}="
                f"{os.environ[platform.PARTITION]!r}: {error} Give {stages} numbers of layers that "
                f"add up to {layers}, or unset it"
            ) from error
