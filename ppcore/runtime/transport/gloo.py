"""Frames over torch's gloo process groups.

gloo's behaviour shapes it: a send is a rendezvous, a receive can be neither polled nor cancelled, and a
message larger than the posted buffer ends the receiver (a smaller one is fine). A small message takes as
long as a block of a model, so what has queued up while one was under way goes out together. So every
direction of every pair has a group of its own (two ranks that send first do not deadlock), one send at a
time uses each group, receives are of a size that both know (`wire.BLOCK`) and posted before what came
last is looked at, and a listener is ended by a message, not by a time-out.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import wire
from ..threadstate import keep_inferring
from .base import BYE, Buffer, Deaths, OnDeath, OnFrame, start_thread
from .memory import POOL

#: Between the texts of one frame; JSON has no bare line end.
_SEPARATOR = "\n"

#: Every message of a group has the same; one thread at a time sends and one receives.
_TAG = 0

#: Where payloads lie in memory: at multiples of so many bytes.
_ALIGNMENT = 64


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
        self.groups = groups
        self._lines = {
            peer: _Line(rank, groups[stage, peer], groups[peer, stage])
            for peer, rank in enumerate(ranks)
            if peer != stage
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
        deaths = Deaths(on_death, lambda: self._closing)
        for peer, line in self._lines.items():
            name = f"{self.stage}-{peer}"
            self._threads += [
                start_thread(
                    f"send-{name}", lambda p=peer, found=line: self._send_on(p, found, deaths)
                ),
                start_thread(
                    f"listen-{name}",
                    lambda p=peer, found=line: self._listen(p, found, on_frame, deaths),
                ),
            ]

    def send(self, peer: int, text: str, payload: Sequence[Buffer] = ()) -> None:
        self._lines[peer].send((text, payload))

    def close(self, timeout_s: float = 2.0) -> bool:
        self._closing = True
        for peer in self._lines:
            self.send(peer, BYE)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False  # a peer that is gone or stuck; the threads are daemons
        for group in self.groups.values():
            dist.destroy_process_group(group)
        return True

    def _send_on(self, peer: int, line: _Line, deaths: Deaths) -> None:
        try:
            line.send_on()
        except Exception as error:  # gloo raises RuntimeError when the peer is gone
            deaths.tell(peer, error)

    def _listen(self, peer: int, line: _Line, on_frame: OnFrame, deaths: Deaths) -> None:
        keep_inferring()
        try:
            while True:
                texts, payload = line.receive()
                if texts[-1] != BYE:
                    line.post()
                for text in texts[:-1]:
                    on_frame(peer, text, payload[:0])
                if texts[-1] == BYE:
                    deaths.tell(peer, "it left")
                    return
                on_frame(peer, texts[-1], payload)
        except Exception as error:
            deaths.tell(peer, error)


class _Line:
    """Both directions to one peer."""

    def __init__(self, rank: int, out: dist.ProcessGroup, back: dist.ProcessGroup) -> None:
        # `dist.isend` and `dist.irecv` do the same, at three times the cost for a small message.
        self._out, self._target = out, dist.get_group_rank(out, rank)
        self._back, self._source = back, dist.get_group_rank(back, rank)
        self._frames: deque[tuple[str, Sequence[Buffer]]] = deque()
        # The right to use the group `out` and the buffer `_sent`. Who sends takes it without
        # waiting, begins the send and leaves the rest, and the right, to the sending thread.
        self._sending = threading.Lock()
        self._begun: queue.SimpleQueue[list[Callable[[], Any]] | Exception] = queue.SimpleQueue()
        self._said_bye = False
        self._broken = False
        self._sent = torch.zeros(wire.BLOCK, dtype=torch.uint8)
        self._view = memoryview(self._sent.numpy())
        self._received = torch.zeros(wire.BLOCK, dtype=torch.uint8)
        self._received_view = memoryview(self._received.numpy())
        self._posted: Any = None

    # --- sending ------------------------------------------------------------------------------

    def send(self, frame: tuple[str, Sequence[Buffer]]) -> None:
        """Queue a frame, and begin to send it if none is under way."""
        if self._broken:
            return
        self._frames.append(frame)
        if self._sending.acquire(blocking=False):
            try:
                self._begun.put(self._begin())
            except Exception as error:  # the peer is gone; the thread says so
                self._begun.put(error)

    def send_on(self) -> None:
        """The sending thread: see to the end what senders begin, and send what queued up meanwhile."""
        try:
            while True:
                begun = self._begun.get()
                if isinstance(begun, Exception):
                    raise begun
                while begun:
                    for finish in begun:
                        finish()
                    if self._said_bye:
                        return
                    begun = self._begin()
                self._sending.release()
                # A frame that came between the last look and the release.
                if self._frames and self._sending.acquire(blocking=False):
                    self._begun.put(self._begin())
        finally:
            self._broken = True
            self._frames.clear()

    def _begin(self) -> list[Callable[[], Any]]:
        """Begin to send the queue's next frames, if it has any; what is left to do, in order."""
        if not self._frames:
            return []
        text, payload = self._batch()
        coded = text.encode()
        size = sum(len(piece) for piece in payload)
        pieces = [memoryview(wire.header(len(coded), size) + coded)]
        pieces += [memoryview(piece) for piece in payload]
        view, filled = self._view, 0
        while pieces and filled < wire.BLOCK:
            piece, room = pieces[0], wire.BLOCK - filled
            view[filled : filled + len(piece[:room])] = piece[:room]
            filled += len(piece[:room])
            if len(piece) > room:
                pieces[0] = piece[room:]
            else:
                pieces.pop(0)
        left = [piece for piece in pieces if len(piece)]
        self._said_bye = text.endswith(BYE)
        first = self._out.send([self._sent[:filled]], self._target, _TAG)
        if not left:
            return [first.wait]
        return [first.wait, lambda: self._send_rest(left)]

    def _send_rest(self, left: list[memoryview]) -> None:
        """What does not fit the block, as one message: where it lies, if it lies in one piece."""
        whole = left[0] if len(left) == 1 else memoryview(bytearray().join(left))
        self._out.send([bytes_as_tensor(whole)], self._target, _TAG).wait()

    def _batch(self) -> tuple[str, Sequence[Buffer]]:
        """What waits, as one frame: texts up to the first that has a payload, or is the last."""
        text, payload = self._frames.popleft()
        texts, size = [text], len(text)
        while not payload and text != BYE and size < wire.BLOCK // 2 and self._frames:
            text, payload = self._frames.popleft()
            texts.append(text)
            size += len(text)
        return _SEPARATOR.join(texts), payload

    # --- receiving ----------------------------------------------------------------------------

    def post(self) -> None:
        """Let the peer's next block come."""
        self._posted = self._back.recv([self._received], self._source, _TAG)

    def receive(self) -> tuple[list[str], memoryview]:
        """The next frame: its texts, and the payload of the last in memory of its own.

        Raises:
            RuntimeError: the peer is gone.
            ValueError: what came is no frame.
        """
        if self._posted is None:
            self.post()
        self._posted.wait()
        view = self._received_view
        found = wire.sizes(view)
        begin = wire.HEADER + found.text_bytes
        end = begin + found.payload_bytes
        if found.rest_bytes:
            shift = -begin % _ALIGNMENT
            view = POOL.take(shift + end)[shift:]
            view[: wire.BLOCK] = self._received_view
            rest = torch.frombuffer(view[wire.BLOCK :], dtype=torch.uint8)
            self._back.recv([rest], self._source, _TAG).wait()
        text = str(view[wire.HEADER : begin], "utf-8")
        payload = view[begin:end] if found.rest_bytes else memoryview(bytearray(view[begin:end]))
        return text.split(_SEPARATOR), payload


def bytes_as_tensor(piece: memoryview) -> torch.Tensor:
    """A tensor of the same memory, which only reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a read-only buffer; nothing writes to it
        return torch.frombuffer(piece, dtype=torch.uint8)
