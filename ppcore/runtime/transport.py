"""Carrying frames between the ranks of a column.

A transport delivers whole frames (a text and a payload) from one stage to another, in order per
pair, and reports a dead peer once. Sending never blocks the caller: each peer has a thread that
sends and a thread that receives, so that the forward never waits for a lock that is held through I/O.

gloo's behaviour shapes [`GlooTransport`][ppcore.runtime.transport.GlooTransport]: a send is a
rendezvous, a receive can be neither polled nor cancelled, and a message larger than the posted
buffer ends the receiver. A small message takes as long as a block, so what has queued up while one was
under way goes out together. So every direction of every pair has a group of its own (two ranks that
send first do not deadlock), one thread uses each group, receives are of a size that both know
(`wire.BLOCK`), and a listener is ended by a message, not by a time-out.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from .. import wire

#: Called with (peer stage, text, payload) from a receiving thread.
OnFrame = Callable[[int, str, memoryview], None]
#: Called with (peer stage, reason) once when a peer is gone.
OnDeath = Callable[[int, str], None]


class Transport(Protocol):
    """What the link needs of a transport."""

    def start(self, on_frame: OnFrame, on_death: OnDeath) -> None:
        """Begin to receive."""

    def send(self, peer: int, text: str, payload: bytes | bytearray = b"") -> None:
        """Queue a frame for the rank of stage ``peer``; returns at once."""

    def close(self, timeout_s: float = 2.0) -> bool:
        """Say goodbye to every peer and stop; whether everything ended in time."""


#: The text of a sender's last frame; the receiver stops listening.
BYE = "bye []"

#: Between the texts of one frame; JSON has no bare line end.
_SEPARATOR = "\n"


class GlooTransport:
    """Frames over gloo, a process group for each direction of each pair.

    Args:
        stage: this rank's stage.
        ranks: stage -> global rank, for the stages of this column.
        groups: (from stage, to stage) -> the group of that direction.
    """

    def __init__(
        self,
        stage: int,
        ranks: Sequence[int],
        groups: Mapping[tuple[int, int], dist.ProcessGroup],
    ) -> None:
        self.stage = stage
        self.ranks = list(ranks)
        self.groups = groups
        self._queues: dict[int, queue.SimpleQueue] = {
            peer: queue.SimpleQueue() for peer in range(len(ranks)) if peer != stage
        }
        self._threads: list[threading.Thread] = []
        self._closing = False

    @classmethod
    def create(cls, columns: Sequence[Sequence[int]]) -> GlooTransport:
        """Build the groups of every column and this rank's transport.

        Collective: every rank of the world calls it with the same ``columns``, each the global
        ranks of one column in stage order.
        """
        me = dist.get_rank()
        mine: GlooTransport | None = None
        for ranks in columns:
            groups = {
                (source, target): dist.new_group(
                    [ranks[source], ranks[target]], backend="gloo", use_local_synchronization=False
                )
                for source in range(len(ranks))
                for target in range(len(ranks))
                if source != target
            }
            if me in ranks:
                stage = list(ranks).index(me)
                mine = cls(stage, ranks, {p: g for p, g in groups.items() if stage in p})
        if mine is None:
            raise ValueError(f"rank {me} is in no column of {columns!r}")
        return mine

    def start(self, on_frame: OnFrame, on_death: OnDeath) -> None:
        for peer, frames in self._queues.items():
            for name, run in (
                ("send", lambda p=peer, q=frames: self._send_loop(p, q, on_death)),
                ("listen", lambda p=peer: self._listen_loop(p, on_frame, on_death)),
            ):
                thread = threading.Thread(
                    target=run, name=f"ppcore-{name}-{self.stage}-{peer}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def send(self, peer: int, text: str, payload: bytes | bytearray = b"") -> None:
        self._queues[peer].put((text, payload))

    def close(self, timeout_s: float = 2.0) -> bool:
        self._closing = True
        for frames in self._queues.values():
            frames.put((BYE, b""))
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False  # a peer that is gone or stuck; the threads are daemons
        for group in self.groups.values():
            dist.destroy_process_group(group)
        return True

    def _send_loop(self, peer: int, frames: queue.SimpleQueue, on_death: OnDeath) -> None:
        group, target = self.groups[self.stage, peer], self.ranks[peer]
        block = torch.zeros(wire.BLOCK, dtype=torch.uint8)
        view = memoryview(block.numpy())
        while True:
            text, payload = _batch(frames)
            coded = text.encode()
            parts = wire.header(len(coded), len(payload)) + coded
            try:
                if len(parts) + len(payload) <= wire.BLOCK:
                    view[: len(parts)] = parts
                    view[len(parts) : len(parts) + len(payload)] = payload
                    dist.send(block, dst=target, group=group)
                else:
                    whole = bytearray(parts)
                    whole += payload
                    frame = torch.frombuffer(whole, dtype=torch.uint8)
                    view[:] = memoryview(whole)[: wire.BLOCK]
                    dist.send(block, dst=target, group=group)
                    dist.send(frame[wire.BLOCK :], dst=target, group=group)
            except Exception as error:  # gloo raises RuntimeError when the peer is gone
                if not self._closing:
                    on_death(peer, _first_line(error))
                return
            if text.endswith(BYE):
                return

    def _listen_loop(self, peer: int, on_frame: OnFrame, on_death: OnDeath) -> None:
        group, source = self.groups[peer, self.stage], self.ranks[peer]
        block = torch.zeros(wire.BLOCK, dtype=torch.uint8)
        while True:
            try:
                dist.recv(block, src=source, group=group)
                view = memoryview(block.numpy())
                found = wire.sizes(view)
                if found.rest_bytes:
                    frame = torch.empty(wire.BLOCK + found.rest_bytes, dtype=torch.uint8)
                    frame[: wire.BLOCK] = block
                    dist.recv(frame[wire.BLOCK :], src=source, group=group)
                    view = memoryview(frame.numpy())
                end = wire.HEADER + found.text_bytes
                *earlier, last = str(view[wire.HEADER : end], "utf-8").split(_SEPARATOR)
                for text in earlier:
                    on_frame(peer, text, view[:0])
                if last == BYE:
                    if not self._closing:
                        on_death(peer, "it left")
                    return
                on_frame(peer, last, view[end : end + found.payload_bytes])
            except Exception as error:
                if not self._closing:
                    on_death(peer, _first_line(error))
                return


def _batch(frames: queue.SimpleQueue) -> tuple[str, bytes | bytearray]:
    """What waits to be sent, as one frame: texts up to the first that has a payload, or is the last."""
    text, payload = frames.get()
    texts, size = [text], len(text)
    while not payload and text != BYE and size < wire.BLOCK // 2:
        try:
            text, payload = frames.get_nowait()
        except queue.Empty:
            break
        texts.append(text)
        size += len(text)
    return _SEPARATOR.join(texts), payload


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
