"""How a message and its payload lie in bytes: a fixed binary header, then text, then payload.

A transport that works in blocks (gloo posts receives of a size it must know beforehand) sends what fits
into a first block of [`BLOCK`][ppcore.wire.BLOCK] bytes, and the rest only where there is one; the
header, first in the first block, says how long both parts are. Nothing here is pickled, and no size
that a peer claims is believed beyond the limits below.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

#: Most bytes of a frame's first block: room for a payload of 64 KiB beside its message.
BLOCK = 72 * 1024

#: Longest text and longest payload that are accepted, in bytes.
TEXT_LIMIT = 64 * 1024 * 1024
PAYLOAD_LIMIT = 64 * 1024 * 1024 * 1024

_MAGIC = b"PPC1"
_HEADER = struct.Struct("<4sIQ")

#: Bytes of the header.
HEADER = _HEADER.size


class Sizes(NamedTuple):
    """What a frame consists of behind its header, in bytes."""

    text_bytes: int
    payload_bytes: int

    @property
    def rest_bytes(self) -> int:
        """What does not fit into the first block."""
        return max(0, HEADER + self.text_bytes + self.payload_bytes - BLOCK)


def header(text_bytes: int, payload_bytes: int) -> bytes:
    """The header of a frame.

    Raises:
        ValueError: a part is over its limit.
    """
    if text_bytes > TEXT_LIMIT or payload_bytes > PAYLOAD_LIMIT:
        raise ValueError(f"a message of {text_bytes} + {payload_bytes} bytes is over the limit")
    return _HEADER.pack(_MAGIC, text_bytes, payload_bytes)


def sizes(block: bytes | bytearray | memoryview) -> Sizes:
    """What the header at the start of ``block`` says.

    Raises:
        ValueError: there is no header, or it claims more than is allowed.
    """
    if len(block) < HEADER:
        raise ValueError(f"a header has {HEADER} bytes, not {len(block)}")
    magic, text_bytes, payload_bytes = _HEADER.unpack_from(block)
    if magic != _MAGIC:
        raise ValueError(f"not a frame: it begins with {bytes(magic)!r}")
    if text_bytes > TEXT_LIMIT or payload_bytes > PAYLOAD_LIMIT:
        raise ValueError(f"a frame that claims {text_bytes} + {payload_bytes} bytes is refused")
    return Sizes(text_bytes, payload_bytes)
