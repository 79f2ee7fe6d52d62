"""What differs between a CPU and a CUDA engine, and what vLLM's CPU engine needs from outside.

A setting that the user made always wins; what is set here is set while the engine's processes start
and put back afterwards, so that one engine's settings do not leak into the next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import torch

#: Worker classes by platform, as vLLM's ``worker_cls`` names them.
WORKERS = {"cpu": "ppcore.vllm.cpu.CPUWorker", "cuda": "ppcore.vllm.cuda.GPUWorker"}

_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
#: vLLM's setting for the number of layers of each stage.
PARTITION = "VLLM_PP_LAYER_PARTITION"


def is_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def worker_class() -> str:
    """The worker class for this platform."""
    return WORKERS["cpu" if is_cpu() else "cuda"]


@contextlib.contextmanager
def meta_build() -> Iterator[None]:
    """Let vLLM's loader build a tree on meta on a machine without an accelerator.

    Loading ends by freeing accelerator memory, which raises where there is none, and the CPU's
    expert kernels pack their weights, which a meta tensor does not have. The tree is one stage's, so
    a partition into several is not for it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop(PARTITION, None)
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.accelerator, "empty_cache", lambda: None))
            try:
                from vllm.model_executor.layers.fused_moe.experts import cpu_moe
            except ImportError:
                pass
            else:
                real = cpu_moe.cpu_prepack_moe_weight

                def pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
                    return weight if weight.is_meta else real(weight, isa)

                stack.enter_context(mock.patch.object(cpu_moe, "cpu_prepack_moe_weight", pack))
        yield


def thread_binding(world: int) -> str:
    """One group of cores per rank, ``|`` between: vLLM's own choice refuses two ranks on one node."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // world)
    groups = []
    for rank in range(world):
        group = cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]]
        groups.append(",".join(str(core) for core in group))
    return "|".join(groups)


def crowded(world: int) -> bool:
    """Whether ``world`` ranks of a CPU engine have fewer cores than ranks."""
    return is_cpu() and world > len(os.sched_getaffinity(0))


@contextlib.contextmanager
def plain_gloo() -> Iterator[None]:
    """Let process groups that are made here talk over gloo.

    vLLM's CPU communicator waits for its peers in shared memory by spinning. Where ranks share a core
    each spins through its time slice while the rank it waits for is off the core: fifteen times
    slower, measured with four ranks on two cores. This takes vLLM's own way out of it.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    with mock.patch.object(
        CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda communicator: False
    ):
        yield


def kv_space_gib(world: int) -> int:
    """A KV cache for each rank that leaves room for weights: a tenth of the memory, shared."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, int(total / 10 / world / (1 << 30)))


@contextlib.contextmanager
def engine_environment(world: int, *, sized: bool) -> Iterator[None]:
    """The environment in which an engine of ``world`` ranks starts.

    Args:
        sized: whether the caller sized the KV cache by an engine argument.
    """
    wanted: dict[str, str] = {}
    if is_cpu():
        if world > 1 and _BIND not in os.environ:
            wanted[_BIND] = thread_binding(world)
        if not sized and _KV_SPACE not in os.environ:
            wanted[_KV_SPACE] = str(kv_space_gib(world))
    with mock.patch.dict(os.environ, wanted):
        yield
