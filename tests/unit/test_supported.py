"""docs/supported.md: its tables are those that `nox -s engine` ended with, and leave nothing out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.layouts.anatomy import ANATOMIES
from tests.layouts.engines import Table, filled, on_page
from tests.layouts.test_topologies import LAYOUTS, refused
from tests.layouts.test_topologies import TITLE as BY_LAYOUT

PAGE = (Path(__file__).resolve().parents[2] / "docs/supported.md").read_text(encoding="utf-8")
EMPTY = re.sub(r"(?<=```text\n).*?(?=```)", "", PAGE, flags=re.DOTALL)


def test_a_table_is_read_back_as_it_was_printed() -> None:
    table = Table()
    for row in ("llama", "a longer name (7,1)"):
        table.enter("a title of words", row, "reads", "ok")
        table.enter("a title of words", row, "seconds", "12")
    table.enter("another", "mamba2", "reads", "refused: in words, which are a note below the table")
    read = Table.read(table.lines())
    table.enter("another", "mamba2", "reads", "refused")
    assert read.cells == table.cells


def test_a_page_takes_new_rows_and_keeps_the_others() -> None:
    first, second = Table(), Table()
    first.enter("title", "old", "reads", "differs")
    first.enter("title", "other", "reads", "ok")
    second.enter("title", "old", "reads", "ok")
    second.enter("title", "begun", "another", "ok")
    third = Table()
    third.enter("title", "old", "reads", "ok")
    assert filled(filled(EMPTY, first), second) == filled(EMPTY, first)
    page = filled(filled(EMPTY, first), third)
    assert on_page(page).cells == {"title": {"old": {"reads": "ok"}, "other": {"reads": "ok"}}}
    assert page.partition("```text")[0] == PAGE.partition("```text")[0]


def complete(found: Iterable[str], names: Iterable[str]) -> None:
    """A row that the page still lacks is no failure, and is not passed over in silence."""
    wanted, there = set(names), set(found)
    assert there <= wanted, "run, and not any more among those that are"
    if there < wanted:
        pytest.skip(f"not run yet: {', '.join(sorted(wanted - there))}; nox -s engine -- --page")


def test_every_architecture_was_run_with_every_kind_of_trace() -> None:
    pytest.importorskip("nnsight")
    from tests.layouts.probes import PROBES
    from tests.layouts.test_architectures import TITLE

    found = on_page(PAGE).cells.get(TITLE, {})
    for architecture, cells in found.items():
        seconds = cells.pop("seconds")
        assert float(seconds) > 0 and cells == dict.fromkeys(PROBES, "ok"), architecture
    complete(found, ANATOMIES)


def test_every_layout_was_run_with_the_whole_catalogue() -> None:
    pytest.importorskip("nnsight")
    from ppcore.vllm.traces import CATALOGUE

    found = on_page(PAGE).cells.get(BY_LAYOUT, {})
    layouts = {str(layout): layout for layout in LAYOUTS}
    for layout, cells in found.items():
        asked = len(CATALOGUE) - len(refused(layouts[layout]))
        assert int(cells["traces"]) == int(cells["same"]) == asked, layout
        assert cells["differ"] == "0", layout
    complete(found, map(str, LAYOUTS))


def test_the_page_says_what_is_special_of_every_architecture() -> None:
    text = PAGE.partition("## Architectures")[2].partition("## What was run")[0]
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \|", text, re.MULTILINE)
    said = [name for row in rows for name in row.split(", ") if name != "model type"]
    assert set(said) == {*ANATOMIES, "mamba2"} and len(said) == len(set(said))
