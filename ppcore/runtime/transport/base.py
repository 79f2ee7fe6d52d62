"""What every transport is, and what transports share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

#: Bytes in one piece.
Buffer = bytes | bytearray | memoryview

#: Called with (peer stage, text, payload) from a receiving thread, which is in inference mode. The
#: payload's memory is the callee's from then on, to keep and to change.
OnFrame = Callable[[int, str, memoryview], None]
#: Called with (peer stage, reason) once when a peer is gone.
OnDeath = Callable[[int, str], None]

#: The text of a sender's last frame; the receiver stops listening.
BYE = "bye []"


class Transport(Protocol):
    """What the link needs of a transport."""

    def start(self, on_frame: OnFrame, on_death: OnDeath) -> None:
        """Begin to receive."""

    def send(self, peer: int, text: str, payload: Sequence[Buffer] = ()) -> None:
        """Queue a frame for the rank of stage ``peer``; returns at once, on any thread.

        It never blocks, and takes no lock that is held through blocking I/O, so the caller may hold
        a lock of its own.

        Args:
            payload: the payload's bytes, in pieces. They are not copied: whoever sends leaves their
                memory as it is.
        """

    def close(self, timeout_s: float = 2.0) -> bool:
        """Say goodbye to every peer and stop; whether everything ended in time."""


class Deaths:
    """Passes on that a peer is gone: once for each, and not while this rank itself leaves."""

    def __init__(self, on_death: OnDeath, closing: Callable[[], bool]) -> None:
        self._on_death = on_death
        self._closing = closing
        self._told: set[int] = set()
        self._lock = threading.Lock()

    def tell(self, peer: int, reason: str | BaseException) -> None:
        """``peer`` is gone."""
        if isinstance(reason, BaseException):
            reason = (str(reason) or type(reason).__name__).splitlines()[0]
        with self._lock:
            if peer in self._told or self._closing():
                return
            self._told.add(peer)
        self._on_death(peer, reason)


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A running thread that does not keep the process alive."""
    thread = threading.Thread(target=run, name=f"ppcore-{name}", daemon=True)
    thread.start()
    return thread
