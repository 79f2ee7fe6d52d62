"""What ranks say to each other, and how it is spelled.

Every message prints as one short line that parses back: tests, logs, replay files and error texts
share that spelling. A payload (the bytes of a tensor) never is part of a message; it travels beside
a [`Reply`][ppcore.messages.Reply] or a [`Call`][ppcore.messages.Call].

A value is named by ``(request, worker, access)``: every rank runs the same block, so access ``n`` of
a worker is the same access everywhere. The location rides along to be compared, not to be looked up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple


class Worker(NamedTuple):
    """One intervention block running for one request. ``block`` is ``""`` for the traced one."""

    request: str
    block: str = ""

    def __str__(self) -> str:
        return f"{self.request}/{self.block}" if self.block else self.request


class Key(NamedTuple):
    """The name of a value: access ``access`` of ``worker``."""

    worker: Worker
    access: int

    def __str__(self) -> str:
        return f"{self.worker}#{self.access}"


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask the owner for ``expression`` of the value that ``key`` names."""

    number: int
    key: Key
    location: str
    expression: str = ""


@dataclass(frozen=True, slots=True)
class Pulls:
    """Several pulls at once; each is as if it came by itself."""

    pulls: tuple[Pull, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask what structure a call of one of the owner's modules would return (opaque text)."""

    number: int
    call: str


@dataclass(frozen=True, slots=True)
class Call:
    """Compute a call of the receiver's module at ``location``.

    Its arguments travel beside this, or are the values ``of``, which the receiver has published; ``call``
    (opaque text) says what they are to each other. The result is published there, as the value that
    ``key`` names.
    """

    key: Key
    location: str
    call: str
    of: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to pull or probe ``number``; the payload travels beside it."""

    number: int


@dataclass(frozen=True, slots=True)
class Never:
    """Pull ``number`` cannot be answered, and why."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """The sender cannot force these values any more."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """Which leaves of a finished request's saves the sender holds (opaque text)."""

    request: str
    leaves: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker raised on the sender; ``error`` is opaque text for the client."""

    worker: Worker
    access: int
    error: str


@dataclass(frozen=True, slots=True)
class Done:
    """The sender will pull nothing more of this request."""

    request: str


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender's end of the link closes; nothing follows."""


Message = Pull | Pulls | Probe | Call | Reply | Never | Release | Held | Failed | Done | Bye

#: What each kind of message is called.
WORDS: dict[type[Message], str] = {
    Pull: "pull",
    Pulls: "pulls",
    Probe: "probe",
    Call: "call",
    Reply: "reply",
    Never: "never",
    Release: "release",
    Held: "held",
    Failed: "failed",
    Done: "done",
    Bye: "bye",
}


def pulls_of(message: Message) -> tuple[Pull, ...]:
    """The pulls that a message carries."""
    match message:
        case Pull():
            return (message,)
        case Pulls():
            return message.pulls
    return ()


def _key(key: Key) -> list[object]:
    return [key.worker.request, key.worker.block, key.access]


def _unkey(parts: list[Any]) -> Key:
    request, block, access = parts
    return Key(Worker(str(request), str(block)), int(access))


def _unpull(parts: list[Any]) -> Pull:
    number, key, location, expression = parts
    return Pull(int(number), _unkey(key), str(location), str(expression))


_compact = json.JSONEncoder(separators=(",", ":")).encode
_quote = json.encoder.encode_basestring_ascii
_decode = json.JSONDecoder().raw_decode


def spell(message: Message) -> str:
    """One line of text for ``message``: its word, then its fields as JSON."""
    fields: list[object]
    match message:
        # The first two are written out, since a pull waits for them: the same text in a fifth of the time.
        case Reply():
            return f"reply [{message.number}]"
        case Pull(number, ((request, block), access), location, expression):
            return (
                f"pull [{number},[{_quote(request)},{_quote(block)},{access}],{_quote(location)},"
                f"{_quote(expression)}]"
            )
        case Pulls():
            fields = [
                [pull.number, _key(pull.key), pull.location, pull.expression]
                for pull in message.pulls
            ]
        case Probe():
            fields = [message.number, message.call]
        case Call():
            of = [_key(key) for key in message.of]
            fields = [_key(message.key), message.location, message.call, of]
        case Never():
            fields = [message.number, message.reason]
        case Release():
            fields = [[_key(key) for key in message.keys]]
        case Held():
            fields = [message.request, message.leaves]
        case Failed():
            fields = [*message.worker, message.access, message.error]
        case Done():
            fields = [message.request]
        case Bye():
            fields = []
    return f"{WORDS[type(message)]} {_compact(fields)}"


def parse(text: str) -> Message:
    """The message that ``text`` spells.

    Raises:
        ValueError: the text spells none.
    """
    word, _, rest = text.partition(" ")
    try:
        fields, end = _decode(rest)
        if end != len(rest):
            raise ValueError(f"{len(rest) - end} characters follow")
        match word:
            case "pull":
                return _unpull(fields)
            case "pulls":
                return Pulls(tuple(_unpull(pull) for pull in fields))
            case "probe":
                return Probe(int(fields[0]), str(fields[1]))
            case "call":
                key, location, call, of = fields
                return Call(_unkey(key), str(location), str(call), tuple(_unkey(key) for key in of))
            case "reply":
                return Reply(int(fields[0]))
            case "never":
                return Never(int(fields[0]), str(fields[1]))
            case "release":
                return Release(tuple(_unkey(key) for key in fields[0]))
            case "held":
                return Held(str(fields[0]), str(fields[1]))
            case "failed":
                request, block, access, error = fields
                return Failed(Worker(str(request), str(block)), int(access), str(error))
            case "done":
                return Done(str(fields[0]))
            case "bye":
                return Bye()
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not a message: {text[:200]!r}") from error
    raise ValueError(f"not a message: {text[:200]!r}")
