"""nnsight's own model runner on vLLM's CPU worker, for runs of the stock class on one rank."""

from vllm.v1.worker.cpu_worker import CPUWorker as _CPUWorker  # isort: skip  (must come first)

from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class CPURunner(NNsightGPUModelRunner, CPUModelRunner):
    pass


class CPUWorker(_CPUWorker):
    def init_device(self):
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise NotImplementedError(type(self.model_runner))
        self.model_runner.__class__ = CPURunner

    collect_nnsight = NNsightGPUWorker.collect_nnsight
    nnsight_request_count = NNsightGPUWorker.nnsight_request_count
    nnsight_register = NNsightGPUWorker.nnsight_register
    nnsight_clear_registered = NNsightGPUWorker.nnsight_clear_registered
