"""Workers and runners on the CPU."""

from __future__ import annotations

import contextlib

from vllm.v1.worker.cpu_worker import CPUWorker as VLLMCPUWorker  # first: it preloads libraries

# isort: split
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from . import platform
from .model import CONFIG_KEY
from .runner import PipelineRunner
from .worker import TracingWorker


class NNsightCPURunner(NNsightGPUModelRunner, CPUModelRunner):
    """nnsight's runner over vLLM's CPU runner: one stage, plain nnsight."""


class PipelineCPURunner(PipelineRunner, NNsightGPUModelRunner, CPUModelRunner):
    """The same on one stage of several."""


class CPUWorker(TracingWorker, VLLMCPUWorker):
    """A vLLM CPU worker whose runner interleaves interventions."""

    plain_runner: type = CPUModelRunner
    single_stage_runner: type = NNsightCPURunner
    pipeline_runner: type = PipelineCPURunner

    def init_device(self) -> None:
        """Join the engine's process groups; without spinning where ranks outnumber cores."""
        crowded = self.vllm_config.additional_config.get(CONFIG_KEY, {}).get("crowded", False)
        with platform.plain_gloo() if crowded else contextlib.nullcontext():
            super().init_device()
