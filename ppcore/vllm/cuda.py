"""Workers and runners on CUDA."""

from __future__ import annotations

from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from .runner import PipelineRunner
from .worker import TracingWorker


class PipelineGPURunner(PipelineRunner, NNsightGPUModelRunner):
    """nnsight's runner on one stage of several."""


class GPUWorker(TracingWorker, Worker):
    """A vLLM GPU worker whose runner interleaves interventions."""

    plain_runner: type = GPUModelRunner
    single_stage_runner: type = NNsightGPUModelRunner
    pipeline_runner: type = PipelineGPURunner
