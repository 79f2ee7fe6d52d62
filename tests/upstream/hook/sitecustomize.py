"""Put the class under test in nnsight's place, in every process of an upstream run.

PYTHONPATH leads here, so this is in force in pytest, in the interpreters that some tests start by
themselves, and in vLLM's spawned engine and worker processes. Without PPCORE_UPSTREAM it does
nothing.
"""

import os
import sys

if os.environ.get("PPCORE_UPSTREAM"):
    import importlib.abc
    import importlib.machinery

    _NAME = "nnsight.modeling.vllm"

    class _Loader(importlib.abc.Loader):
        def __init__(self, inner):
            self.inner = inner

        def create_module(self, spec):
            return self.inner.create_module(spec)

        def exec_module(self, module):
            self.inner.exec_module(module)
            import upstream_hook

            upstream_hook.install(module)

    class _Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != _NAME:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader)
            return spec

    sys.meta_path.insert(0, _Finder())
