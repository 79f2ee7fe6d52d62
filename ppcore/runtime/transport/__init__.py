"""Carrying frames between the ranks of a column.

A transport delivers whole frames (a text and a payload) from one stage to another, in order per
pair, and reports a dead peer once. `send` takes the payload as a sequence of buffers, so that a
tensor's memory goes out as it lies, and never blocks. There are two:

- [`DirectTransport`][ppcore.runtime.transport.DirectTransport]: a socket for each pair, Unix-domain on
  one host and TCP between hosts. A small message takes tens of microseconds.
- [`GlooTransport`][ppcore.runtime.transport.GlooTransport]: torch's own process groups. Slower for small
  messages, and there wherever the engine runs.

[`connect`][ppcore.runtime.transport.connect] chooses. The sockets are negotiated over a gloo group: ranks
tell each other where they listen and share a secret, connect, and prove to each other that they know
it. Only if every pair of every column succeeds is the direct transport used; the verdicts are gathered
over gloo too, so that no two ranks decide differently.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch.distributed as dist

from ...errors import SetupError
from .base import BYE, Buffer, OnDeath, OnFrame, Transport
from .direct import DirectTransport
from .gloo import GlooTransport
from .meeting import negotiate

__all__ = [
    "BYE",
    "CHOICES",
    "Buffer",
    "DirectTransport",
    "GlooTransport",
    "OnDeath",
    "OnFrame",
    "Transport",
    "connect",
]

#: A thread that listens waits at most so long for one that runs plain Python, in seconds. With
#: Python's own 5 ms, a pull from a rank that is in the middle of a block's Python takes 24 ms; with
#: this, 0.3 ms. torch lets other threads run by itself.
SWITCH_S = 1e-4

#: What a user may ask for.
CHOICES = ("auto", "direct", "gloo")

_log = logging.getLogger(__name__)


def connect(
    columns: Sequence[Sequence[int]], choice: str = "auto", host: str | None = None
) -> Transport:
    """This rank's transport to the other stages of its column.

    Collective: every rank of the world calls it with the same ``columns`` and ``choice``. It also
    shortens the interpreter's thread switch interval, see `SWITCH_S`.

    Args:
        columns: the global ranks of every column, in stage order.
        choice: one of `CHOICES`; "auto" is the direct transport where it can be had, else gloo.
        host: this host's address on the network between the ranks, where ``GLOO_SOCKET_IFNAME``
            names no interface; None asks the resolver, as gloo does.

    Raises:
        SetupError: "direct" was asked for and some pair could not connect. Raised on every rank.
        ValueError: ``choice`` is none, or this rank is in no column.
    """
    if choice not in CHOICES:
        raise ValueError(f"transport={choice!r} is not one of {', '.join(CHOICES)}")
    if sys.getswitchinterval() > SWITCH_S:
        sys.setswitchinterval(SWITCH_S)
    me = dist.get_rank()
    if not any(me in ranks for ranks in columns):
        raise ValueError(f"rank {me} is in no column of {columns!r}")
    if choice != "gloo":
        (ranks,) = (list(ranks) for ranks in columns if me in ranks)
        sockets, problems = negotiate(ranks, host)
        if not problems:
            return DirectTransport(ranks.index(me), sockets)
        text = "; ".join(problems)
        if choice == "direct":
            raise SetupError(f"transport='direct': the ranks could not connect: {text}")
        _log.warning("pulls go over gloo, which is slower for small ones: %s", text)
    return GlooTransport.create(columns)
