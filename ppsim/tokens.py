"""Replay tokens: a case and its schedule in a few characters that replay by themselves.

A token is the text of the case and of its switches, compressed against a dictionary of the phrases
that such texts are made of, in the alphabet of URLs. It holds everything: no file, no seed and no
generator are needed to replay it, and it stays good as the language grows.

The first character is the dictionary's version. A dictionary never changes; another one is added.
"""

from __future__ import annotations

import base64
import re
import zlib

from . import cases
from .cases import Case
from .strategies.switches import Switch

# Phrases in the spelling of `cases` and `strategies.switches`, with the names that shrinking gives.
_DICTIONARIES = {
    "1": """\
 ignore_eos
block A tap
fault die 0 0 fault raise 1 0 A 1
fault raise 2 0 A 0
fault raise 0 0 A 2
 shared 1 batching stages 4 columns 2 layers 2 shared 0 batching
request C tokens 3
request B tokens 2
  stop
  raise 1
  c = call E b
  a = read L0.ghost
  blend a b
  for [0,2]
  for 2:
  for 1:3
  for 0:2
    save x b
    append x a
    b = read samples
    b = read L1.in
    a = read L0.out
  b = call N a
  write L2.in a
  write L1.in a
  write L1.out a
  c = mix a b
  b = derive a 1
  edit b 1
  edit a 1
  save x b
  append x a
  save x a
  if b
  if a
    c = read L2.out
    b = read logits
  c = read L2.in
  b = read L2.out
  b = read L1.out
  b = read samples
  a = read result
  a = read L0.in
  a = read L2.out
  a = read L1.in
  a = read logits
  a = read L1.out
  for :
    a = read L1.out
    a = read L0.out
engine@>l0<2 f2@1>l1<2 f1@1>l2<1 f2@1>l2<0 f0@1>l0<1 f1@2>l0<1 f1@1>l1<0 f0@1>f1 f1@1>f0
stages 3 columns 1 layers 1 shared 0 batching 0
request A tokens 2
  a = read L1.out
stages 2 columns 1 layers 1 shared 0 batching 0
request A tokens 1
  a = read L0.out
""",
}
_VERSION = "1"


def encode(case: Case, switches: tuple[Switch, ...] = ()) -> str:
    """The token of a case under a schedule."""
    text = cases.spell(case) + _short(" ".join(map(str, switches)))
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=_DICTIONARIES[_VERSION].encode())
    packed = packer.compress(text.encode()) + packer.flush()
    return _VERSION + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode(token: str) -> tuple[Case, tuple[Switch, ...]]:
    """The case and the switches of a token.

    Raises:
        ValueError: it is not a token.
    """
    version, body = token[:1], token[1:]
    if not version or version not in _DICTIONARIES:
        raise ValueError(f"not a token: {token!r}")
    unpacker = zlib.decompressobj(-15, zdict=_DICTIONARIES[version].encode())
    try:
        packed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        *lines, last = unpacker.decompress(packed).decode().split("\n")
        case, switches = (
            cases.parse("\n".join(lines)),
            tuple(map(Switch.parse, _long(last).split())),
        )
    except (ValueError, zlib.error) as error:
        raise ValueError(f"not a token: {token!r}") from error
    if not unpacker.eof or not case.requests:
        raise ValueError(f"not a whole token: {token!r}")
    return case, switches


def _short(switches: str) -> str:
    """Without the column of tasks that are in column 0, as most are."""
    short = re.sub(r"\b([fl]\d+)\.0(?=\D|$)", r"\1", switches)
    return short if _long(short) == switches else switches


def _long(switches: str) -> str:
    return re.sub(r"\b([fl]\d+)(?=[@<> ]|$)", r"\1.0", switches)
