"""Coverage marks: which lines of the core a run of the simulator never reaches.

Every line of the protocol's modules is a mark, by ``module:line`` with its text, so the core names
none and stays as fast as it is. A mark that fuzzing never hits is a rare branch that the generator
should be taught to reach, or one that only a unit test means to reach.
"""

from __future__ import annotations

import dis
import importlib
import linecache
import sys
from types import CodeType, FrameType, TracebackType
from typing import Any

#: The modules whose lines are marks.
MODULES = ("core", "seat", "saves", "schedule")


class Marks:
    """Watches lines while it is entered (with ``sys.settrace``, which makes a run slower)."""

    def __init__(self) -> None:
        # (file, line) of what has not run yet.
        self._left: set[tuple[str, int]] = set()
        self._waiting: dict[CodeType, set[int]] = {}
        for name in MODULES:
            module = importlib.import_module(f"ppcore.{name}")
            assert module.__file__ is not None
            with open(module.__file__, encoding="utf-8") as file:
                whole = compile(file.read(), module.__file__, "exec")
            for code in _functions(whole):
                lines = {line for _, line in dis.findlinestarts(code) if line is not None}
                self._left |= {(code.co_filename, line) for line in lines - {code.co_firstlineno}}

    def __enter__(self) -> Marks:
        sys.settrace(self._call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        waiting = self._waiting.get(code)
        if waiting is None:
            file = code.co_filename
            waiting = {line for name, line in self._left if name == file}
            waiting &= {line for _, line in dis.findlinestarts(code) if line is not None}
            self._waiting[code] = waiting
        return self._line if waiting else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        code, line = frame.f_code, frame.f_lineno
        waiting = self._waiting[code]
        if line in waiting:
            waiting.discard(line)
            self._left.discard((code.co_filename, line))
        return self._line if waiting else None

    def missed(self) -> list[str]:
        """The marks that were not hit: ``core:123 text``."""
        return [
            f"{file.rpartition('/')[2].removesuffix('.py')}:{line} "
            f"{linecache.getline(file, line).strip()}"
            for file, line in sorted(self._left)
        ]


def _functions(code: CodeType) -> list[CodeType]:
    """The functions inside a module's code; its own lines and class bodies run on import."""
    found: list[CodeType] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function, not a class body
                found.append(constant)
            found += _functions(constant)
    return found
