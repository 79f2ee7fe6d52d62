"""Symptoms and cures: the text of every error that is raised on purpose leads to a row of the page."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ppcore import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/symptoms.md").read_text(encoding="utf-8")

CLASSES = {
    name
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, errors.PPError)
}
#: What the core refuses a pull with: the word before the colon names the class.
REFUSALS = re.compile(r"^(diverged|unreachable|died): ")
#: So many words of a text in a row, or all that stand together, are what a reader searches for.
WORDS = 4
#: Raised to unwind a worker; what is told is another rank's error.
UNSEEN = "ended by another rank"


class Text(NamedTuple):
    """An error's text in the source: the literal pieces between its values."""

    where: str
    pieces: tuple[str, ...]


def pieces(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if isinstance(node, ast.JoinedStr):
        return tuple(
            part.value
            for part in node.values
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
    return ()


def texts(path: Path) -> Iterator[Text]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found: tuple[str, ...] = ()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id in CLASSES:
                found = pieces(node.args[0])
        elif isinstance(node, ast.JoinedStr) and REFUSALS.match("".join(pieces(node)[:1])):
            found = (REFUSALS.sub("", pieces(node)[0]), *pieces(node)[1:])
        if any(len(piece.split()) > 1 for piece in found) and found != (UNSEEN,):
            yield Text(f"{path.relative_to(ROOT)}:{node.lineno}", found)


TEXTS = [text for path in sorted((ROOT / "ppcore").rglob("*.py")) for text in texts(path)]


def symptoms() -> list[str]:
    """The first cell of every row."""
    return [
        re.split(r"(?<!\\) \| ", row.strip("| "))[0]
        for row in PAGE.splitlines()
        if row.startswith("| ") and not row.startswith("| ---")
    ]


def leads_to_a_row(text: Text) -> bool:
    said = [cell.replace("`", "") for cell in symptoms()]
    searched = [piece.strip(" ();:,").split() for piece in text.pieces]
    length = min(WORDS, max(map(len, searched)))
    runs = [
        " ".join(words[first : first + length])
        for words in searched
        for first in range(len(words) - length + 1)
    ]
    return any(run in cell for run in runs for cell in said)


def test_the_texts_are_found() -> None:
    assert len(TEXTS) > 30
    assert not leads_to_a_row(Text("", ("a text that nobody wrote down",)))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.where)
def test_the_text_of_an_error_leads_to_a_row(text: Text) -> None:
    assert leads_to_a_row(text), text.pieces


def test_every_class_of_errors_that_reaches_a_user_has_a_row() -> None:
    concrete = {
        name
        for name in CLASSES
        if not any(
            issubclass(found, getattr(errors, name)) and found.__name__ != name
            for found in vars(errors).values()
            if inspect.isclass(found)
        )
    }
    assert concrete >= {"Diverged", "Missed", "PeerDied", "SetupError"}
    assert [name for name in sorted(concrete) if f"`{name}: " not in PAGE] == []
