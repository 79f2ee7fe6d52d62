"""Workers and runners on the CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker as VLLMCPUWorker  # first: it preloads libraries

# isort: split
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

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
