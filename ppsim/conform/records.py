"""Records as they are read from files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ppcore.core import STATIC
from ppcore.messages import Key, Message, Worker
from ppcore.record import Event, Header, parse_event, parse_message
from ppcore.schedule import Schedule


class Finding(Exception):
    """Where a record is not what it has to be.

    Attributes:
        property: which property does not hold; ``spelling`` where a line cannot be read.
        file, line: where; line 1 is the header.
        text: what is there, and what was expected.
    """

    def __init__(self, property: str, file: str, line: int, text: str) -> None:
        super().__init__(f"{file}:{line}: {property}: {text}")
        self.property = property
        self.file = file
        self.line = line
        self.text = text


class Step(NamedTuple):
    """An event and what the core asked for: the effects' texts, on the lines below the event's."""

    line: int
    text: str
    event: Event
    effects: list[str]


class Said(NamedTuple):
    """A message as one side of a channel has it; ``step`` is the position of the event."""

    line: int
    step: int
    text: str
    message: Message


@dataclass
class Record:
    """One rank's record.

    Attributes:
        sent, taken: peer -> the messages to and from it, in order.
        closed: whether the record has its end.
    """

    file: str
    header: Header
    steps: list[Step]
    sent: dict[int, list[Said]] = field(default_factory=dict)
    taken: dict[int, list[Said]] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        return bool(self.steps) and self.steps[-1].event.word == "close"

    @property
    def stage(self) -> int:
        return self.header.stage

    @property
    def bereft(self) -> set[int]:
        """The peers that died, as far as this rank knows."""
        return {step.event.args[0] for step in self.steps if step.event.word == "peer_died"}

    @cached_property
    def schedule(self) -> Schedule:
        return self.header.schedule()

    def finding(self, property: str, line: int, text: str) -> Finding:
        return Finding(property, self.file, line, text)


class Run:
    """The records of all ranks."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def column(self, record: Record) -> dict[int, Record]:
        """The ranks of a rank's column, by stage."""
        column = record.header.column
        return {other.stage: other for other in self.records if other.header.column == column}

    def columns(self) -> list[dict[int, Record]]:
        """The ranks of each column, by stage."""
        return [self.column(record) for record in self.records if record.stage == 0]


def read(lines: Sequence[str], file: str) -> Record:
    """The record that the lines of a file spell.

    Raises:
        Finding: a line is none of a record.
    """
    number = 1
    try:
        record = Record(file, Header.parse(lines[0] if lines else ""), [])
        for number, text in enumerate(lines[1:], 2):
            if text.startswith("  "):
                record.steps[-1].effects.append(text[2:])
                if text.startswith("  send "):
                    _said(record.sent, number, len(record.steps) - 1, text[7:])
                continue
            event = parse_event(text)
            record.steps.append(Step(number, text, event, []))
            if event.word == "take":
                _said(record.taken, number, len(record.steps) - 1, text[5:])
            elif event.word == "sent_reply":
                _said(record.sent, number, len(record.steps) - 1, text[11:])
    except (IndexError, ValueError) as error:
        raise Finding("spelling", file, number, str(error)) from error
    return record


def _said(channels: dict[int, list[Said]], line: int, step: int, text: str) -> None:
    peer, message = parse_message(text)
    channels.setdefault(peer, []).append(Said(line, step, text.partition(" ")[2], message))


def named(record: Record) -> Iterator[tuple[Step, Key, int]]:
    """(step, the access's name, the owner) of each access and call; a gated one's again."""
    for step in record.steps:
        match step.event.word, step.event.answer:
            case (("access" | "again"), [_, key, _, owner]):
                yield step, spelled_key(key), owner
            case "call", [key, caller, home, _]:
                # What a home asks for is the receipt for the arguments.
                yield step, spelled_key(key), caller if home == record.stage else home


def spelled_key(spelled: list[object]) -> Key:
    """The name in an answer; one that no access has, where there is none."""
    match spelled:
        case [[str(request), str(block)], int(access)]:
            return Key(Worker(request, block), access)
    return Key(Worker(""), STATIC)


def short(text: str | None) -> str:
    """A line of a record for a finding's text."""
    if text is None:
        return "nothing"
    return repr(text if len(text) < 300 else f"{text[:300]}...")
