"""The table of features names tests that exist, and errors that the source has."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/features.md").read_text()
CELLS = {"yes", "refused", "as one", "no test"}


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the rows of every table with this in its first line."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        head, _, *body = table.splitlines()
        if heading in head:
            for row in body:
                yield [cell.strip() for cell in row.strip("|").split(" | ")]


def names() -> list[str]:
    shown = [row[-1] for row in [*rows("shown by")]]
    return [name for cell in shown for name in re.findall(r"`([^`]+)`", cell)]


def functions(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef)}


def exists(name: str) -> bool:
    if "::" not in name:
        files = (ROOT / "ppcore/vllm/traces").glob("*.py")
        return name in set().union(*map(functions, files))
    if name.startswith("upstream/"):
        lists = (ROOT / "tests/upstream").glob("pp*_fit.txt")
        return any(name.removeprefix("upstream/") in path.read_text().split() for path in lists)
    file, _, test = name.partition("::")
    path = ROOT / "tests" / file
    return path.is_file() and test in functions(path)


def test_every_row_says_what_it_is_on_each_layout_and_by_which_test() -> None:
    found = list(rows("PP=1"))
    assert len(found) > 30
    for feature, *cells, shown in found:
        assert len(cells) == 4 and set(cells) <= CELLS, feature
        assert "`" in shown, feature


def test_every_test_that_is_named_exists() -> None:
    assert len(names()) > 50
    assert [name for name in names() if not exists(name)] == []
    assert not exists("engine/test_bad_input.py::test_that_nobody_wrote") and not exists("nothing")


def test_every_text_that_is_quoted_is_in_the_source() -> None:
    folders = [ROOT / "ppcore"]
    nnsight = importlib.util.find_spec("nnsight")
    if nnsight is None:
        pytest.skip("nnsight is not installed, and some of the errors are its own")
    folders += map(Path, nnsight.submodule_search_locations or ())
    # Texts go over several literals in the source: what stands between two of them is left out.
    source = "".join(p.read_text() for folder in folders for p in folder.rglob("*.py"))
    source = re.sub(r'"\s*f?"', "", source)
    quoted = [re.findall(r'"([^"]+)"', row[-1]) for row in rows("| refused | text")]
    quoted += [re.findall(r'"([^"]+)"', row[2]) for row in rows("| | one stage")]
    texts = [text for found in quoted for text in found]
    assert len(texts) >= 8
    assert [text for text in texts if text not in source] == []
