"""The class that nnsight's tests get when they import `nnsight.modeling.vllm.VLLM`.

It is a subclass of the class under test that asks for the run's number of stages. Everyone else,
the class under test included, still gets nnsight's own: who asks is seen from the importing frame,
at that moment and not before, since a process may be in the middle of importing the package that
the class under test lives in.

The run's settings come as JSON in PPCORE_UPSTREAM, which child processes inherit:

class   dotted name of the class under test
pp      stages forced on every engine that a test builds
tests   the folder whose files are test code
report  the file that outcomes are written to (used by the conftest)
"""

import contextlib
import functools
import importlib
import json
import os
import sys
from unittest import mock

STOCK = "nnsight.modeling.vllm.VLLM"
SETTINGS = json.loads(os.environ["PPCORE_UPSTREAM"])

_plain = False


@contextlib.contextmanager
def plain():
    """Engines built in this block have one rank, whatever the run forces."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def install(package):
    """Called once `nnsight.modeling.vllm` has run."""
    stock = package.__dict__.pop("VLLM")  # so that __getattr__ below is asked

    def __getattr__(name):
        if name != "VLLM":
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        return under_test() if _is_test_code(sys._getframe(1).f_code.co_filename) else stock

    package.__getattr__ = __getattr__
    if SETTINGS["class"] == STOCK:
        import torch

        # nnsight builds its meta tree with vLLM's loader, which frees accelerator memory
        # afterwards; where there is no accelerator, that raises.
        if not torch.accelerator.is_available():
            torch.accelerator.empty_cache = lambda *_, **__: None


def _is_test_code(filename):
    # "<string>" is a test's own `python -c`.
    return filename == "<string>" or filename.startswith(SETTINGS["tests"] + os.sep)


@functools.cache
def under_test():
    module, _, name = SETTINGS["class"].rpartition(".")
    base = getattr(importlib.import_module(module), name)

    class VLLM(base):
        if SETTINGS["class"] == STOCK:
            _WORKER_CLS = "upstream_stock_worker.CPUWorker"

        def __init__(self, *args, **kwargs):
            if args and isinstance(args[0], str) and not _plain and SETTINGS["pp"] > 1:
                kwargs.setdefault("pipeline_parallel_size", SETTINGS["pp"])
            if "num_gpu_blocks_override" in kwargs:
                # The tests count CUDA's blocks of 16 tokens, and the CPU backend has none under
                # 32. About the same budget; two blocks more, since with prompts rounded up to
                # whole blocks test_preemption's third request would wait, not be evicted.
                kwargs["block_size"] = 32
                kwargs["num_gpu_blocks_override"] = kwargs["num_gpu_blocks_override"] // 2 + 2
            super().__init__(*args, **kwargs)

        def _load_meta(self, repo_id, **kwargs):
            with _experts_on_meta():
                return super()._load_meta(repo_id, **kwargs)

    VLLM.__module__, VLLM.__qualname__ = __name__, "VLLM"
    return VLLM


@contextlib.contextmanager
def _experts_on_meta():
    """The CPU expert kernel packs its weights when it is built, and packing has no meta form."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    pack = cpu_moe.cpu_prepack_moe_weight

    def pack_real(weight, isa):
        return weight if weight.is_meta else pack(weight, isa)

    with mock.patch.object(cpu_moe, "cpu_prepack_moe_weight", pack_real):
        yield


def __getattr__(name):
    if name == "VLLM":  # pickle looks where __module__ says
        return under_test()
    raise AttributeError(name)
