"""vLLM's own CPU worker, able to run a later pipeline stage: the yardstick for untraced requests."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker as VLLMCPUWorker  # first: it preloads libraries

# isort: split
from vllm.distributed.parallel_state import get_pp_group


class PlainCPUWorker(VLLMCPUWorker):
    """vLLM's worker, with the buffer that it forgets to allocate on later stages in eager mode."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
