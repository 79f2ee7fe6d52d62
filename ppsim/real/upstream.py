"""nnsight's own request loop, without the engine that it comes with.

``nnsight.modeling.vllm`` imports vLLM. Its classes `Request` and `Requests`, which carry the workers of
an engine's requests, do not need it: they are taken out of that module's text and run here as they are.
So the reference is nnsight itself, on one rank, and what is mixed in front of it in
`ppcore.runtime.requests` is what runs in an engine.
"""

from __future__ import annotations

import ast
import importlib.util
import threading
from pathlib import Path
from types import CodeType
from typing import Any

from nnsight.intervention.interleaver import Mediator
from nnsight.intervention.serialization import loads
from nnsight.tracing.tracer import _saves

_PACKAGE = "nnsight.modeling.vllm.model_runners"
_WANTED = ("Request", "Requests")


class _Warnings:
    """Stands in for the ``warnings`` module: keeps what this thread is warned of."""

    def __init__(self) -> None:
        self._local = threading.local()

    def warn(self, message: str, *args: Any, **kwargs: Any) -> None:
        self.caught().append(message)

    def caught(self) -> list[str]:
        """What this thread was warned of, so far; the caller may empty it."""
        if not hasattr(self._local, "caught"):
            self._local.caught = []
        return self._local.caught


#: What the loops of this process were warned of, thread by thread.
WARNED = _Warnings()


def _code() -> CodeType:
    root = importlib.util.find_spec("nnsight")
    assert root is not None and root.origin is not None
    path = Path(root.origin).parent / "modeling/vllm/model_runners/GPUModelRunner.py"
    tree = ast.parse(path.read_text(), str(path))
    tree.body = [
        node
        for node in tree.body
        if (isinstance(node, ast.ClassDef) and node.name in _WANTED)
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    ]
    assert len(tree.body) == 1 + len(_WANTED), f"{path} has no {_WANTED}"
    return compile(tree, str(path), "exec")


def _load() -> dict[str, Any]:
    namespace: dict[str, Any] = {
        "__name__": f"{_PACKAGE}.GPUModelRunner",
        "__package__": _PACKAGE,
        "Any": Any,
        "Mediator": Mediator,
        "loads": loads,
        "_saves": _saves,
        "warnings": WARNED,
        # Names of requests are the caller's own here; vLLM puts no suffix on them.
        "_ids_unrandomized": lambda: True,
    }
    exec(_code(), namespace)
    return namespace


_NAMESPACE = _load()

#: nnsight's classes of these names.
Request: Any = _NAMESPACE["Request"]
Requests: Any = _NAMESPACE["Requests"]
