"""A part of a page that a command makes anew, between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def replaced(page: str, begin: str, end: str, part: str) -> str:
    """The page with ``part`` for what stands between the marks ``begin`` and ``end``.

    Raises:
        ValueError: the page has no such part.
    """
    before, begins, rest = page.partition(begin)
    _, ends, after = rest.partition(end)
    if not (begins and ends):
        raise ValueError(f"the page has no part between {begin!r} and {end!r}")
    return f"{before}{begin}{part}{end}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
