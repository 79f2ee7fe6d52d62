"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. A problem stops an engine from working; a note does not."""

    name: str
    status: Status
    says: str
    #: What to do about it; "" where nothing has to be done.
    cure: str = ""
    #: The same as numbers and names, for `--json`.
    data: dict[str, Any] = field(default_factory=dict)


def ok(name: str, says: str, **data: Any) -> Finding:
    return Finding(name, "ok", says, data=data)


def note(name: str, says: str, cure: str = "", **data: Any) -> Finding:
    return Finding(name, "note", says, cure, data)


def problem(name: str, says: str, cure: str, **data: Any) -> Finding:
    return Finding(name, "problem", says, cure, data)
