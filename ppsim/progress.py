"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

import sys
import time

_WIDTH = 24


class Bar:
    """How far a long piece of work is.

    Args:
        total: of what `show` is told; None where the end is not known.
    """

    def __init__(self, total: float | None) -> None:
        self._total = total
        self._on = sys.stderr.isatty()
        self._shown = 0.0

    def show(self, done: float, text: str) -> None:
        """So much is done; drawn five times a second at most."""
        if not self._on or time.monotonic() - self._shown < 0.2:
            return
        self._shown = time.monotonic()
        bar = ""
        if self._total:
            part = min(1.0, done / self._total)
            full = round(part * _WIDTH)
            bar = f"[{'#' * full}{'.' * (_WIDTH - full)}] {part:4.0%} "
        print(f"\r\x1b[K{bar}{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the bar off the screen, before something else is printed."""
        if self._on and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
