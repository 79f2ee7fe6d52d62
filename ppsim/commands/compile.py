"""``compile``: the simulator's inner modules as machine code; see `ppsim.compiled`."""

from __future__ import annotations

import argparse
import time

from .. import compiled
from . import Answer, Command


def add(command: Command) -> None:
    """Name the command."""
    command("compile", run, f"compile the simulator, for runs with {compiled.WANTED}=1")


def run(options: argparse.Namespace) -> Answer:
    """``ppsim compile``."""
    began = time.monotonic()
    folder = compiled.build()
    took = time.monotonic() - began
    print(f"compiled into {folder} in {took:.0f} s; it is used where {compiled.WANTED}=1")
    return 0, {"folder": str(folder), "seconds": round(took, 3)}
