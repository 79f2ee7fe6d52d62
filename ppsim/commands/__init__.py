"""The commands of ``ppsim``, one module each.

A module's ``add`` names its commands, their arguments and what runs them. What runs a command
returns the exit code and the object that ``--json`` prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

#: What a command gives: its exit code, and what ``--json`` prints.
Answer: TypeAlias = "tuple[int, dict[str, Any]]"
#: Adds a command (its name, what runs it, its help) and returns its parser.
Command: TypeAlias = (
    "Callable[[str, Callable[[argparse.Namespace], Answer], str], argparse.ArgumentParser]"
)
