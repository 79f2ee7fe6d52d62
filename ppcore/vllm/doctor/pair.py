"""Two processes over gloo, as two stages of an engine talk: do they meet, and how fast is it.

This module is both sides. `pair` starts two children, `python -m ppcore.vllm.doctor.pair`. A child
gives up by itself when the other one does not come; the parent's longer deadline is for children that
do not even get as far as that, and ends them. They join the group through a file, so no port is
needed; the connection itself takes the interface that the engine's would.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from .finding import Finding, note, ok, problem

_INTERFACE = "GLOO_SOCKET_IFNAME"
#: From the first child's joining: the second one may still be importing PyTorch.
_JOIN_TIMEOUT_S = 20.0
_TRIPS = 50
_BLOCK_BYTES = 16 << 20
_BLOCKS = 5
#: A round trip on loopback takes tenths of a millisecond, some milliseconds where cores are short.
_SLOW_S = 20e-3


def pair(*, timeout_s: float = 90.0, environment: dict[str, str] | None = None) -> Finding:
    """Run the self-test.

    Args:
        timeout_s: after which the two processes are ended.
        environment: of the two processes; by default this one's.
    """
    environment = dict(os.environ if environment is None else environment)
    try:
        found, failure = _attempt(timeout_s, environment)
    except subprocess.TimeoutExpired:
        said = f"unknown: two processes that import PyTorch did not end within {timeout_s:g} s"
        return note("gloo", said, "run it again when the machine is less busy")
    if found is None and environment.get(_INTERFACE) != "lo":
        found, _ = _attempt(timeout_s, environment | {_INTERFACE: "lo"})
        if found is not None:
            said = f"two processes do not meet over the interface that gloo takes here: {failure}"
            return problem("gloo", said, f"set {_INTERFACE}=lo, for ranks on one machine", **found)
    if found is None:
        return problem(
            "gloo",
            f"two processes do not meet: {failure}",
            "allow connections on the loopback interface, and see that `lo` is up",
        )
    round_trip_s, bytes_per_s = found["round_trip_s"], found["bytes_per_s"]
    said = f"round trip {round_trip_s * 1e3:.2f} ms, {bytes_per_s / 1e9:.1f} GB/s"
    if round_trip_s > _SLOW_S:
        return note("gloo", said, "is the machine busy, or short of cores?", **found)
    return ok("gloo", said, **found)


def _attempt(timeout_s: float, environment: dict[str, str]) -> tuple[dict[str, float] | None, str]:
    """What rank 0 measured, or why it did not.

    Raises:
        subprocess.TimeoutExpired: they were not done in time, and were ended.
    """
    deadline = time.monotonic() + timeout_s
    children: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="ppcore-doctor-") as folder:
        try:
            for rank in range(2):
                command = [sys.executable, "-m", __name__, str(rank), f"{folder}/store"]
                streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                children.append(
                    subprocess.Popen(command, env=environment, text=True, **streams)  # type: ignore[call-overload]
                )
            outputs = [
                child.communicate(timeout=max(0.0, deadline - time.monotonic()))
                for child in children
            ]
        finally:
            for child in children:
                child.kill()
                child.communicate()
    for child, (_, errors) in zip(children, outputs, strict=True):
        if child.returncode:
            lines = errors.strip().splitlines() or [f"status {child.returncode}"]
            return None, lines[-1].strip()
    measured: dict[str, float] = json.loads(outputs[0][0].splitlines()[-1])
    return measured, ""


def child(rank: int, store: Path) -> None:
    """One side. Rank 0 prints what it measured."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_JOIN_TIMEOUT_S),
    )
    word, block = torch.zeros(8, dtype=torch.uint8), torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
    trips = [_trip(rank, word, word) for _ in range(_TRIPS)]
    blocks = [_trip(rank, block, word) for _ in range(_BLOCKS)]
    if rank == 0:
        print(
            json.dumps(
                {
                    "round_trip_s": statistics.median(trips),
                    "bytes_per_s": _BLOCK_BYTES / min(blocks),
                }
            )
        )
    dist.destroy_process_group()


def _trip(rank: int, out: object, back: object) -> float:
    """Seconds for `out` from rank 0 to rank 1, and `back`."""
    import torch.distributed as dist

    start = time.perf_counter()
    if rank == 0:
        dist.send(out, 1)
        dist.recv(back, 1)
    else:
        dist.recv(out, 0)
        dist.send(back, 0)
    return time.perf_counter() - start


if __name__ == "__main__":
    child(int(sys.argv[1]), Path(sys.argv[2]))
