"""How a run can fail: one class, and one exit code, for each kind of wrongness."""

from __future__ import annotations


class Failure(Exception):
    """A property does not hold.

    Attributes:
        name: the property's name.
        text: what was seen.
        code: the exit code of `ppsim` for this class of failure.
    """

    code = 1

    def __init__(self, name: str, text: str, cause: BaseException | None = None) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text
        self.cause = cause


class Crash(Failure):
    """The code under test raised, or broke one of its own invariants."""

    code = 3


class Liveness(Failure):
    """Something that has to happen does not: a hang, a wait against the rule."""

    code = 4


class Sameness(Failure):
    """The outcome is not the one of a single rank."""

    code = 5


class Leak(Failure):
    """Something is left that nobody can use, or crossed more often than needed."""

    code = 6
