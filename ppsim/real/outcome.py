"""What came home of a request, in a form that compares: the same on every executor, or a difference."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nnsight.intervention.cache import CacheView


@dataclass(frozen=True)
class Error:
    """How a request failed.

    Attributes:
        kind: the exception's type.
        text: the first line of its message.
        line: the line of the block that raised.
    """

    kind: str
    text: str
    line: int

    @classmethod
    def of(cls, deferred: Mapping[str, Any] | None) -> Error | None:
        """An error as nnsight carries it home; a ``tracer.stop()`` is none."""
        if not deferred or deferred.get("is_control_flow"):
            return None
        lines = re.findall(r'"<edit-\d+>", line (\d+)', deferred.get("traceback", ""))
        text = (str(deferred.get("message", "")).splitlines() or [""])[0]
        return cls(deferred.get("type_name", ""), text, int(lines[-1]) if lines else 0)


@dataclass(frozen=True)
class Outcome:
    """What the client gets of a request.

    Attributes:
        saves: name -> value, of the traced block and, prefixed, of registered ones.
        warned: the warnings, of each stage that gave any account.
    """

    saves: Mapping[str, Any]
    error: Error | None
    tokens: Sequence[int]
    warned: Sequence[tuple[str, ...]]


def outcome_of(
    entry: Mapping[str, Any], tokens: Sequence[int], warned: Sequence[tuple[str, ...]]
) -> Outcome:
    """The outcome from the entry that nnsight attaches to a request's output."""
    saves = dict(entry.get("saves", {}))
    saves |= {f"registered {name}": value for name, value in entry.get("registered", {}).items()}
    return Outcome(saves, Error.of(entry.get("error")), list(tokens), list(warned))


def difference(found: Outcome, expected: Outcome) -> str | None:
    """Where ``found`` is not ``expected``, the reference's; None where they agree.

    A client of a failed request is raised the error and gets no saves.
    """
    if found.error != expected.error:
        return f"ends with {found.error}, on one rank {expected.error}"
    if expected.error is not None:
        return None
    if set(found.saves) != set(expected.saves):
        return f"saves {sorted(found.saves)}, on one rank {sorted(expected.saves)}"
    for name, value in expected.saves.items():
        wrong = _unequal(found.saves[name], value, name)
        if wrong is not None:
            return wrong
    if list(found.tokens) != list(expected.tokens):
        return f"samples {list(found.tokens)}, on one rank {list(expected.tokens)}"
    odd = [warned for warned in found.warned if list(warned) != list(expected.warned[0])]
    if odd:
        return f"warns of {odd[0]}, on one rank of {expected.warned[0]}"
    return None


def _unequal(found: Any, expected: Any, where: str) -> str | None:
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{where} is {found!r}, on one rank {_show(expected)}"
        same = (
            found.shape == expected.shape
            and found.dtype == expected.dtype
            and torch.equal(found, expected)
        )
        return None if same else f"{where} is {_show(found)}, on one rank {_show(expected)}"
    if isinstance(expected, list | tuple):
        if not isinstance(found, type(expected)) or len(found) != len(expected):
            size = len(found) if isinstance(found, list | tuple) else found
            return f"{where} has {size} items, on one rank {len(expected)}"
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            wrong = _unequal(one, other, f"{where}[{number}]")
            if wrong is not None:
                return wrong
        return None
    if isinstance(expected, CacheView):
        entries = expected._cache.entries
        theirs = found._cache.entries if isinstance(found, CacheView) else {}
        # A module that was skipped at first stands where it first ran on one rank, and in its place in
        # the model on several; a recording is looked up by path.
        if set(theirs) != set(entries):
            return f"{where} records {list(theirs)}, on one rank {list(entries)}"
        return _unequal(
            [list(map(vars, theirs[p])) for p in entries],
            [list(map(vars, entries[p])) for p in entries],
            where,
        )
    if isinstance(expected, dict):
        if not isinstance(found, dict) or list(found) != list(expected):
            return f"{where} is {found!r}, on one rank {expected!r}"
        return _unequal(list(found.values()), list(expected.values()), where)
    return None if found == expected else f"{where} is {found!r}, on one rank {expected!r}"


def _show(value: torch.Tensor) -> str:
    return f"{value.dtype} {value.tolist()}".removeprefix("torch.")
