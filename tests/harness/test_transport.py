"""What every transport has to do, run between real processes. A new one is added to `TRANSPORTS`."""

from __future__ import annotations

import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ppcore import wire
from ppcore.errors import SetupError
from ppcore.runtime.transport import (
    SWITCH_S,
    DirectTransport,
    GlooTransport,
    Transport,
    connect,
    meeting,
)
from tests.harness.cluster import Cluster
from tests.harness.stage import Stage


def gloo(stage: Stage) -> Transport:
    found = connect([list(range(stage.stages))], "gloo")
    assert isinstance(found, GlooTransport)
    return found


def direct(stage: Stage) -> Transport:
    """What is chosen where nothing is asked for: sockets of one host."""
    found = connect([list(range(stage.stages))])
    assert isinstance(found, DirectTransport)
    return found


def between_hosts(stage: Stage) -> Transport:
    """The same where no two ranks take each other for neighbours."""
    with patch.object(meeting, "machine", lambda: f"host {stage.stage}"):
        return connect([list(range(stage.stages))], "direct", "127.0.0.1")


def gloo_beside_cuda(stage: Stage) -> Transport:
    """The same in processes that have work under way on a device."""
    stage.work = torch.ones(4096, 4096, device="cuda") @ torch.ones(4096, 4096, device="cuda")  # type: ignore[attr-defined]
    return gloo(stage)


#: Name -> how a stage makes its end; collective over the column.
TRANSPORTS: dict[str, Callable[[Stage], Transport]] = {
    "gloo": gloo,
    "direct": direct,
    "direct between hosts": between_hosts,
    "gloo beside cuda": gloo_beside_cuda,
}

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = [
    "gloo",
    "direct",
    "direct between hosts",
    pytest.param("gloo beside cuda", marks=[pytest.mark.gpu, NO_CUDA]),
]

WAIT_S = 30.0


class Box:
    """What arrives at one end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.frames: list[tuple[int, str, int, int]] = []
        self.deaths: list[tuple[int, str]] = []
        # Whether the threads that took frames were in inference mode.
        self.inferring: set[bool] = set()

    def on_frame(self, peer: int, text: str, payload: memoryview) -> None:
        self.inferring.add(torch.is_inference_mode_enabled())
        found = (peer, text, len(payload), zlib.crc32(payload))
        with self.changed:
            self.frames.append(found)
            self.changed.notify_all()

    def on_death(self, peer: int, why: str) -> None:
        with self.changed:
            self.deaths.append((peer, why))
            self.changed.notify_all()


def payload(size: int, seed: int = 0) -> bytearray:
    return bytearray((torch.arange(size) * 31 + seed).to(torch.uint8).numpy().tobytes())


def arrived(text: str, size: int, seed: int = 0, peer: int = 0) -> tuple[int, str, int, int]:
    return peer, text, size, zlib.crc32(payload(size, seed))


# --- run on the stages ------------------------------------------------------------------------


def join(stage: Stage, kind: str) -> None:
    stage.box, stage.end = Box(), TRANSPORTS[kind](stage)  # type: ignore[attr-defined]
    stage.end.start(stage.box.on_frame, stage.box.on_death)  # type: ignore[attr-defined]


def send(stage: Any, peer: int, frames: list[tuple[str, int, int]]) -> None:
    for text, size, seed in frames:
        stage.end.send(peer, text, [payload(size, seed)])


def send_from_threads(stage: Any, peer: int, threads: int, each: int) -> None:
    def run(number: int) -> None:
        for count in range(each):
            stage.end.send(peer, f"{number} {count}", [payload(100, number)])

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def take(stage: Any, count: int) -> list[tuple[int, str, int, int]]:
    """Wait until so many frames are here; they are taken out."""
    with stage.box.changed:
        if not stage.box.changed.wait_for(lambda: len(stage.box.frames) >= count, WAIT_S):
            raise TimeoutError(f"{len(stage.box.frames)} of {count} frames came")
        found, stage.box.frames = stage.box.frames, []
    return found


def inferring(stage: Any) -> set[bool]:
    return stage.box.inferring


def deaths(stage: Any) -> list[tuple[int, str]]:
    """Wait until a peer is gone."""
    with stage.box.changed:
        stage.box.changed.wait_for(lambda: stage.box.deaths, WAIT_S)
        return list(stage.box.deaths)


def close(stage: Any) -> tuple[bool, list]:
    return stage.end.close(WAIT_S), stage.box.deaths


@pytest.fixture(params=KINDS)
def linked(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Cluster]:
    """Two ranks with a fresh transport, which both close at the end; nobody died meanwhile."""
    cluster.each(join, request.param)
    yield cluster
    for stage, (ended, gone) in enumerate(cluster.each(close)):
        assert ended
        # Whoever closes last hears that the other has left.
        assert gone in ([], [(1 - stage, "it left")])


def test_frames_arrive_whole_and_in_the_order_they_were_sent(linked: Cluster) -> None:
    sizes = [0, 1, 100, 0, 5000, wire.BLOCK, 0, 3, 3 * wire.BLOCK + 7, 10, 0, 0]
    frames = [(f"frame {number}", size, number) for number, size in enumerate(sizes)]
    linked.on(0, send, 1, frames)
    assert linked.on(1, take, len(frames)) == [arrived(*frame) for frame in frames]


@pytest.mark.parametrize("around", [-2, -1, 0, 1, 2])
def test_a_frame_about_as_long_as_a_block_arrives_whole(linked: Cluster, around: int) -> None:
    text = "exactly"
    size = wire.BLOCK - wire.HEADER - len(text) + around
    linked.on(0, send, 1, [(text, size, 3), ("after", 0, 0)])
    assert linked.on(1, take, 2) == [arrived(text, size, 3), arrived("after", 0)]


def test_frames_are_taken_in_inference_mode(linked: Cluster) -> None:
    linked.on(0, send, 1, [("small", 3, 0), ("large", 3 * wire.BLOCK, 0)])
    linked.on(1, take, 2)
    assert linked.on(1, inferring) == {True}


def test_a_big_payload_arrives_whole(linked: Cluster) -> None:
    size = 8 * 1024 * 1024 + 1
    linked.on(0, send, 1, [("big", size, 1)])
    assert linked.on(1, take, 1) == [arrived("big", size, 1)]


def test_a_text_longer_than_a_block_arrives_whole(linked: Cluster) -> None:
    text = "grün " * wire.BLOCK
    linked.on(0, send, 1, [("before", 0, 0), (text, 10, 1), ("after", 0, 0)])
    found = linked.on(1, take, 3)
    assert [frame[1] for frame in found] == ["before", text, "after"]
    assert found[1] == arrived(text, 10, 1)


def test_thousands_of_small_frames_arrive_in_order(linked: Cluster) -> None:
    frames = [(f"small {number}", 0, 0) for number in range(3000)]
    linked.on(0, send, 1, frames)
    assert [frame[1] for frame in linked.on(1, take, 3000)] == [frame[0] for frame in frames]


def test_frames_of_many_threads_arrive_each_once_and_in_each_threads_order(linked: Cluster) -> None:
    linked.on(0, send_from_threads, 1, 8, 50)
    found = linked.on(1, take, 400)
    for number in range(8):
        mine = [frame for frame in found if frame[1].startswith(f"{number} ")]
        assert mine == [arrived(f"{number} {count}", 100, number) for count in range(50)]


def test_both_directions_at_once_do_not_wait_for_each_other(linked: Cluster) -> None:
    frames = [(f"frame {number}", 200_000, number) for number in range(20)]
    for stage in (0, 1):
        linked.send(stage, send, 1 - stage, frames)
    for stage in (0, 1):
        linked.answer(stage)
    for stage in (0, 1):
        expected = [arrived(*frame, peer=1 - stage) for frame in frames]
        assert linked.on(stage, take, 20) == expected


def test_sending_returns_before_the_peer_receives(linked: Cluster) -> None:
    # Both ranks are in `send` before either has been asked to receive anything.
    big = [("big", 8 * 1024 * 1024, 1)]
    linked.on(0, send, 1, big)
    linked.on(1, send, 0, big)
    assert linked.on(1, take, 1) == [arrived(*big[0])]
    assert linked.on(0, take, 1) == [arrived(*big[0], peer=1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_leaves_is_gone_to_who_stays(cluster: Cluster, kind: str) -> None:
    cluster.each(join, kind)
    cluster.send(0, close)
    assert cluster.on(1, deaths) == [(0, "it left")]
    cluster.on(1, close)
    cluster.answer(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_is_killed_is_noticed_by_who_only_listens(tmp_path: Path, kind: str) -> None:
    pair = Cluster(2, tmp_path)
    try:
        pair.wait_ready()
        pair.each(join, kind)
        pair.kill(0)
        ((peer, why),) = pair.on(1, deaths)
        assert (peer, bool(why)) == (0, True)
    finally:
        pair.stop()


# --- lies, and the choice -------------------------------------------------------------------------


def lie(stage: Any, peer: int, raw: bytes) -> None:
    """Send bytes that no transport would."""
    end = stage.end
    if isinstance(end, DirectTransport):
        end._lines[peer].socket.sendall(raw)
    else:
        block = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        dist.send(block, dst=peer, group=end.groups[stage.stage, peer])


def drop(stage: Any) -> None:
    stage.end.close(0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"no frame at all, by any means", "not a frame"),
        (struct.pack("<4sIQ", b"PPC1", 3, wire.PAYLOAD_LIMIT + 1) + b"abc", "is refused"),
        (struct.pack("<4sIQ", b"PPC1", wire.TEXT_LIMIT + 1, 0) + b"abc", "is refused"),
    ],
    ids=["no header", "payload", "text"],
)
def test_a_peer_that_lies_is_gone_with_the_reason(
    cluster: Cluster, kind: str, raw: bytes, why: str
) -> None:
    cluster.each(join, kind)
    cluster.on(0, send, 1, [("before", 10, 1)])
    assert cluster.on(1, take, 1) == [arrived("before", 10, 1)]
    cluster.on(0, lie, 1, raw)
    ((peer, found),) = cluster.on(1, deaths)
    assert peer == 0 and why in found
    cluster.each(drop)


def choose(stage: Stage, choice: str, failing: int) -> str:
    """What a rank ends up with when one rank cannot prove itself to the others."""

    def wrong(key: bytes, *said: bytes) -> bytes:
        return bytes(32)

    broken = patch.object(meeting, "_proof", wrong) if stage.stage == failing else nullcontext()
    with patch.object(meeting, "DEADLINE_S", 1.0), broken:
        try:
            return type(connect([list(range(stage.stages))], choice)).__name__
        except SetupError as error:
            return str(error)


def test_if_one_rank_cannot_connect_every_rank_uses_gloo(cluster: Cluster) -> None:
    for failing in (0, 1):
        assert cluster.each(choose, "auto", failing) == ["GlooTransport"] * 2
    assert cluster.each(choose, "auto", -1) == ["DirectTransport"] * 2
    assert cluster.each(choose, "gloo", -1) == ["GlooTransport"] * 2


def switch_interval_s(stage: Stage) -> float:
    sys.setswitchinterval(0.005)  # Python's own
    connect([list(range(stage.stages))])
    return sys.getswitchinterval()


def test_a_rank_that_runs_plain_python_does_not_keep_its_listeners_waiting(
    cluster: Cluster,
) -> None:
    assert cluster.each(switch_interval_s) == pytest.approx([SWITCH_S] * 2)


def test_who_insists_on_sockets_is_told_on_every_rank_why_there_are_none(cluster: Cluster) -> None:
    one, other = cluster.each(choose, "direct", 1)
    assert one == other
    assert one.startswith("transport='direct': the ranks could not connect: stage 0: ")
