"""What every platform's worker does: swap in the runner, and answer nnsight's RPCs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.distributed.parallel_state import get_pp_group

from ..errors import SetupError
from .forward_thread import here
from .orphans import end_with_parent


class TracingWorker:
    """Mixed in front of a vLLM worker.

    Attributes:
        plain_runner: the runner that vLLM builds on this platform; no other is instrumented.
        single_stage_runner: what it becomes on one stage.
        pipeline_runner: what it becomes on one stage of several.
    """

    plain_runner: type
    single_stage_runner: type
    pipeline_runner: type
    #: vLLM's: what this rank is sending to the next stage.
    _pp_send_work: list[Any]

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner
        if type(runner) is not self.plain_runner:
            raise NotImplementedError(
                f"nnsight instruments vLLM's {self.plain_runner.__name__}, but this worker built "
                f"{type(runner).__module__}.{type(runner).__name__} (the V2 runner, or a runner from "
                "another platform). Unset VLLM_USE_V2_MODEL_RUNNER to trace, or use vLLM directly "
                "for that run."
            )
        stages = self.vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1 and not self.vllm_config.model_config.enforce_eager:
            raise SetupError(
                f"pipeline_parallel_size={stages} without enforce_eager: modules hand off only when "
                "they run eagerly"
            )
        runner.__class__ = self.pipeline_runner if stages > 1 else self.single_stage_runner
        if self.vllm_config.parallel_config.distributed_executor_backend == "mp":
            end_with_parent()  # with this executor every rank is a process of its own

    def execute_model(self, scheduler_output: Any) -> Any:
        """A step; a later stage begins it before it waits for the hidden states."""
        runner = self.model_runner
        waits = scheduler_output.total_num_scheduled_tokens > 0 and not get_pp_group().is_first_rank
        if (
            waits
            and self._alone
            and hasattr(runner, "begin")
            and not runner.untraced(scheduler_output)
        ):
            self._await_sends()
            runner.begin(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The end of a step; a stage that has nothing else to do completes what later ones make of it."""
        lingers = getattr(self.model_runner, "lingers", None)
        if lingers is not None and lingers():
            self._await_sends()
            self.model_runner.linger()
        return super().sample_tokens(grammar_output)  # type: ignore[misc]

    def _await_sends(self) -> None:
        """What this rank handed on has arrived: a block may edit the values that it has been made of."""
        for handle in self._pp_send_work:
            handle.wait()
        self._pp_send_work = []

    @property
    def _alone(self) -> bool:
        """Whether nothing but the hidden states ties this rank's steps to those of others."""
        return self.vllm_config.kv_transfer_config is None

    def collect_nnsight(
        self,
        request_ids: list[str],
        finished_request_ids: list[str] | None = None,
        outputs: Any | None = None,
    ) -> bytes | None:
        """This rank's share of the named requests' saves."""
        if isinstance(outputs, bytes):
            outputs = pickle.loads(outputs)
        collect = self.model_runner.collect_nnsight
        return self._on_forward_thread(collect, request_ids, finished_request_ids, outputs)

    def nnsight_request_count(self) -> int:
        """How many requests this rank tracks."""
        return self._on_forward_thread(NNsightGPUWorker.nnsight_request_count, self)

    def nnsight_register(self, *args: Any, **kwargs: Any) -> None:
        """Install a block that runs for every request."""
        self._on_forward_thread(NNsightGPUWorker.nnsight_register, self, *args, **kwargs)

    def nnsight_clear_registered(self, registration_id: str) -> None:
        """Remove such a block."""
        self._on_forward_thread(NNsightGPUWorker.nnsight_clear_registered, self, registration_id)

    def ppcore_status(self) -> dict[str, int]:
        """See `VLLM.pp_status`."""
        return self._on_forward_thread(self._status)

    def _on_forward_thread(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model_runner, "on_forward_thread", here)(function, *args, **kwargs)

    def _status(self) -> dict[str, int]:
        status = getattr(self.model_runner, "ppcore_status", None)
        if status is not None:
            return status()
        requests = self.model_runner.nnsight_requests
        names = "buffer_entries buffer_bytes pending_pulls pulls_total pulled_bytes_total"
        names += " messages_total host_copies_total"
        return {
            "stage": 0,
            "column": self.local_rank,
            "pid": os.getpid(),
            "requests": len(requests.requests),
            "workers": len(requests.workers()),
            **dict.fromkeys(names.split(), 0),
        }

    def shutdown(self) -> None:
        """Leave the column, then do what vLLM does."""
        requests = getattr(self.model_runner, "nnsight_requests", None)
        link = getattr(requests, "link", None)
        if link is not None:
            link.close()
        super().shutdown()  # type: ignore[misc]
