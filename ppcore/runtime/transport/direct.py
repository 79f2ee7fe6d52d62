"""Frames over a stream socket for each pair of stages.

A small frame makes as few steps as it can: whoever sends it writes it to the socket itself, and the
thread that listens at the other end hands it to the link, which answers from that thread. Only what the
socket does not take at once, or is too large to be written on a forward's time, waits for a thread
that writes.

*Sending without a lock.* A frame goes to the end of the peer's queue, then whoever gets the right to
write, without waiting for it, writes what the queue holds. Who does not get it leaves: the holder looks
at the queue again after letting go.

*Memory.* A payload is sent from where it lies. A large one is received into memory of its own, which the
link keeps (see `memory`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from ... import wire
from ..threadstate import keep_inferring
from .base import BYE, Buffer, Deaths, OnDeath, OnFrame, start_thread
from .memory import POOL

#: Frames up to so many bytes are written by who sends them.
INLINE = 128 * 1024

#: Frames up to so many bytes are joined, which takes less time than a call with several buffers.
_JOINED = 16 * 1024

#: Bytes that a listener takes from the socket at a time; a longer frame gets memory of its own.
_TAKEN = 256 * 1024

#: Buffers in one system call; the kernel allows 1024.
_PIECES = 256

#: What a socket may hold that the peer has not taken yet; the kernel has a limit of its own.
_SOCKET_BUFFER = 4 * 1024 * 1024

#: A host that went away without a word is noticed after about so many seconds.
_SILENCE_S = 30

# Python's own are members of an enumeration, which costs more than the call that they are passed to.
_DO_NOT_WAIT = int(socket.MSG_DONTWAIT)
_SEND = int(socket.MSG_NOSIGNAL)


class DirectTransport:
    """Frames over sockets that are connected already.

    Args:
        stage: this rank's stage.
        sockets: peer stage -> a stream socket to it, which now belongs to this transport.
    """

    def __init__(self, stage: int, sockets: Mapping[int, socket.socket]) -> None:
        self.stage = stage
        self._lines = {peer: _Line(found) for peer, found in sockets.items()}
        self._threads: list[threading.Thread] = []
        self._closing = False

    def start(self, on_frame: OnFrame, on_death: OnDeath) -> None:
        deaths = Deaths(on_death, lambda: self._closing)
        for peer, line in self._lines.items():
            name = f"{self.stage}-{peer}"
            self._threads += [
                start_thread(f"write-{name}", line.write_on),
                start_thread(
                    f"listen-{name}",
                    lambda p=peer, found=line: self._listen(p, found, on_frame, deaths),
                ),
            ]

    def send(self, peer: int, text: str, payload: Sequence[Buffer] = ()) -> None:
        coded = text.encode()
        size = sum(len(piece) for piece in payload)
        self._lines[peer].send([wire.header(len(coded), size) + coded, *payload])

    def close(self, timeout_s: float = 2.0) -> bool:
        self._closing = True
        for peer, line in self._lines.items():
            self.send(peer, BYE)
            line.end()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        for line in self._lines.values():
            line.hang_up()
        for thread in self._threads:
            thread.join(1.0)
        for line in self._lines.values():
            line.socket.close()
        return ended

    def _listen(self, peer: int, line: _Line, on_frame: OnFrame, deaths: Deaths) -> None:
        keep_inferring()
        try:
            while (frame := line.receive()) is not None:
                text, payload = frame
                if text == BYE:
                    deaths.tell(peer, "it left")
                    return
                on_frame(peer, text, payload)
            deaths.tell(peer, "it hung up")
        except Exception as error:  # the socket's, or a frame that is none
            deaths.tell(peer, error)
            line.hang_up()


class _Line:
    """One peer's socket: what waits to be written, and what was read and not yet taken apart."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, _SILENCE_S // 3),
                (socket.TCP_KEEPINTVL, _SILENCE_S // 6),
                (socket.TCP_KEEPCNT, 4),
                (socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000),
            ):
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
        else:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        self._frames: deque[list[Buffer]] = deque()
        # The right to write: to the socket, and to the three below.
        self._writing = threading.Lock()
        self._pieces: deque[memoryview] = deque()
        self._left = 0
        self._broken = False
        self._wake = threading.Semaphore(0)
        self._ended = False
        self._block = memoryview(bytearray(_TAKEN))
        self._begin = self._end = 0

    # --- writing ------------------------------------------------------------------------------

    def send(self, frame: list[Buffer]) -> None:
        """Queue a frame, and write what the socket takes at once."""
        self._frames.append(frame)
        if len(self._frames) == 1 and not self._left and self._write_alone():
            return
        while (self._frames or self._left) and self._writing.acquire(blocking=False):
            try:
                done = self._write(wait=False)
            finally:
                self._writing.release()
            if not done:
                self._wake.release()
                return

    def _write_alone(self) -> bool:
        """The usual case, a small frame on an idle line, in few steps; whether that was all."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            if self._left or len(self._frames) != 1 or self._broken:
                return False
            if sum(map(len, self._frames[0])) > _JOINED:
                return False
            whole = b"".join(self._frames[0])
            count = self.socket.send(whole, _SEND | _DO_NOT_WAIT)
            self._frames.popleft()
            if count < len(whole):
                self._pieces.append(memoryview(whole)[count:])
                self._left = len(whole) - count
        except OSError:  # it would block, or the peer is gone: `_write` sees to either
            return False
        finally:
            self._writing.release()
        return not self._frames and not self._left

    def end(self) -> None:
        """Nothing more will be sent: the writing thread ends once the queue is empty."""
        self._ended = True
        self._wake.release()

    def write_on(self) -> None:
        """The writing thread: write what senders leave behind."""
        while True:
            self._wake.acquire()
            while self._frames or self._left:
                with self._writing:
                    self._write(wait=True)
            if self._ended:
                return

    def hang_up(self) -> None:
        """No more of either direction; threads that wait for the socket go on."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is down already

    def _write(self, *, wait: bool) -> bool:
        """Write the queue; whether all of it is written (or never will be)."""
        flags = _SEND | (0 if wait else _DO_NOT_WAIT)
        while self._fill():
            if not wait and self._left > INLINE:
                return False
            some = [piece for piece, _ in zip(self._pieces, range(_PIECES), strict=False)]
            try:
                count = self.socket.sendmsg(some, (), flags)
            except BlockingIOError:
                return False
            except OSError:
                self._broken = True  # the listening thread finds out why, and says so
                continue
            self._left -= count
            while self._pieces and count >= len(self._pieces[0]):
                count -= len(self._pieces.popleft())
            if count:
                self._pieces[0] = self._pieces[0][count:]
        return True

    def _fill(self) -> bool:
        """Take small frames off the queue together; whether there is something to write."""
        if self._broken:
            self._frames.clear()
            self._pieces.clear()
            self._left = 0
        while self._frames and self._left < INLINE // 2:
            for piece in self._frames.popleft():
                if len(piece):
                    self._pieces.append(memoryview(piece))
                    self._left += len(piece)
        return bool(self._pieces)

    # --- reading ------------------------------------------------------------------------------

    def receive(self) -> tuple[str, memoryview] | None:
        """The next frame, its payload in memory of its own; None where the peer hung up.

        Raises:
            ConnectionError: it hung up in the middle of a frame.
            OSError: the socket failed.
            ValueError: what came is no frame.
        """
        if not self._have(wire.HEADER):
            return None
        found = wire.sizes(self._block[self._begin : self._end])
        self._begin += wire.HEADER
        if found.text_bytes + found.payload_bytes <= _TAKEN:
            if not self._have(found.text_bytes + found.payload_bytes):
                raise ConnectionError("it hung up in the middle of a frame")
            text = self._take(found.text_bytes)
            return str(text, "utf-8"), memoryview(bytearray(self._take(found.payload_bytes)))
        text = self._rest(found.text_bytes)
        return str(text, "utf-8"), self._rest(found.payload_bytes)

    def _take(self, count: int) -> memoryview:
        self._begin += count
        return self._block[self._begin - count : self._begin]

    def _have(self, count: int) -> bool:
        """Read until so many bytes are in the block; False where the peer hung up before any."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin + count > _TAKEN:
            kept = bytes(self._block[self._begin : self._end])
            self._begin, self._end = 0, len(kept)
            self._block[: self._end] = kept
        while self._end - self._begin < count:
            got = self.socket.recv_into(self._block[self._end :])
            if not got:
                if self._begin == self._end:
                    return False
                raise ConnectionError("it hung up in the middle of a frame")
            self._end += got
        return True

    def _rest(self, count: int) -> memoryview:
        """So many bytes in memory of their own."""
        whole = POOL.take(count)
        have = min(count, self._end - self._begin)
        whole[:have] = self._take(have)
        while have < count:
            got = self.socket.recv_into(whole[have:], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("it hung up in the middle of a frame")
            have += got
        return whole
