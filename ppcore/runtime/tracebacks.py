"""Where in its block a worker's error came from: tracebacks of the block's own code, and no more.

What the block called is a tensor's business: an error that a lazy raises is told as the one that a tensor
raises, which has no frame.
"""

from __future__ import annotations

import os
from types import FrameType, TracebackType
from typing import Any

from .watchdog import BLOCK

#: Where the frames are that are not the block's.
_HERE = os.path.dirname(__file__) + os.sep


def blocks_frame(worker: Any) -> FrameType | None:
    """The frame of the block that a parked worker runs."""
    frame = worker.gr_frame
    while frame is not None and not frame.f_code.co_filename.startswith(BLOCK):
        frame = frame.f_back
    return frame


def at(frame: FrameType) -> TracebackType:
    """The line where a frame stands, or where it ended."""
    return TracebackType(None, frame, frame.f_lasti, frame.f_lineno)


def blocks_own(error: Exception) -> TracebackType | None:
    """An error's traceback as far as the block's own code goes."""
    kept: list[TracebackType] = []
    entry = getattr(error, "__intervention_tb__", None) or error.__traceback__
    while entry is not None:
        ours = entry.tb_frame.f_code.co_filename.startswith(_HERE)
        if ours and kept and not kept[-1].tb_frame.f_code.co_filename.startswith(_HERE):
            break
        kept.append(entry)
        entry = entry.tb_next
    found: TracebackType | None = None
    for entry in reversed(kept):
        found = TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return found
