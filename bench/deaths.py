"""How long it takes until a rank knows that a peer was killed.

Two processes are the ranks of a column of two stages, connected and idle. One of them is killed
(SIGKILL), and the other notes when its transport says so. Clocks are the machine's monotonic one.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ppcore.runtime.transport import connect

from .pulls import join

KINDS = ("direct", "gloo")
#: Seconds.
AT_MOST = 0.1
_PATIENCE_S = 60.0


def run(*, repetitions: int = 5) -> dict[str, Any]:
    """Measure; the result is plain data.

    Returns:
        ``cells``, one for each transport: milliseconds, the ``median`` and the ``longest``; ``at_most``,
        milliseconds too.
    """
    cells = []
    for kind in KINDS:
        took = [_once(kind) * 1e3 for _ in range(repetitions)]
        cells.append(
            {
                "way": kind,
                "median_ms": round(statistics.median(took), 2),
                "longest_ms": round(max(took), 2),
                "count": repetitions,
            }
        )
    return {"cells": cells, "at_most": 1e3 * AT_MOST}


def _once(kind: str) -> float:
    """Seconds from one rank's death until the other one knows."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="ppcore-bench-") as folder:
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(target=_rank, args=(stage, kind, store, theirs)) for stage in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            for _ in ranks:
                assert mine.recv() == "connected"
            time.sleep(0.2)  # idle, as they mostly are
            killed = time.monotonic()
            ranks[0].kill()
            return mine.recv() - killed
        except EOFError:
            raise RuntimeError("a rank of the benchmark failed; its error is above") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.join(20)


def _rank(stage: int, kind: str, store: str, report: Any) -> None:
    join(stage, store)
    transport = connect([[0, 1]], kind)
    known = threading.Event()
    when: list[float] = []

    def on_death(peer: int, why: str) -> None:
        when.append(time.monotonic())
        known.set()

    transport.start(lambda peer, text, payload: None, on_death)
    dist.barrier()
    report.send("connected")
    if not known.wait(_PATIENCE_S):
        raise TimeoutError(f"rank {stage} was told of no death over {kind}")
    report.send(when[0])


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'transport':<12}{'median ms':>11}{'longest ms':>12}"]
    for cell in result["cells"]:
        verdict = "" if cell["longest_ms"] <= result["at_most"] else "  OVER"
        lines.append(
            f"{cell['way']:<12}{cell['median_ms']:>11.2f}{cell['longest_ms']:>12.2f}{verdict}"
        )
    return "\n".join(lines)
