"""A core that records what happens to it: what a rank's protocol log is made of.

A record is text, one line for each thing, in the order in which the core saw them. It opens with a
header that says which rank this is and what a core of it is built from. Then, flush left, come the
*events*: a method of the core, its arguments as JSON, and after ``=`` what it answered. Indented below
an event stand the *effects* that the core asked for. Messages are spelled as everywhere::

    ppcore-record 1 {"stage":1,"stages":2,"column":0,"visits":[["a.output"],["b.output"]],"homes":{}}
    open_round [["r"]]
    start [["r",""]]
    access [["r",""],"a.output",0] = ["answer",[["r",""],0],[0,0],0]
    pull [[["r",""],0],"a.output","(the expression)",0,[0,0]] = 1
      send 0 pull [1,["r","",0],"a.output","(the expression)"]
    wait [[1]]
    take 0 reply [1]
      landed [1,null]
    close []

Payloads are not recorded, only where there were some. What the core is merely asked (where a worker
stands, whether a wait is allowed) is not recorded either: it follows from the rest. A record that
does not end with ``close`` is of a rank that was stopped, or is cut.

[`Recorder`][ppcore.record.Recorder] writes a record and [`perform`][ppcore.record.perform] does an
event of one again, on any core; nothing here opens a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .core import Available, Core, Decision, Verdict
from .effects import Abandoned, Compute, Describe, Dropped, Effect, Landed, Send, Serve
from .messages import Key, Message, Worker, parse, spell
from .schedule import Place, Schedule

_WORD = "ppcore-record"
_VERSION = 1


class Header(NamedTuple):
    """Which rank a record is of, and what its core is built from.

    Attributes:
        visits: for each stage, the locations that its forward visits, in order.
        homes: module path -> the stages on which the module is real.
    """

    stage: int
    column: int
    visits: list[list[str]]
    homes: dict[str, list[int]]

    @property
    def stages(self) -> int:
        return len(self.visits)

    @classmethod
    def of(cls, core: Core, column: int) -> Header:
        """The header of a core's record."""
        schedule = core.schedule
        visits: list[list[tuple[int, str]]] = [[] for _ in range(schedule.stages)]
        for location, slots in schedule.slots.items():
            for slot in slots:
                visits[slot.stage].append((slot.index, location))
        homes = {path: sorted(stages) for path, stages in core.homes.items()}
        ordered = [[location for _, location in sorted(found)] for found in visits]
        return cls(core.stage, column, ordered, homes)

    def schedule(self) -> Schedule:
        """The order of visits that the ranks agreed on."""
        return Schedule.build(self.visits)

    def spell(self) -> str:
        """The header's line."""
        fields = {"stage": self.stage, "stages": self.stages, **self._asdict()}
        return f"{_WORD} {_VERSION} {_json(fields)}"

    @classmethod
    def parse(cls, line: str) -> Header:
        """The header that a line spells.

        Raises:
            ValueError: the line spells none, or one of another version.
        """
        word, _, rest = line.partition(" ")
        version, _, text = rest.partition(" ")
        if word != _WORD or version != str(_VERSION):
            raise ValueError(f"not the header of a record of version {_VERSION}: {line[:80]!r}")
        try:
            fields = json.loads(text)
            stages = fields.pop("stages")
            header = cls(**fields)
            header.schedule()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"not a header: {line[:80]!r}") from error
        if header.spell() != line or stages != header.stages or header.stage not in range(stages):
            raise ValueError(f"not a header: {line[:80]!r}")
        return header


class Event(NamedTuple):
    """One event of a record: a method of the core, its arguments, its answer as JSON's value."""

    word: str
    args: tuple[Any, ...]
    answer: Any = None


# --- spelling ---------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    match value:
        case Verdict():
            return value.value
        case Decision():
            return [value.verdict, value.key, value.place, value.owner]
        case frozenset():
            return sorted(value)
    raise TypeError(f"not spelled in a record: {value!r}")


def _strings(value: Any) -> list[str]:
    return [str(item) for item in value]


def _numbers(value: Any) -> list[int]:
    return [int(item) for item in value]


def _worker(value: Any) -> Worker:
    request, block = value
    return Worker(str(request), str(block))


def _key(value: Any) -> Key:
    worker, access = value
    return Key(_worker(worker), int(access))


def _place(value: Any) -> Place:
    turn, index = value
    return Place(int(turn), int(index))


def _available(value: Any) -> Available:
    turn, stage = value
    return Available(int(turn), int(stage))


def _availables(value: Any) -> list[Available]:
    return [_available(item) for item in value]


def _keys(value: Any) -> tuple[Key, ...]:
    return tuple(_key(item) for item in value)


def _released(value: Any) -> list[tuple[int, Key]]:
    return [(int(owner), _key(key)) for owner, key in value]


def _token(value: Any) -> Any:
    return True if value else None


#: Event -> how its arguments are read from JSON. These are the methods by which a core changes, but
#: for those whose last argument is a message (see `_MESSAGES`).
_ARGUMENTS: Mapping[str, tuple[Callable[[Any], Any], ...]] = {
    "open_round": (_strings,),
    "will_leave_round": (),
    "leave_round": (),
    "start": (_worker,),
    "access": (_worker, str, int),
    "again": (_key, str, int),
    "served": (_worker, _place),
    "call": (_worker, str, frozenset, bool, _availables),
    "give": (_key, str, int, str, _token, _keys),
    "computed": (_key, str, _token, int),
    "pull": (_key, str, str, int, _available),
    "probe": (int, str),
    "wait": (_numbers,),
    "publish": (_key, str, _token, int),
    "forget": (_key,),
    "release": (_released,),
    "finish": (_worker,),
    "fail": (_worker, str),
    "end": (str,),
    "say_held": (str, str),
    "say_done": (str,),
    "peer_died": (int, str),
    "close": (),
}

#: Events that are spelled ``take PEER MESSAGE``; a payload is not spelled.
_MESSAGES = frozenset({"take", "sent_reply"})

#: Events with a payload among their arguments, and where: only whether there is one is spelled.
_TOKENS = {"publish": 2, "computed": 2, "give": 4}

#: Every event, by the name of the core's method.
EVENTS = frozenset({*_ARGUMENTS, *_MESSAGES})


def _spell_call(word: str, args: tuple[Any, ...]) -> str:
    if word in _MESSAGES:
        return f"{word} {args[0]} {spell(args[1])}"
    if word in _TOKENS:
        at = _TOKENS[word]
        args = (*args[:at], args[at] is not None, *args[at + 1 :])
    return f"{word} {_json(args)}"


def spell_effect(effect: Effect) -> str:
    """An effect's line, without what stands before it."""
    match effect:
        case Send(peer, message):
            return f"send {peer} {spell(message)}"
        case Serve(peer, number, key, expression):
            return f"serve {_json([peer, number, key, expression])}"
        case Compute(peer, key, location, call):
            return f"compute {_json([peer, key, location, call])}"
        case Describe(peer, number, call):
            return f"describe {_json([peer, number, call])}"
        case Landed(number, _, reason):
            return f"landed {_json([number, reason])}"
        case Abandoned(worker, access, error):
            return f"abandoned {_json([worker, access, error])}"
        case Dropped(request):
            return f"dropped {_json([request])}"


def parse_event(line: str) -> Event:
    """The event that a line spells.

    Raises:
        ValueError: the line spells none.
    """
    word, _, rest = line.partition(" ")
    try:
        if word in _MESSAGES:
            return Event(word, parse_message(rest))
        values, end = json.JSONDecoder().raw_decode(rest)
        answer = json.loads(rest[end + 3 :]) if rest[end : end + 3] == " = " else None
        args = (read(v) for read, v in zip(_ARGUMENTS[word], values, strict=True))
        return Event(word, tuple(args), answer)
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not an event: {line[:200]!r}") from error


def parse_message(text: str) -> tuple[int, Message]:
    """The peer and the message that ``text``, the end of a line, spells.

    Raises:
        ValueError: the text spells none.
    """
    peer, _, message = text.partition(" ")
    return int(peer), parse(message)


# --- recording --------------------------------------------------------------------------------


class Recorder(Core):
    """A core that records what happens to it.

    Args:
        log: called with each line of the record, before the core's caller goes on.
        column: the tensor-parallel column of this rank.
    """

    def __init__(
        self,
        stage: int,
        schedule: Schedule,
        homes: Mapping[str, Iterable[int]],
        log: Callable[[str], None],
        column: int = 0,
    ) -> None:
        super().__init__(stage, schedule, homes)
        self._log = log
        # What a method of the core calls of itself is no event.
        self._inside = False
        log(Header.of(self, column).spell())

    def _record(self, word: str, args: tuple[Any, ...]) -> Any:
        method = getattr(super(), word)
        if self._inside:
            return method(*args)
        # An iterable that can be walked once is spelled and handed on.
        args = tuple(list(arg) if hasattr(arg, "__next__") else arg for arg in args)
        line = _spell_call(word, args)
        self._inside = True
        try:
            result = method(*args)
        except Exception as error:
            self._log(f"{line} ! {type(error).__name__}: {error}")
            raise
        finally:
            self._inside = False
        answer, effects = _split(result)
        self._log(line if answer is None else f"{line} = {_json(answer)}")
        for effect in effects:
            self._log(f"  {spell_effect(effect)}")
        return result


def _split(result: Any) -> tuple[Any, list[Effect]]:
    """What a method of the core returned: its answer, and the effects."""
    if isinstance(result, list):
        return None, result
    if isinstance(result, tuple) and isinstance(result[1], list):
        return result
    return result, []


def _recording(word: str) -> Callable[..., Any]:
    def method(self: Recorder, *args: Any) -> Any:
        return self._record(word, args)

    method.__name__ = word
    method.__doc__ = getattr(Core, word).__doc__
    return method


for _word in EVENTS:
    setattr(Recorder, _word, _recording(_word))


def perform(core: Core, event: Event) -> None:
    """Let an event happen to a core."""
    getattr(core, event.word)(*event.args)
