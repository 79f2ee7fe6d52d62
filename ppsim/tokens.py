"""Replay tokens: a case and its schedule in a few characters that replay by themselves.

A token is the text of the case and of its switches, compressed, in the alphabet of URLs. It holds
everything: no file, no seed and no generator are needed to replay it, and it stays good as the
language grows.

Compression is arithmetic coding (Witten, Neal, Cleary, Arithmetic Coding for Data Compression, CACM
1987): a text is a number in an interval that each of its bits narrows by the bit's probability, and
the token is the shortest number in what is left. The probability comes from how the bit went on before behind
the same last 0 to 7 characters, the longer ones counting for more. To begin with, that is known from a
dictionary: phrases that such texts are made of.

In the text a task is one letter, and a switch two of them around a number: how many steps its task has
made since the switch before it of the same task: ``j7kj1k`` is ``f0.0@7>f1.0 f0.0@8>f1.0``.

The first character is the version: 1 for tokens that zlib compressed against the first dictionary, 2
for those that spell switches out. What a version means never changes; another one is added.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator
from functools import cache
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits

from . import cases, faults
from .cases import Case
from .strategies.switches import Switch

# Phrases in the spelling of `cases` and `strategies.switches`, with the names that shrinking gives.
_PHRASES = """\
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
"""
#: More of them, since the second version.
_MORE = """\
fault late 1 0 0 0
fault stall 0 0 1 1 8
fault abort A 3
container rows 1
container out 0
request A tokens 1 eos 1
request A tokens 1 n 2
request A tokens 1 stop 1
  c = call N a
  if c
    save x c
  put rows 0 a
  cache k in L0
  a = param N.w
  a = read S.out
\0"""
#: And since the third, which spells switches in letters.
_LETTERS = """\
fault late 0 0 1 0
fault die 1 0 0
fault raise 1 0 A 0
a0ja1jj3kj4nj1n\0
fault late 1 0 0 0
b2aj7kj1kk7jj1kk1jb1jn2j\0
fault late 1 0 0 0
  save x b
k4jk1nl4jl2nn2b\0
  save x a
\0"""
_DICTIONARIES = {"2": _PHRASES + _MORE, "3": _PHRASES + _MORE + _LETTERS}
_VERSION = "3"
_ALPHABET = ascii_uppercase + ascii_lowercase + digits + "-_"
#: The longest context, in characters.
_LONGEST = 7
#: Bits of a probability.
_PRECISION = 16


def encode(case: Case, switches: tuple[Switch, ...] = ()) -> str:
    """The token of a case under a schedule."""
    return _encode(_VERSION, case, switches)


def _encode(version: str, case: Case, switches: tuple[Switch, ...]) -> str:
    short = _short if version == "2" else _lettered
    text = cases.spell(case) + short(case, switches)
    return version + _pack(text.encode() + b"\0", _DICTIONARIES[version])


def decode(token: str) -> tuple[Case, tuple[Switch, ...]]:
    """The case and the switches of a token.

    Raises:
        ValueError: it is not a token.
    """
    version, body = token[:1], token[1:]
    try:
        if version == "1":
            text = _inflate(body)
        else:
            text = _unpack(body, _DICTIONARIES[version])
        *lines, last = text.decode().split("\n")
        case = cases.parse("\n".join(lines))
        switches = _spelt(case, last) if version == "3" else _long(last)
    except (ValueError, KeyError, IndexError, TypeError, zlib.error) as error:
        raise ValueError(f"not a token: {token!r}") from error
    # Every number means some text; a token is the number that its text is encoded as.
    if not case.requests or (version != "1" and _encode(version, case, switches) != token):
        raise ValueError(f"not a whole token: {token!r}")
    return case, switches


def _inflate(body: str) -> bytes:
    """The text of a token of the first version."""
    unpacker = zlib.decompressobj(-15, zdict=_PHRASES.encode())
    text = unpacker.decompress(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    if not unpacker.eof:
        raise ValueError("cut off")
    return text


# --- arithmetic coding ----------------------------------------------------------------------------


class _Model:
    """How likely the next bit is a one, from what has followed the same characters so far."""

    def __init__(self, counts: dict[tuple[bytes, int], tuple[int, int]]) -> None:
        # (The last characters, the next one's bits so far behind a leading one) -> zeros, ones.
        self._counts = counts
        self._behind = b"\n" * _LONGEST
        self._bits = 1

    def ones(self) -> int:
        """The probability of a one, as a share of ``1 << _PRECISION``."""
        ones, both = 1, 2
        for length in range(_LONGEST + 1):
            zero, one = self._counts.get(self._context(length), (0, 0))
            ones += one << length + 1
            both += zero + one << length + 1
        whole = 1 << _PRECISION
        return min(whole - 16, max(16, whole * ones // both))

    def saw(self, bit: int) -> None:
        """The next bit is this one."""
        for length in range(_LONGEST + 1):
            context = self._context(length)
            found = list(self._counts.get(context, (0, 0)))
            found[bit] += 1
            # What went otherwise a while ago says less than what went so last.
            found[1 - bit] = min(found[1 - bit], 1 + found[1 - bit] // 2)
            self._counts[context] = found[0], found[1]
        self._bits = self._bits << 1 | bit
        if self._bits >= 256:
            self._behind = (self._behind + bytes([self._bits & 255]))[-_LONGEST:]
            self._bits = 1

    def _context(self, length: int) -> tuple[bytes, int]:
        return self._behind[_LONGEST - length :], self._bits


@cache
def _learnt(dictionary: str) -> dict[tuple[bytes, int], tuple[int, int]]:
    counts: dict[tuple[bytes, int], tuple[int, int]] = {}
    model = _Model(counts)
    for bit in _bits_of(dictionary.encode()):
        model.saw(bit)
    return counts


def _bits_of(text: bytes) -> Iterator[int]:
    for byte in text:
        yield from (byte >> place & 1 for place in range(7, -1, -1))


def _pack(text: bytes, dictionary: str) -> str:
    model = _Model(dict(_learnt(dictionary)))
    low, width, precision = 0, 1, 0  # the interval, in units of 2 ** -precision
    for bit in _bits_of(text):
        part = width * model.ones()
        low, width, precision = low << _PRECISION, width << _PRECISION, precision + _PRECISION
        low, width = (low, part) if bit else (low + part, width - part)
        model.saw(bit)
    count = max(0, -(-(precision - width.bit_length() + 1) // 6))
    number = -(-(low << 6 * count) >> precision)
    return "".join(_ALPHABET[number >> 6 * place & 63] for place in range(count - 1, -1, -1))


def _unpack(body: str, dictionary: str) -> bytes:
    model = _Model(dict(_learnt(dictionary)))
    above = 0  # how far the number lies above the interval's low end
    for character in body:
        above = above << 6 | _ALPHABET.index(character)
    width, precision, text, bits = 1 << 6 * len(body), 0, bytearray(), 1
    while not text.endswith(b"\0"):
        part = width * model.ones()
        above, width, precision = above << _PRECISION, width << _PRECISION, precision + _PRECISION
        bit = int(above < part)
        above, width = (above, part) if bit else (above - part, width - part)
        if width.bit_length() < precision:
            raise ValueError("cut off")
        model.saw(bit)
        bits = bits << 1 | bit
        if bits >= 256:
            text.append(bits & 255)
            bits = 1
    return bytes(text[:-1])


# --- spelling -------------------------------------------------------------------------------------


def _letters(case: Case) -> dict[str, str]:
    """A letter for each task of a case: the engine, what goes wrong, and the ranks of small layouts."""
    strikes = [faults.task(fault) for fault in case.faults if fault.kind != "raise"]
    names = ["engine", *(strikes + [""] * 8)[:8]]
    for column in range(2):
        names += [f"f{stage}.{column}" for stage in range(4)]
        names += [f"l{a}.{column}<{b}" for a in range(4) for b in range(4) if a != b]
    return {name: letter for name, letter in zip(names, ascii_letters, strict=False) if name}


def _lettered(case: Case, switches: tuple[Switch, ...]) -> str:
    """The switches in letters; spelled out where a task has none."""
    letters = _letters(case)
    found: list[str] = []
    last: dict[str, int] = {}
    for task, step, to in switches:
        if task not in letters or to not in letters:
            return " ".join(map(str, switches))
        found.append(f"{letters[task]}{step - last.get(task, 0)}{letters[to]}")
        last[task] = step
    return "".join(found)


def _spelt(case: Case, text: str) -> tuple[Switch, ...]:
    """The switches that `_lettered` wrote."""
    if ">" in text:
        return tuple(map(Switch.parse, text.split()))
    names = {letter: name for name, letter in _letters(case).items()}
    found: list[Switch] = []
    last: dict[str, int] = {}
    for task, steps, to in re.findall(r"([^-\d])(-?\d+)(.)", text):
        last[task] = last.get(task, 0) + int(steps)
        found.append(Switch(names[task], last[task], names[to]))
    return tuple(found)


def _short(case: Case, switches: tuple[Switch, ...]) -> str:
    """The switches as the second version spells them: without column 0, in which most tasks are."""
    text = " ".join(map(str, switches))
    short = re.sub(r"\b([fl]\d+)\.0(?=\D|$)", r"\1", text)
    return short if _long(short) == switches else text


def _long(text: str) -> tuple[Switch, ...]:
    """The switches that `_short` wrote."""
    long = re.sub(r"\b([fl]\d+)(?=[@<> ]|$)", r"\1.0", text)
    return tuple(map(Switch.parse, long.split()))
