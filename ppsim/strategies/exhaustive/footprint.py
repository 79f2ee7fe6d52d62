"""What a step touches of the state that the threads of one rank share.

The forward and the listeners of a rank meet in the core's tables and in what landed. Here those
tables are replaced, on a live core and link, by ones that note each touch while a step runs: which
table, which key, whether it was changed. From the notes
[`Notes.private`][ppsim.strategies.exhaustive.footprint.Notes.private] decides whether a step of the
forward commutes with everything that any listener of its rank can do before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppcore.core import Core, _Request, _Worker
from ppcore.messages import Message

if TYPE_CHECKING:
    from ...link import Link

#: The key of a touch that concerns a whole table.
ALL = object()


class Unsound(Exception):
    """A step did what the reduction takes for impossible; no verdict follows from it."""


#: One touch: (table, the request or worker it belongs to, key, changed, whether it was there).
Touch = tuple[str, Any, Any, bool, bool]

#: Where touches are noted at the moment.
_noted: list[Touch] | None = None


#: The tables of one request.
_OF_REQUEST = frozenset({"buffer", "waiting", "released", "held", "done", "workers"})


class Granted(Exception):
    """A search took for granted that something does not happen in a case, and it did."""


@dataclass(frozen=True)
class Grants:
    """What can happen in a case; what cannot makes more steps commute.

    That something does not happen is first taken for granted, and watched: the first time that it
    happens in any schedule, nothing before it depends on the grant, so the reduced search meets it
    too. Then the search begins again without.

    Attributes:
        deaths: a rank may die.
        raises: a worker may raise.
        refusals: a pull may be refused while its worker runs.
        clears: a published value may go while a peer may still ask for it.
        answers: an answer may change what was asked for by another number.
        afterlife: the forward may touch what is left of a request of which it has said done.
    """

    deaths: bool = False
    raises: bool = False
    refusals: bool = False
    clears: bool = False
    answers: bool = False
    afterlife: bool = False


class Notes:
    """The touches of one step on one rank.

    Entered, it notes what the step inside touches.
    """

    def __init__(self, core: Core, link: Link) -> None:
        self.core = core
        self.touches: list[Touch] = []
        # The requests of which this rank had said done when the step began.
        self._over: set[str] = set()
        _watch(core, link)

    def __enter__(self) -> Notes:
        global _noted
        requests = dict.items(self.core._requests)
        self._over = {name for name, state in requests if _SAID_DONE.__get__(state)}
        _noted = self.touches = []
        return self

    def __exit__(self, *exc: object) -> None:
        global _noted
        _noted = None

    def private(self, grants: Grants) -> bool:
        """Whether the forward's step that was noted commutes with all that listeners do before it.

        Raises:
            Granted: it did what is taken for granted not to happen.
        """
        for table, request, _, _, _ in self.touches:
            if table == "cleared" and not grants.clears:
                raise Granted("clears")
            if table in _OF_REQUEST and request in self._over and not grants.afterlife:
                raise Granted("afterlife")
        asked = dict.keys(self.core._asked)
        fresh = {
            key for table, _, key, changed, there in self.touches
            if table == "asked" and changed and not there
        }  # fmt: skip
        made = {
            key for table, _, key, changed, there in self.touches
            if table == "requests" and changed and not there
        }  # fmt: skip
        for table, request, key, changed, there in self.touches:
            match table:
                case "asked":
                    # A listener takes out what is answered, and puts nothing in.
                    if key is ALL or (there and key not in fresh):
                        return False
                case "landed" | "refused" | "origins" | "ahead":
                    # Only the answer to a pull that is under way changes what is here.
                    if key is ALL or (key in asked and key not in fresh):
                        return False
                case "requests":
                    # Made by whoever comes first, alike; goes once this rank has said done.
                    if key is ALL or (changed and there) or (there and self._done(key)):
                        return False
                    if not there and key not in made:
                        return False
                case "abandoned":
                    if grants.raises or changed:
                        return False
                case "dead":
                    if grants.deaths or changed:
                        return False
                case "held":
                    state = dict.get(self.core._requests, request)
                    below = range(self.core.stage)
                    if grants.deaths or changed or state is None:
                        return False
                    if not all(dict.__contains__(state.held, peer) for peer in below):
                        return False
                case "workers":
                    # Listeners look for a worker,
                    if changed:
                        return False
                case "worker":
                    # for whether it has finished, and when it has for what it touched.
                    if changed or (key == "touched" and grants.refusals):
                        return False
                case "request":
                    if changed and key != "ended":
                        return False
                case _:
                    return False
        return True

    def _done(self, request: str) -> bool:
        state = dict.get(self.core._requests, request)
        return state is None or _SAID_DONE.__get__(state)

    def check(self, grants: Grants, message: Message | None) -> None:
        """A step of a listener was noted: it must stay away from what is taken for the forward's.

        Args:
            message: what it took; None for a peer's death.

        Raises:
            Granted: it did what is taken for granted not to happen.
            Unsound: it did not stay away.
        """
        number = getattr(message, "number", None)
        for table, request, key, changed, _ in self.touches:
            if table == "cleared" and not grants.clears:
                raise Granted("clears")
            answers = (
                table in ("asked", "landed", "refused", "ahead") and changed and message is not None
            )
            if answers and key != number and not grants.answers:
                raise Granted("answers")
            if table == "request" and (changed or key == "ended"):
                raise Unsound(f"a listener touches {key!r} of {request!r}")
            if table in ("worker", "workers") and changed:
                raise Unsound(f"a listener changes a worker's {key!r}")
            if key == "touched" and not grants.refusals and not _FINISHED.__get__(request):
                raise Granted("refusals")


class _Table(dict[Any, Any]):
    """A dictionary that notes who touches it."""

    __slots__ = ("name", "request")
    unordered = True

    def __init__(self, name: str, request: str, held: dict[Any, Any]) -> None:
        super().__init__(held)
        self.name, self.request = name, request

    def _note(self, key: Any, changed: bool) -> None:
        if _noted is not None:
            there = key is ALL or dict.__contains__(self, key)
            _noted.append((self.name, self.request, key, changed, there))

    def __getitem__(self, key: Any) -> Any:
        self._note(key, False)
        return dict.__getitem__(self, key)

    def __contains__(self, key: Any) -> bool:
        self._note(key, False)
        return dict.__contains__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key, False)
        return dict.get(self, key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(key, True)
        dict.__setitem__(self, key, _converted(key, value))

    def _leaves(self, *values: Any) -> None:
        """Entries leave a buffer: note it where a peer may still ask for one."""
        if _noted is not None and any(entry.peers for entry in values):
            _noted.append(("cleared", self.request, ALL, True, True))

    def __delitem__(self, key: Any) -> None:
        self._note(key, True)
        if self.name == "buffer":
            self._leaves(dict.__getitem__(self, key))
        elif self.name == "requests":
            self._leaves(*dict.values(dict.__getitem__(self, key).buffer))
        dict.__delitem__(self, key)

    def pop(self, key: Any, *default: Any) -> Any:
        self._note(key, True)
        if self.name == "buffer" and dict.__contains__(self, key):
            self._leaves(dict.__getitem__(self, key))
        return dict.pop(self, key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._note(key, True)
        return dict.setdefault(self, key, default)

    def clear(self) -> None:
        self._note(ALL, True)
        if self.name == "buffer":
            self._leaves(*dict.values(self))
        dict.clear(self)

    def __iter__(self) -> Iterator[Any]:
        self._note(ALL, False)
        return dict.__iter__(self)

    def __len__(self) -> int:
        self._note(ALL, False)
        return dict.__len__(self)

    def keys(self) -> Any:
        self._note(ALL, False)
        return dict.keys(self)

    def values(self) -> Any:
        self._note(ALL, False)
        return dict.values(self)

    def items(self) -> Any:
        self._note(ALL, False)
        return dict.items(self)


class _Ordered(_Table):
    """One whose order shows in the order of messages."""

    __slots__ = ()
    unordered = False


class _Members(set[Any]):
    """A set that notes who touches it."""

    __slots__ = ("name", "request")

    def __init__(self, name: str, request: str, held: set[Any]) -> None:
        super().__init__(held)
        self.name, self.request = name, request

    def _note(self, changed: bool) -> None:
        if _noted is not None:
            _noted.append((self.name, self.request, ALL, changed, True))

    def add(self, member: Any) -> None:
        self._note(True)
        set.add(self, member)

    def discard(self, member: Any) -> None:
        self._note(True)
        set.discard(self, member)

    def __contains__(self, member: Any) -> bool:
        self._note(False)
        return set.__contains__(self, member)

    def __iter__(self) -> Iterator[Any]:
        self._note(False)
        return set.__iter__(self)

    def issuperset(self, *others: Any) -> bool:
        self._note(False)
        return set.issuperset(self, *others)

    def __rsub__(self, other: Any) -> Any:
        self._note(False)
        return set(other) - set(set.__iter__(self))


_SAID_DONE = _Request.__dict__["said_done"]
_FINISHED = _Worker.__dict__["finished"]


def _field(kind: type, table: str, name: str) -> property:
    slot = kind.__dict__[name]

    def read(self: Any) -> Any:
        if _noted is not None:
            _noted.append((table, self, name, False, True))
        return slot.__get__(self)

    def write(self: Any, value: Any) -> None:
        if _noted is not None:
            _noted.append((table, self, name, True, True))
        slot.__set__(self, value)

    return property(read, write)


class _NotedRequest(_Request):
    __slots__ = ()
    said_done = _field(_Request, "request", "said_done")
    ended = _field(_Request, "request", "ended")


class _NotedWorker(_Worker):
    __slots__ = ()
    finished = _field(_Worker, "worker", "finished")
    touched = _field(_Worker, "worker", "touched")


def _converted(key: Any, value: Any) -> Any:
    if type(value) is _Worker:
        value.__class__ = _NotedWorker
    elif type(value) is _Request:
        value.buffer = _Table("buffer", key, value.buffer)
        value.waiting = _Ordered("waiting", key, value.waiting)
        value.released = _Table("released", key, value.released)
        value.held = _Table("held", key, value.held)
        value.workers = _Table("workers", key, value.workers)
        value.done = _Members("done", key, value.done)
        value.__class__ = _NotedRequest
    return value


def _watch(core: Core, link: Link) -> None:
    """Put the noting tables in the place of the plain ones."""
    core._requests = _Table("requests", "", core._requests)
    core._asked = _Table("asked", "", core._asked)
    core._ahead = _Table("ahead", "", core._ahead)
    core.dead = _Members("dead", "", core.dead)
    for name in ("landed", "refused", "origins", "abandoned"):
        setattr(link, name, _Table(name, "", getattr(link, name)))
