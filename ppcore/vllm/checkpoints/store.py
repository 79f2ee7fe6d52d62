"""Where checkpoints are kept, and how one comes to be there whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[str], None]


class CheckpointError(RuntimeError):
    """A checkpoint could not be built for a reason that lies in the environment."""


def cache_dir() -> Path:
    """Where checkpoints are kept: `$PPCORE_CACHE`, else `ppcore` in the user's cache folder."""
    if named := os.environ.get("PPCORE_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ppcore"


def silent(_: str) -> None:
    """Say nothing."""


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars out of the caller's terminal; `progress` speaks instead."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def assembled(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that becomes `target` if the block ends well.

    Whoever renames first wins: another process may have built the same checkpoint meanwhile, and
    its copy may be in use already, so it is kept and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
