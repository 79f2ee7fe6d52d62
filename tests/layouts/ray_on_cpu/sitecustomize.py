"""Lets vLLM's Ray executors start on CPU workers. On PYTHONPATH it is imported by every process.

vLLM starts Ray workers only where its platform has a name for its devices among Ray's resources, and the
CPU platform has none. Here it gets one, of which a test's Ray instance is told that it has some.
"""

import importlib.abc
import importlib.machinery
import sys

PLATFORM = "vllm.platforms.cpu"


class _Named(importlib.abc.MetaPathFinder):
    """Finds the platform's module, and names its devices once it is loaded."""

    def find_spec(self, fullname, path, target=None):
        if fullname != PLATFORM:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Named())
