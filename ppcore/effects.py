"""What the core tells its driver to do: send, evaluate, hand over, end, forget.

Effects are carried out in the order in which the core returned them, before it decides anything else,
so that messages leave in the order of its decisions. Only what takes a while, evaluating a value to
send or a module, is done afterwards: `Serve`, `Describe` and `Compute`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .messages import Key, Message, Worker


class Send(NamedTuple):
    """Send ``message`` to the rank of stage ``peer``, with the payload ``token`` if there is one."""

    peer: int
    message: Message
    token: Any = None


class Serve(NamedTuple):
    """Evaluate ``expression`` on ``token`` and send the result to ``peer`` as reply ``number``."""

    peer: int
    number: int
    key: Key
    expression: str
    token: Any


class Describe(NamedTuple):
    """Find out what structure ``call`` would return and send it to ``peer`` as reply ``number``."""

    peer: int
    number: int
    call: str


class Compute(NamedTuple):
    """Call the module at ``location`` and tell the core the result: it is the value of ``key``.

    It is done on the thread that took the message, before that takes another one: the forward's own
    thread may be inside the engine, and the stage ``peer`` may wait for the result.
    """

    peer: int
    key: Key
    location: str
    call: str
    token: Any
    of: tuple[Any, ...]


class Landed(NamedTuple):
    """Pull or probe ``number`` is answered: a payload (``token``) or, where ``reason`` is set, never."""

    number: int
    token: Any = None
    reason: str | None = None


class Abandoned(NamedTuple):
    """``worker`` raised on another rank before its access ``access``.

    It ends here with that error once it has got as far itself, or its request has ended. A block that
    raises everywhere raises by itself then, at the same line; ending it sooner would let the ranks
    of different columns, or what the forward was given, part ways.
    """

    worker: Worker
    access: int
    error: str


class Dropped(NamedTuple):
    """Nothing is left of ``request`` on this rank."""

    request: str


Effect = Send | Serve | Describe | Compute | Landed | Abandoned | Dropped
