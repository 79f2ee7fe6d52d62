"""What a pull costs beside what the wire costs: from the request to the value in the block.

Two processes, each pinned to a core, are the ranks of a column of two stages. The second stage measures a
bare exchange (16 bytes there, the payload back, into memory that is there already) over a Unix socket,
over TCP and over gloo with the receive posted; and a pull through the link, over the direct transport
and over gloo. Each repetition measures every way, in an order that rotates, from the same state: both
ranks idle, the values published. Small exchanges come in runs, one after the other and each measured.
Figures are medians with the 90th percentile and the least beside; what counts are the ratios of the
medians.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppcore.core import Available, Core
from ppcore.messages import Worker
from ppcore.runtime import lazy
from ppcore.runtime.lazy import Base
from ppcore.runtime.link import Link
from ppcore.runtime.transport import Transport, connect
from ppcore.schedule import Schedule

#: Payloads in bytes, how many repetitions there are of each, and how many exchanges in one.
SMALL, SMALL_REPETITIONS, SMALL_RUN = (16, 1024, 16 * 1024, 64 * 1024), 15, 20
LARGE, LARGE_REPETITIONS = (16 * 1024**2, 64 * 1024**2), 15

#: (our way, bare way, payloads, the most that the first may cost in terms of the second)
BOUNDS = [
    ("direct", "unix", SMALL, 4.0),
    ("gloo", "bare gloo", SMALL, 1.3),
    ("direct", "tcp", LARGE, 1.0),
    ("gloo", "tcp", LARGE, 1.5),
]

LOCATION = "model.layers.0.output"
REQUEST = "measured"
_REQUEST = struct.Struct("<Q8x")
_WARM_UP = 2


def run() -> dict[str, Any]:
    """Measure; the result is plain data.

    Returns:
        ``cells``: each way and payload, in microseconds; ``ratios``: each bound with what
        was found; ``load``: the machine's load average before.
    """
    load = os.getloadavg()[0]
    context = multiprocessing.get_context("spawn")
    unix = socket.socketpair()
    tcp = _tcp_pair()
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="ppcore-bench-") as folder:
        store = str(Path(folder, "store"))
        processes = [
            context.Process(target=_owner, args=(store, unix[0], tcp[0])),
            context.Process(target=_puller, args=(store, unix[1], tcp[1], theirs)),
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            cells = mine.recv()
        except EOFError:
            raise RuntimeError("a rank of the benchmark failed; its error is above") from None
        finally:
            for process in processes:
                process.join(20)
                if process.is_alive():
                    process.kill()
    found = {(cell["way"], cell["bytes"]): cell["median_us"] for cell in cells}
    ratios = [
        {
            "way": way,
            "against": bare,
            "bytes": size,
            "ratio": round(found[way, size] / found[bare, size], 2),
            "at_most": most,
        }
        for way, bare, sizes, most in BOUNDS
        for size in sizes
    ]
    return {"cells": cells, "ratios": ratios, "load": load}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'bytes':>10}  {'way':<10}{'median us':>12}{'p90 us':>12}{'least us':>12}"]
    for cell in result["cells"]:
        figures = "".join(f"{cell[name]:>12.1f}" for name in ("median_us", "p90_us", "least_us"))
        lines.append(f"{cell['bytes']:>10}  {cell['way']:<10}{figures}")
    for found in result["ratios"]:
        verdict = "" if found["ratio"] <= found["at_most"] else "  OVER"
        lines.append(
            f"{found['bytes']:>10}  {found['way']} / {found['against']}: {found['ratio']:.2f} "
            f"(at most {found['at_most']}){verdict}"
        )
    lines.append(f"load average before: {result['load']:.1f} on {os.cpu_count()} cores")
    return "\n".join(lines)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        came, _ = listener.accept()
    for found in (dialled, came):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return came, dialled


# --- what both ranks do ---------------------------------------------------------------------------


def join(stage: int, store: str) -> None:
    """This process is a rank of two, on a core of its own, in a group that meets at the file ``store``."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[stage % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=stage,
        world_size=2,
        timeout=timedelta(seconds=120),
    )


def _transports() -> dict[str, Transport]:
    return {kind: connect([[0, 1]], kind) for kind in ("direct", "gloo")}


class _Rank:
    """A link of which a worker reads one location a turn.

    Each turn has a worker of its own: one that pulled the same in every turn would have the next turn's value
    sent ahead, and nothing would be left to measure.
    """

    def __init__(self, stage: int, transport: Transport) -> None:
        self.core = Core(stage, Schedule.build([[LOCATION], ["model.logits"]]), {})
        self.link = Link(self.core, transport, torch.device("cpu"))
        self._reads = 0

    def read(self) -> Any:
        """The next worker's read, in a new turn."""
        self.link.open_round([REQUEST])
        self._reads += 1
        worker = Worker(REQUEST, str(self._reads))
        self.core.start(worker)
        return self.core.access(worker, LOCATION, self.core.wanted(worker, LOCATION))


# --- the first stage: has the values --------------------------------------------------------------


def _owner(store: str, unix: socket.socket, tcp: socket.socket) -> None:
    join(0, store)
    source = torch.ones(max(LARGE), dtype=torch.uint8)
    out, back = (dist.new_group([0, 1], backend="gloo") for _ in range(2))
    ranks = {kind: _Rank(0, found) for kind, found in _transports().items()}
    threads = [
        threading.Thread(target=_answer_on_socket, args=(found, source), daemon=True)
        for found in (unix, tcp)
    ]
    threads.append(threading.Thread(target=_answer_on_gloo, args=(out, back, source), daemon=True))
    for thread in threads:
        thread.start()
    orders = [None]
    while True:
        dist.broadcast_object_list(orders, src=1)
        if orders[0] is None:
            break
        kind, size, count = orders[0]
        for _ in range(count if kind in ranks else 0):
            rank = ranks[kind]
            decision = rank.read()
            rank.core.served(decision.key.worker, decision.place)
            rank.link.publish(decision.key, LOCATION, source[:size].view(torch.float32))
            rank.link.close_round()
        dist.barrier()
    for thread in threads:
        thread.join()
    for rank in ranks.values():
        rank.link.close()


def _answer_on_socket(connected: socket.socket, source: torch.Tensor) -> None:
    view, request = memoryview(source.numpy()), memoryview(bytearray(_REQUEST.size))
    while True:
        _receive(connected, request)
        (size,) = _REQUEST.unpack(request)
        if not size:
            return
        connected.sendall(view[:size])


def _answer_on_gloo(out: Any, back: Any, source: torch.Tensor) -> None:
    request = torch.zeros(_REQUEST.size, dtype=torch.uint8)
    posted = dist.irecv(request, src=1, group=out)
    while True:
        posted.wait()
        (size,) = _REQUEST.unpack(request.numpy())
        if not size:
            return
        posted = dist.irecv(request, src=1, group=out)
        dist.send(source[:size], dst=1, group=back)


def _receive(connected: socket.socket, view: memoryview) -> None:
    have = 0
    while have < len(view):
        have += connected.recv_into(view[have:])


# --- the second stage: pulls, and measures --------------------------------------------------------


def _puller(store: str, unix: socket.socket, tcp: socket.socket, results: Any) -> None:
    join(1, store)
    target = torch.ones(max(LARGE), dtype=torch.uint8)
    view = memoryview(target.numpy())
    out, back = (dist.new_group([0, 1], backend="gloo") for _ in range(2))
    ranks = {kind: _Rank(1, found) for kind, found in _transports().items()}

    def on_socket(connected: socket.socket, size: int) -> float:
        begin = time.perf_counter()
        connected.sendall(_REQUEST.pack(size))
        if size:
            _receive(connected, view[:size])
        return time.perf_counter() - begin

    def on_gloo(size: int) -> float:
        request = torch.frombuffer(bytearray(_REQUEST.pack(size)), dtype=torch.uint8)
        posted = dist.irecv(target[:size], src=0, group=back) if size else None
        begin = time.perf_counter()
        dist.send(request, dst=0, group=out)
        if posted is not None:
            posted.wait()
        return time.perf_counter() - begin

    def prepare(kind: str, size: int, count: int) -> list[Any]:
        dist.broadcast_object_list([(kind, size, count)], src=1)
        decisions = [ranks[kind].read() if kind in ranks else None for _ in range(count)]
        dist.barrier()  # the values are there
        time.sleep(0.001)  # gloo's threads are idle again
        return decisions

    def pull(kind: str, size: int, decision: Any) -> float:
        rank = ranks[kind]
        base = Base(rank.link, decision.key, LOCATION, 0, Available(decision.place.turn, 0))
        read = lazy.leaf(base, (), (size // 4,), torch.float32, torch.device("cpu"))
        begin = time.perf_counter()
        value = lazy.force(read)
        took = time.perf_counter() - begin
        if value.nbytes != size or int(value.view(torch.uint8)[-1]) != 1:
            raise AssertionError("what came is not what was read")
        del value, read, base
        rank.link.close_round()
        return took

    ways: dict[str, Callable[[int, Any], float]] = {
        "unix": lambda size, decision: on_socket(unix, size),
        "tcp": lambda size, decision: on_socket(tcp, size),
        "bare gloo": lambda size, decision: on_gloo(size),
        "direct": lambda size, decision: pull("direct", size, decision),
        "gloo": lambda size, decision: pull("gloo", size, decision),
    }
    order = deque(ways)
    cells = []
    gc.disable()
    for size in SMALL + LARGE:
        small = size in SMALL
        repetitions, run = (SMALL_REPETITIONS, SMALL_RUN) if small else (LARGE_REPETITIONS, 1)
        took: dict[str, list[float]] = {way: [] for way in ways}
        for repetition in range(_WARM_UP + repetitions):
            order.rotate()
            for way in order:
                seconds = [ways[way](size, found) for found in prepare(way, size, run)]
                if repetition >= _WARM_UP:
                    took[way] += seconds
        for way, seconds in took.items():
            cells.append(
                {
                    "way": way,
                    "bytes": size,
                    "median_us": round(statistics.median(seconds) * 1e6, 1),
                    "least_us": round(min(seconds) * 1e6, 1),
                    "p90_us": round(statistics.quantiles(seconds, n=10)[-1] * 1e6, 1),
                    "count": len(seconds),
                }
            )
    results.send(cells)
    on_socket(unix, 0), on_socket(tcp, 0), on_gloo(0)
    dist.broadcast_object_list([None], src=1)
    for rank in ranks.values():
        rank.link.close()
