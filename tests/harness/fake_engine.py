"""A model class for `EngineProcess` that has no engine: what the handle does needs none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from typing import Any


class Model:
    """Stands in for `ppcore.vllm.VLLM`: starts one process, as an engine starts its core."""

    def __init__(self, checkpoint: str, *, dispatch: bool, **settings: Any) -> None:
        if settings.get("refuse"):
            raise ValueError("these settings cannot work")
        self.checkpoint, self.settings = checkpoint, settings
        self.core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def close(self) -> None:
        if not self.settings.get("leave"):
            self.core.terminate()
            self.core.wait()


def add(model: Model, a: int, b: int = 0) -> int:
    return a + b


def settings(model: Model) -> dict[str, Any]:
    return {"checkpoint": model.checkpoint, **model.settings}


def fail(model: Model) -> None:
    raise KeyError("no such thing")


def die(model: Model) -> None:
    print("last words", flush=True)
    os._exit(3)


def sleep(model: Model, seconds: float) -> None:
    time.sleep(seconds)


def unpicklable(model: Model) -> Any:
    return lambda: None


def cut_short(model: Model, location: str) -> None:
    warnings.warn(f"'{location}' was never reached: the loop asked for a step", stacklevel=1)
