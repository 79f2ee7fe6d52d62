"""The direct transport over connected sockets, one end of which a test may hold by hand.

What every transport has to do is in tests/harness/test_transport.py.
"""

from __future__ import annotations

import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")
import torch

from ppcore import wire
from ppcore.runtime.transport import BYE, DirectTransport
from ppcore.runtime.transport.direct import INLINE

WAIT_S = 30.0


class Box:
    """What arrives at an end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.frames: list[tuple[str, bytes]] = []
        self.deaths: list[tuple[int, str]] = []
        self.kept: list[memoryview] = []
        # Whether the threads that took frames were in inference mode.
        self.inferring: set[bool] = set()

    def on_frame(self, peer: int, text: str, payload: memoryview) -> None:
        with self.changed:
            self.inferring.add(torch.is_inference_mode_enabled())
            self.frames.append((text, bytes(payload[:64])))
            self.kept.append(payload)
            self.changed.notify_all()

    def on_death(self, peer: int, why: str) -> None:
        with self.changed:
            self.deaths.append((peer, why))
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), (self.frames, self.deaths)


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[DirectTransport, Box, socket.socket]]:
    """A transport that has started (stage 0), what arrives there, and the peer's socket (stage 1)."""
    if request.param == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
    theirs.settimeout(WAIT_S)
    box, transport = Box(), DirectTransport(0, {1: ours})
    transport.start(box.on_frame, box.on_death)
    yield transport, box, theirs
    theirs.close()
    transport.close()


def frame(text: str, payload: bytes = b"") -> bytes:
    return wire.header(len(text.encode()), len(payload)) + text.encode() + payload


def read(connected: socket.socket, count: int) -> bytearray:
    found = bytearray()
    while len(found) < count:
        more = connected.recv(min(1 << 20, count - len(found)))
        assert more, "it hung up"
        found += more
    return found


def test_frames_are_taken_apart_however_they_are_cut(ends: tuple) -> None:
    _, box, theirs = ends
    sent = [("a", b""), ("b", b"x" * 10), ("c" * 1000, b"y" * 3000), ("d", b"")]
    raw = b"".join(frame(*one) for one in sent)
    for byte in raw[:200]:
        theirs.sendall(bytes([byte]))
    theirs.sendall(raw[200:])
    box.until(lambda: len(box.frames) == 4)
    assert [(text, bytes(kept)) for (text, _), kept in zip(box.frames, box.kept, strict=True)] == (
        sent
    )


def test_frames_are_taken_in_inference_mode(ends: tuple) -> None:
    _, box, theirs = ends
    theirs.sendall(frame("asked"))
    box.until(lambda: len(box.frames) == 1)
    assert box.inferring == {True}


def test_a_payload_is_the_receivers_to_keep_and_to_change(ends: tuple) -> None:
    _, box, theirs = ends
    theirs.sendall(frame("one", b"1" * 100) + frame("two", b"2" * 100))
    theirs.sendall(frame("big", b"3" * (1 << 20)) + frame("end", b"4" * 100))
    box.until(lambda: len(box.frames) == 4)
    for kept in box.kept:
        kept[:1] = b"!"
    assert [bytes(kept[:2]) for kept in box.kept] == [b"!1", b"!2", b"!3", b"!4"]


def test_a_payload_in_pieces_arrives_as_one(ends: tuple) -> None:
    transport, _, theirs = ends
    pieces = [b"one", bytearray(b"two"), memoryview(b"three"), b""]
    transport.send(1, "text", pieces)
    expected = frame("text", b"onetwothree")
    assert read(theirs, len(expected)) == expected


def test_a_peer_that_does_not_read_holds_nobody_up_and_then_gets_all_in_order(ends: tuple) -> None:
    transport, _, theirs = ends
    big = bytes(range(256)) * (16 * 1024)  # far more than sockets hold
    sent = []
    for number in range(6):
        for text, payload in ((f"big {number}", big), (f"small {number}", b"s")):
            transport.send(1, text, [payload])  # all of them return before anything is read
            sent.append(frame(text, payload))
    for expected in sent:
        assert read(theirs, len(expected)) == expected


@pytest.mark.parametrize("size", [INLINE - 100, INLINE, INLINE + 100])
def test_frames_about_as_long_as_a_sender_writes_itself_keep_their_order(
    ends: tuple, size: int
) -> None:
    transport, _, theirs = ends
    sent = [
        frame(f"{number}", bytes([number]) * (size if number % 3 else 5)) for number in range(20)
    ]
    for number in range(20):
        transport.send(1, f"{number}", [bytes([number]) * (size if number % 3 else 5)])
    for expected in sent:
        assert read(theirs, len(expected)) == expected


def test_threads_that_send_at_once_leave_nothing_in_the_queue(ends: tuple) -> None:
    transport, _, theirs = ends

    def run() -> None:
        for _ in range(200):
            transport.send(1, "x", [b"y" * 50])

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    one = frame("x", b"y" * 50)
    assert read(theirs, 1600 * len(one)) == one * 1600
    for thread in threads:
        thread.join()


def test_who_hangs_up_is_gone_once_and_sends_to_it_are_dropped(ends: tuple) -> None:
    transport, box, theirs = ends
    theirs.close()
    box.until(lambda: bool(box.deaths))
    for _ in range(100):
        transport.send(1, "into the void", [bytes(100_000)])
    assert transport.close() is True
    ((peer, why),) = box.deaths
    assert (peer, bool(why)) == (1, True)


def test_who_says_goodbye_has_left(ends: tuple) -> None:
    _, box, theirs = ends
    theirs.sendall(frame("last") + frame(BYE))
    box.until(lambda: bool(box.deaths))
    assert [text for text, _ in box.frames] == ["last"]
    assert box.deaths == [(1, "it left")]


def test_a_peer_that_stays_does_not_keep_a_close_waiting_beyond_its_time(ends: tuple) -> None:
    transport, box, theirs = ends
    transport.send(1, "big", [bytes(1 << 24)])  # its writer is stuck, too
    assert transport.close(0.1) is False
    assert not any(thread.is_alive() for thread in transport._threads)
    assert box.deaths == []


LIES = {
    "no frame": b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
    "text over the limit": struct.pack("<4sIQ", b"PPC1", wire.TEXT_LIMIT + 1, 0),
    "payload over the limit": struct.pack("<4sIQ", b"PPC1", 0, wire.PAYLOAD_LIMIT + 1),
    "text that is no utf-8": wire.header(2, 0) + b"\xff\xff",
}


@pytest.mark.parametrize("raw", LIES.values(), ids=LIES)
def test_a_lie_ends_the_connection(ends: tuple, raw: bytes) -> None:
    _, box, theirs = ends
    theirs.sendall(raw)
    box.until(lambda: bool(box.deaths))
    assert box.frames == []
    assert theirs.recv(1) == b""  # and the other side knows


@pytest.mark.parametrize("text_bytes", [3, wire.TEXT_LIMIT])
def test_announced_bytes_that_do_not_come_cost_no_memory(ends: tuple, text_bytes: int) -> None:
    _, box, theirs = ends
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    theirs.sendall(wire.header(text_bytes, wire.PAYLOAD_LIMIT) + b"abc" + bytes(100_000))
    theirs.shutdown(socket.SHUT_WR)
    box.until(lambda: bool(box.deaths))
    assert box.frames == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


def test_a_frame_that_the_link_cannot_take_ends_the_connection(ends: tuple) -> None:
    _, box, theirs = ends
    box.kept = None  # type: ignore[assignment]  # so that taking a frame raises
    theirs.sendall(frame("one") + frame("two"))
    box.until(lambda: bool(box.deaths))
    assert [text for text, _ in box.frames] == ["one"]
