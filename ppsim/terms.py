"""Values as symbols: what a tensor would be, by how it came about.

A *term* is an integer made of an operation and the terms it was applied to, so two values are equal
exactly when they came about alike (up to a collision of 61-bit hashes). A read taken before an edit
instead of after it is then a different number, and not a small difference of floats.

Terms are hashes of tuples of integers, which Python does not randomize: the same run gives the same
terms in every process. [`explain`][ppsim.terms.explain] says how a term came about, for reports, when
recording was on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Operations of the model.
EMBED: Final = 0
LAYER: Final = 1
LOGITS: Final = 2
SAMPLE: Final = 3
SHARED: Final = 4
RECOMPUTE: Final = 5
RESULT: Final = 6
CALL: Final = 7
# Operations of a block.
EDIT: Final = 8
MIX: Final = 9
DERIVE: Final = 10
# A module's parameter.
PARAM: Final = 11

_NAMES = "embed layer logits sample shared recompute result call edit mix derive param".split()

_recorded: dict[int, tuple[int, ...]] | None = None


def term(*parts: int) -> int:
    """The term of an operation (its number first) on constants and other terms."""
    made = hash(parts)
    if _recorded is not None:
        _recorded[made] = parts
    return made


def truth(value: int) -> bool:
    """What a block that branches on a value sees."""
    return bool((value >> 7) & 1)


def is_recording() -> bool:
    """Whether how terms come about is remembered."""
    return _recorded is not None


@contextmanager
def recording() -> Iterator[None]:
    """Remember how terms come about while this is entered."""
    global _recorded
    before, _recorded = _recorded, {}
    try:
        yield
    finally:
        _recorded = before


def explain(value: int, depth: int = 6) -> str:
    """How a term came about, as nested calls; a bare number where that was not recorded."""
    parts = (_recorded or {}).get(value)
    if parts is None:
        return str(value) if abs(value) < 1000 else f"~{value & 0xFFFF:04x}"
    if depth == 0:
        return "..."
    inner = ", ".join(explain(part, depth - 1) for part in parts[1:])
    return f"{_NAMES[parts[0]]}({inner})"
